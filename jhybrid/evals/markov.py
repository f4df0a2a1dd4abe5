"""An order-3 Markov model of bytes: the baseline a trained language model must beat.

    p(b | three bytes before) = (count(context, b) + 0.01) / (count(context) + 0.01 * 256)

Run: python -m jhybrid.evals.markov [--checkpoint DIR]
"""

from collections.abc import Sequence

import numpy as np

from jhybrid.checkpoint import load_model
from jhybrid.commandline import Parser, run
from jhybrid.config import DataConfig
from jhybrid.data import load_tokenizer
from jhybrid.evals import text
from jhybrid.evals.perplexity import perplexity, scorer
from pallas_kernels.array_types import Int

ORDER = 3
SMOOTHING = 0.01
MAX_TOKENS = 1 << 24  # of each split


def _grams(documents: Sequence[str]) -> Int[np.ndarray, "n"]:
    """context * 256 + byte for every byte; documents start after three zero bytes."""
    parts = []
    for document in documents:
        data = np.frombuffer(bytes(ORDER) + document.encode(), np.uint8).astype(np.int64)
        gram = np.zeros(len(data) - ORDER, np.int64)
        for offset in range(ORDER + 1):
            gram = gram * 256 + data[offset : offset + len(gram)]
        parts.append(gram)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _lookup(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, counts[places], 0)


def bits_per_byte(train: Sequence[str], validation: Sequence[str]) -> float:
    """Mean -log2 p over the bytes of `validation`, with counts from `train`."""
    fitted, wanted = _grams(train), _grams(validation)
    joint = _lookup(*np.unique(fitted, return_counts=True), wanted)
    context = _lookup(*np.unique(fitted // 256, return_counts=True), wanted // 256)
    return float(-np.mean(np.log2((joint + SMOOTHING) / (context + SMOOTHING * 256))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="markov", description="Compare bits/byte with an order-3 Markov model.")
    parser.add_argument("--checkpoint", help="a workdir or an export; its text is used")
    options = parser.parse_args(argv)
    model, data, name = None, DataConfig(), ""
    if options.checkpoint is not None:
        experiment, model = load_model(options.checkpoint)
        data, name = experiment.data, experiment.name
    tokenizer = load_tokenizer(data.tokenizer)
    train, validation = (
        text.config_documents(data, split, tokenizer, MAX_TOKENS)
        for split in ("train", "validation")
    )
    fitted, measured = ([tokenizer.decode(ids) for ids in part] for part in (train, validation))
    sizes = [sum(len(document.encode()) for document in part) for part in (fitted, measured)]
    print(f"fitted on {sizes[0]:,} training bytes, measured on {sizes[1]:,} validation bytes")
    baseline = bits_per_byte(fitted, measured)
    print(f"order-{ORDER} byte Markov model, add-{SMOOTHING}: {baseline:.4f} bits/byte")
    if model is not None:
        row = perplexity(
            scorer(model),
            np.concatenate(validation),
            tokenizer.byte_lengths,
            length=data.sequence_length,
            batch_size=8,
        )
        found = row.get("result") or f"{row['bits_per_byte']:.4f} bits/byte"
        print(f"{name} at context {data.sequence_length}: {found}")
    return 0


if __name__ == "__main__":
    run(main)
