"""Which documents share a row: histogram packing with random access.

Documents are cut into pieces of at most one row. A piece starts at a multiple of the alignment, so
it occupies a whole number of slots, and a row is a small bin. Bins are filled best-fit decreasing
over the histogram of piece sizes (Krell et al., arXiv 2107.02027): rows of the same make-up are
planned together, so planning costs the number of distinct sizes, not the number of documents.
The plan says how many pieces of each size a row holds; which pieces those are is a permutation of
every epoch. Any row of any epoch is therefore computed from its index alone: the position in the
data is one integer, whatever the number of processes.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle

from pallas_kernels.array_types import Int


def pack_sizes(
    counts: Sequence[int] | np.ndarray, capacity: int
) -> list[tuple[dict[int, int], int]]:
    """Bins for counts[s] pieces of s slots each, as (pieces per size, number of such bins).

    Sizes go from large to small, every piece into the fullest bin that still takes it.
    """
    bins_by_room: dict[int, list[tuple[dict[int, int], int]]] = {}

    def place(pieces: dict[int, int], room: int, bins: int) -> None:
        if bins:
            bins_by_room.setdefault(room, []).append((pieces, bins))

    for size in range(min(capacity, len(counts) - 1), 0, -1):
        left = int(counts[size])
        for room in sorted(r for r in bins_by_room if r >= size):
            fitting = room // size
            for pieces, bins in bins_by_room.pop(room):
                filled = min(bins, left // fitting)
                rest = min(left - filled * fitting, fitting - 1) if filled < bins else 0
                place({**pieces, size: fitting}, room - fitting * size, filled)
                place({**pieces, size: rest}, room - rest * size, 1 if rest else 0)
                place(pieces, room, bins - filled - (1 if rest else 0))
                left -= filled * fitting + rest
        fitting = capacity // size
        place({size: fitting}, capacity - fitting * size, left // fitting)
        rest = left % fitting
        place({size: rest}, capacity - rest * size, 1 if rest else 0)
    return [group for room in sorted(bins_by_room) for group in bins_by_room[room]]


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """Consecutive rows of one make-up."""

    first_row: int
    parts: tuple[tuple[int, int, int], ...]  # size, pieces per row, first place within the size


class PackingPlan:
    """Rows of `row_tokens` positions from documents of the given lengths.

    A document of L tokens gives L - 1 positions (each predicts the token after it) in
    ceil((L - 1) / row_tokens) pieces.
    """

    def __init__(
        self,
        lengths: Int[np.ndarray, "documents"],
        row_tokens: int,
        alignment: int,
        seed: tuple[int, ...],
    ):
        self.row_tokens = row_tokens
        self.alignment = alignment
        self._seed = seed
        positions = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
        pieces = -(-positions // row_tokens)
        self._first_piece = np.concatenate([[0], np.cumsum(pieces)])
        self._positions = positions
        self.tokens = int(positions.sum())
        self.documents = len(positions)

        # A piece too long for whole slots (the row is no multiple of the alignment) gets the row.
        capacity = max(row_tokens // alignment, 1)
        document = np.repeat(np.arange(len(positions)), pieces)
        start = (np.arange(len(document)) - self._first_piece[document]) * row_tokens
        piece_tokens = np.minimum(positions[document] - start, row_tokens)
        size = np.minimum(-(-piece_tokens // alignment), capacity)
        self._by_size = np.argsort(size, kind="stable").astype(np.uint32)
        self._counts = np.bincount(size, minlength=capacity + 1)
        self._first_of_size = np.concatenate([[0], np.cumsum(self._counts)])

        self.rows = 0
        self._patterns: list[_Pattern] = []
        used = np.zeros(capacity + 1, np.int64)
        for sizes, bins in pack_sizes(self._counts, capacity):
            parts = tuple((s, k, int(used[s])) for s, k in sizes.items())
            self._patterns.append(_Pattern(self.rows, parts))
            for s, k in sizes.items():
                used[s] += k * bins
            self.rows += bins
        self._first_rows = [pattern.first_row for pattern in self._patterns]

    @property
    def padding(self) -> float:
        """Share of positions that hold no document."""
        return 1 - self.tokens / max(self.rows * self.row_tokens, 1)

    def row(self, index: int) -> list[tuple[int, int, int, int]]:
        """Row `index` of the endless sequence of epochs: (document, start, stop, column) each.

        Positions start..stop of the document go to the columns from `column` on.
        """
        epoch, index = divmod(index, self.rows)
        seed = int(np.random.SeedSequence((*self._seed, epoch)).generate_state(1)[0])
        row = _shuffled(index, self.rows, seed)
        pattern = self._patterns[bisect.bisect_right(self._first_rows, row) - 1]
        placed, slot = [], 0
        for size, per_row, first in pattern.parts:
            for i in range(per_row):
                place = first + (row - pattern.first_row) * per_row + i
                place = _shuffled(place, int(self._counts[size]), (seed + size) % 2**32)
                piece = int(self._by_size[self._first_of_size[size] + place])
                placed.append((*self._extent(piece), slot * self.alignment))
                slot += size
        return placed

    def _extent(self, piece: int) -> tuple[int, int, int]:
        document = int(np.searchsorted(self._first_piece, piece, side="right")) - 1
        start = (piece - int(self._first_piece[document])) * self.row_tokens
        return document, start, min(start + self.row_tokens, int(self._positions[document]))


def _shuffled(index: int, length: int, seed: int) -> int:
    return index_shuffle(index, max_index=length - 1, seed=seed, rounds=4)
