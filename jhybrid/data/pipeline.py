"""From the data config to batches: mixture, batching, sharding over processes, exact resume.

Every row is a function of its index, so the state of training data is the number of batches taken.
It is the same in every process, and stays valid for another number of processes: batch i always
consists of the same rows, and each process takes a contiguous part of them.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from jhybrid.config import DataConfig, require
from jhybrid.data.rows import PackedRows, Row, SyntheticRows, assemble
from jhybrid.data.sources import is_synthetic, source_rows
from jhybrid.data.tokenizer import Tokenizer, load_tokenizer
from jhybrid.serialization import to_json

Batch = dict[str, np.ndarray]

# Held-out rows of a source that generates its documents.
SYNTHETIC_VALIDATION_ROWS = 64
# Rows until training data ends: never, yet few enough for Grain's floating-point lengths.
ENDLESS = 2**52
# Batches prepared ahead in threads of this process.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


def train_batches(
    config: DataConfig, *, process_index: int = 0, process_count: int = 1
) -> "BatchIterator":
    """Endless training batches of this process: int32 [batch_size / process_count, T] each.

    Sources are mixed row by row, so `weight` is a source's share of token positions (padding
    included), exact to one row in every prefix of the sequence.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    sources = [source_rows(config, i, "train", tokenizer) for i in range(len(config.sources))]
    endless = [rows.repeat() if isinstance(rows, PackedRows) else rows for rows in sources]
    mixed = grain.MapDataset.mix(endless, [source.weight for source in config.sources])[:ENDLESS]
    return BatchIterator(
        _process_batches(mixed, config, process_index, process_count),
        fingerprint=_fingerprint(config, tokenizer, sources),
        num_workers=config.num_workers,
        sources=sources,
    )


def validation_batches(
    config: DataConfig,
    *,
    sources: Sequence[int] | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "ValidationBatches":
    """The held-out part of the sources with these indices; the same batches on every call.

    The default is every source of real text, or all sources when there is none. Rows are shuffled,
    so the first batches are a fair sample. A batch also has "bytes": the UTF-8 bytes of each
    target token (0 without loss), so sum(loss) / log(2) / sum(bytes) is bits per byte. The last
    batch is filled up with rows of padding.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if sources is None:
        sources = [i for i, source in enumerate(config.sources) if not is_synthetic(source)]
    indices = sources or range(len(config.sources))
    chosen = [source_rows(config, i, "validation", tokenizer) for i in indices]
    held_out = [
        rows.slice(slice(SYNTHETIC_VALIDATION_ROWS)) if isinstance(rows, SyntheticRows) else rows
        for rows in chosen
    ]
    rows = grain.MapDataset.concatenate(held_out).shuffle(seed=config.seed)
    padding = assemble([], config.sequence_length, tokenizer.eos)
    missing = -len(rows) % config.batch_size
    if missing:
        filler = grain.MapDataset.source([padding] * missing)
        rows = grain.MapDataset.concatenate([rows, filler])
    rows = rows.map(lambda row: _with_bytes(row, tokenizer))
    return ValidationBatches(_process_batches(rows, config, process_index, process_count))


def _with_bytes(row: Row, tokenizer: Tokenizer) -> Row:
    targets = row["targets"]
    lengths = tokenizer.byte_lengths[np.maximum(targets, 0)]
    return {**row, "bytes": np.where(targets >= 0, lengths, 0).astype(np.int32)}


def _process_batches(
    rows: grain.MapDataset, config: DataConfig, process_index: int, process_count: int
) -> grain.MapDataset:
    """This process's contiguous part of every global batch."""
    require(
        0 <= process_index < process_count and config.batch_size % process_count == 0,
        f"data.batch_size={config.batch_size} must be a multiple of the {process_count} processes",
    )
    parts = rows.batch(config.batch_size // process_count)
    return parts[process_index::process_count]


def _fingerprint(
    config: DataConfig, tokenizer: Tokenizer, sources: Sequence[PackedRows | SyntheticRows]
) -> str:
    """Changes with whatever changes the batches; not with where files are or who reads them."""
    settings = json.loads(to_json(config))
    for source in settings["sources"]:
        source.pop("paths", None)
    del settings["tokenizer"], settings["num_workers"]
    contents = [
        rows.store.fingerprint if isinstance(rows, PackedRows) else rows.fingerprint
        for rows in sources
    ]
    text = json.dumps(settings) + tokenizer.fingerprint + "".join(contents)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BatchIterator(grain.DatasetIterator[Batch]):
    """Training batches whose state is {"batches": taken so far, "fingerprint": of the data}.

    Threads of this process prepare the batches, or `num_workers` processes of Grain.
    """

    def __init__(
        self,
        dataset: grain.MapDataset[Batch],
        *,
        fingerprint: str,
        num_workers: int,
        sources: Sequence[PackedRows | SyntheticRows],
    ):
        super().__init__()
        self._batches: grain.DatasetIterator[Batch] | None = None
        require(
            num_workers == 0 or flags.FLAGS.is_parsed(),
            f"data.num_workers={num_workers}: Grain's worker processes need parsed absl flags; "
            "start the program through absl.app.run, or use data.num_workers=0",
        )
        self._dataset = dataset
        self._fingerprint = fingerprint
        self._num_workers = num_workers
        self.sources = tuple(sources)
        self._taken = 0

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        batch = next(self._batches)
        self._taken += 1
        return batch

    def _start(self) -> grain.DatasetIterator[Batch]:
        remaining = self._dataset[self._taken :].to_iter_dataset(READ_OPTIONS)
        if self._num_workers:
            options = grain.multiprocessing.MultiprocessingOptions(num_workers=self._num_workers)
            remaining = remaining.mp_prefetch(options)
        return iter(remaining)

    def get_state(self) -> dict[str, Any]:
        return {"batches": self._taken, "fingerprint": self._fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        require(
            state["fingerprint"] == self._fingerprint,
            "data: the checkpoint was made with other data (sources, files, weights, tokenizer, "
            "sequence length, batch size or seed); it cannot be continued exactly",
        )
        self.close()
        self._taken = int(state["batches"])

    def close(self) -> None:
        """Stops the threads or worker processes; the next batch starts them again."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def describe(self) -> str:
        """One line per source: its size, and what packing leaves empty."""
        return "\n".join(rows.describe() for rows in self.sources)


class ValidationBatches(Sequence[Batch]):
    """A finite list of batches, made when asked for."""

    def __init__(self, dataset: grain.MapDataset[Batch]):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return ValidationBatches(self._dataset[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._dataset[index % len(self)]
