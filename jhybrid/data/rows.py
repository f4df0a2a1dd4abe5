"""Rows of the training batch as random-access Grain datasets.

A row is a dict of int32 arrays [row_tokens]:
  tokens       token ids; the end-of-text id where there is no document
  targets      the next token of the same document; -1 where there is no loss
  segment_ids  0, 1, ... for the row's documents, -1 on padding
  positions    counted from the start of each document (or of its piece, if it was cut)
  prompt       1 on what routers of heads may read, 0 on answers and padding
  task         index in data.tasks of what the document asks; -1 for nothing
The last token of a document is only ever a target: nothing follows it.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np

from jhybrid.data.packing import PackingPlan
from pallas_kernels.array_types import Int

# Rows that stand for all when the padding of an endless source is reported.
SAMPLE_ROWS = 4

Row = dict[str, np.ndarray]


class Example(NamedTuple):
    """A document ready to be placed: what the model reads and what it should say."""

    tokens: Int[np.ndarray, "n"]
    targets: Int[np.ndarray, "n"]  # -1: no loss
    prompt: int | None = None  # tokens before the answer; None: all are prompt
    task: int = -1  # index in data.tasks


@runtime_checkable
class TokenStore(Protocol):
    """Documents as token ids, each ending with the end-of-text id."""

    lengths: Int[np.ndarray, "documents"]  # tokens of each, the end-of-text id included
    fingerprint: str  # of all ids

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        """Ids start..stop of one document, int32."""
        ...


@runtime_checkable
class ExampleGenerator(Protocol):
    """Endless synthetic documents."""

    length: int  # the most tokens an example can have
    fingerprint: str  # of what examples depend on besides the config

    def example(self, rng: np.random.Generator) -> Example: ...


def assemble(examples: Iterable[tuple[Example, int]], row_tokens: int, pad: int) -> Row:
    """Places each example at its column."""
    row = {
        "tokens": np.full(row_tokens, pad, np.int32),
        "targets": np.full(row_tokens, -1, np.int32),
        "segment_ids": np.full(row_tokens, -1, np.int32),
        "positions": np.zeros(row_tokens, np.int32),
        "prompt": np.zeros(row_tokens, np.int32),
        "task": np.full(row_tokens, -1, np.int32),
    }
    for segment, (example, column) in enumerate(examples):
        here = slice(column, column + len(example.tokens))
        row["tokens"][here] = example.tokens
        row["targets"][here] = example.targets
        row["segment_ids"][here] = segment
        row["positions"][here] = np.arange(len(example.tokens))
        row["prompt"][here][: example.prompt] = 1
        row["task"][here] = example.task
    return row


class PackedRows(grain.MapDataset[Row]):
    """Documents of a store, packed; index // len is the epoch, each shuffled differently."""

    def __init__(
        self,
        store: TokenStore,
        row_tokens: int,
        alignment: int,
        *,
        seed: tuple[int, ...],
        pad: int,
        name: str,
    ):
        super().__init__()
        self.store = store
        self.plan = PackingPlan(store.lengths, row_tokens, alignment, seed)
        self._name = name
        self._pad = pad

    def describe(self) -> str:
        plan = self.plan
        return (
            f"{self._name}: {plan.documents:,} documents, {plan.tokens:,} tokens, "
            f"{plan.rows:,} rows, {plan.padding:.1%} padding"
        )

    def __len__(self) -> int:
        return self.plan.rows

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        placed = [
            (self._example(document, start, stop), column)
            for document, start, stop, column in self.plan.row(index)
        ]
        return assemble(placed, self.plan.row_tokens, self._pad)

    def _example(self, document: int, start: int, stop: int) -> Example:
        ids = self.store.read(document, start, stop + 1)
        return Example(ids[:-1], ids[1:])


class SyntheticRows(grain.MapDataset[Row]):
    """Generated documents, as many per row as fit; row i is the same in every run."""

    def __init__(
        self,
        generator: ExampleGenerator,
        row_tokens: int,
        alignment: int,
        *,
        seed: tuple[int, ...],
        pad: int,
        name: str,
    ):
        super().__init__()
        slot = -(-generator.length // alignment) * alignment
        self._columns = [i * slot for i in range(max(row_tokens // slot, 1))]
        self.fingerprint = generator.fingerprint
        self._generator = generator
        self._row_tokens = row_tokens
        self._seed = seed
        self._name = name
        self._pad = pad

    def describe(self) -> str:
        padding = np.mean([self._row(i)["segment_ids"] < 0 for i in range(SAMPLE_ROWS)])
        return f"{self._name}: endless, {padding:.1%} padding"

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self._row(index)

    def _row(self, index: int) -> Row:
        rng = np.random.default_rng((*self._seed, index))
        placed = [(self._generator.example(rng), column) for column in self._columns]
        return assemble(placed, self._row_tokens, self._pad)
