"""The running text an evaluation reads: what a config trains on or holds out, or a file.

Documents are token arrays that end with the end-of-text token, as in training.
"""

import numpy as np

from jhybrid.config import DataConfig
from jhybrid.data import Tokenizer
from jhybrid.data.sources import is_synthetic, token_store
from jhybrid.data.stores import TextStore
from jhybrid.data.text import SUFFIXES, Split, find_files, read_documents
from jhybrid.errors import UserError
from pallas_kernels.array_types import Int

Document = Int[np.ndarray, "n"]


def config_documents(
    config: DataConfig, split: Split, tokenizer: Tokenizer, max_tokens: int
) -> list[Document]:
    """The documents of the config's text sources, in order, until `max_tokens` are reached."""
    found: list[Document] = []
    room = max_tokens
    for index, source in enumerate(config.sources):
        if is_synthetic(source):
            continue
        store = token_store(config, source, split, tokenizer, f"data.sources.{index}")
        for number, length in enumerate(store.lengths):
            if room <= 0:
                return found
            found.append(store.read(number, 0, min(int(length), room)))
            room -= len(found[-1])
    if not found:
        raise UserError("data.sources: no text to measure among them; give --text FILE")
    return found


def file_documents(path: str, tokenizer: Tokenizer) -> list[Document]:
    """The documents of a .txt or .jsonl file, or of its .gz, whole."""
    texts = [
        text for file in find_files([path], SUFFIXES, "--text") for text in read_documents(file)
    ]
    store = TextStore(texts, tokenizer)
    return [store.read(i, 0, int(length)) for i, length in enumerate(store.lengths)]
