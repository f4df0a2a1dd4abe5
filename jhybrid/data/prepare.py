"""Tokenizes text into ArrayRecord shards, from local files or streamed from the Hugging Face hub.

    python -m jhybrid.data.prepare --input texts/ more/*.jsonl.gz --tokenizer bpe4096 --out DIR
    python -m jhybrid.data.prepare --hf HuggingFaceFW/fineweb-edu --hf-name sample-10BT \\
        --tokenizer path/to/tokenizer.json --out DIR --max-documents 100000

Then data.sources=(TokenRecords(paths=("DIR",)),) with the same data.tokenizer. DIR appears when
everything is written; an interrupted run leaves nothing in its place.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

import numpy as np

from jhybrid.commandline import Parser, positive
from jhybrid.data.records import write_records
from jhybrid.data.stores import BATCH
from jhybrid.data.text import SUFFIXES, find_files, read_documents
from jhybrid.data.tokenizer import Tokenizer, load_tokenizer
from jhybrid.errors import UserError


def local_texts(paths: list[str], text_field: str) -> Iterator[str]:
    for file in find_files(paths, SUFFIXES, "--input"):
        yield from read_documents(file, text_field)


def hub_texts(name: str, subset: str | None, split: str, text_field: str) -> Iterator[str]:
    """Streams a dataset; nothing is downloaded beyond what is read."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]  (the extra `data`)
    except ImportError:
        raise UserError("--hf needs the package datasets: pip install 'jhybrid[data]'") from None
    try:
        for example in datasets.load_dataset(name, name=subset, split=split, streaming=True):
            text = example.get(text_field)
            if not isinstance(text, str):
                raise UserError(
                    f"--text-field {text_field!r} holds no text in {name}; "
                    f"fields: {', '.join(example)}"
                )
            yield text
    except UserError:
        raise
    except Exception as error:  # network, hub, name and format errors share no base class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--hf {name}: cannot be streamed ({reason[0]})") from None


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of every text that is not empty, encoded in batches, with progress on stderr."""
    texts = (text for text in texts if text)
    documents = tokens = 0
    while batch := list(itertools.islice(texts, BATCH)):
        for ids in tokenizer.encode_batch(batch):
            documents += 1
            tokens += len(ids)
            yield ids
        print(f"\r{documents:,} documents, {tokens:,} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m jhybrid.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--input", nargs="+", metavar="PATH", help="files, folders or globs")
    origin.add_argument("--hf", metavar="DATASET", help="name of a Hugging Face dataset")
    parser.add_argument("--hf-name", help="its configuration, where it has several")
    parser.add_argument("--split", default="train", help="its split (default: train)")
    parser.add_argument("--text-field", default="text", help="of .jsonl lines or of the dataset")
    parser.add_argument("--tokenizer", default="bpe4096", help="bpe4096, bytes or a tokenizer.json")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="new folder")
    parser.add_argument("--max-documents", type=positive, help="stop after so many")
    parser.add_argument("--shard-tokens", type=positive, default=100_000_000)
    options = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        if options.hf:
            texts = hub_texts(options.hf, options.hf_name, options.split, options.text_field)
        else:
            texts = local_texts(options.input, options.text_field)
        texts = itertools.islice(texts, options.max_documents)
        metadata = write_records(
            options.out, tokenize(texts, tokenizer), tokenizer, options.shard_tokens
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {metadata['documents']:,} documents, {metadata['tokens']:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
