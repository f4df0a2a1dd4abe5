"""Packing: every token once per epoch, documents aligned, targets inside the document."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jhybrid.data.packing import PackingPlan, pack_sizes
from jhybrid.data.rows import PackedRows
from jhybrid.data.stores import TokenRange

PAD = 0


class NumberedStore:
    """Documents whose ids are all different, so that every token can be recognised."""

    fingerprint = "numbered"

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def read(self, document, start, stop):
        first = int(self._starts[document]) + 1
        stop = min(stop, int(self.lengths[document]))
        return np.arange(first + start, first + stop, dtype=np.int32)

    def document(self, index):
        return self.read(index, 0, int(self.lengths[index]))


def rows_of(lengths, row_tokens=32, alignment=8, seed=0):
    store = NumberedStore(lengths)
    return store, PackedRows(store, row_tokens, alignment, seed=(seed,), pad=PAD, name="numbers")


LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40).filter(lambda x: max(x) > 1)
SHAPES = st.sampled_from([(32, 8), (64, 64), (30, 8), (20, 64), (17, 1)])


@given(LENGTHS, SHAPES, st.integers(0, 3))
def test_every_token_is_read_once_and_predicted_once_per_epoch(lengths, shape, epoch):
    store, rows = rows_of(lengths, *shape)
    read, predicted = [], []
    for i in range(len(rows) * epoch, len(rows) * (epoch + 1)):
        row = rows[i]
        read += row["tokens"][row["segment_ids"] >= 0].tolist()
        predicted += row["targets"][row["targets"] >= 0].tolist()
    documents = [store.document(i) for i in range(len(lengths))]
    assert sorted(read) == [t for ids in documents for t in ids[:-1]]
    assert sorted(predicted) == [t for ids in documents for t in ids[1:]]


@given(LENGTHS, SHAPES)
def test_segments_are_aligned_contiguous_and_predict_their_own_next_token(lengths, shape):
    row_tokens, alignment = shape
    _, rows = rows_of(lengths, row_tokens, alignment)
    ends = set(np.cumsum(lengths).tolist())
    for row in (rows[i] for i in range(len(rows))):
        assert all(row[name].shape == (row_tokens,) for name in row)
        assert all(row[name].dtype == np.int32 for name in row)
        segments = row["segment_ids"]
        assert set(np.unique(segments[segments >= 0])) == set(range(segments.max() + 1))
        for segment in range(segments.max() + 1):
            (columns,) = np.nonzero(segments == segment)
            assert columns[0] % alignment == 0
            assert np.array_equal(columns, np.arange(columns[0], columns[-1] + 1))
            tokens = row["tokens"][columns]
            assert np.array_equal(row["positions"][columns], np.arange(len(columns)))
            assert np.array_equal(row["targets"][columns], tokens + 1)
            assert not ends & set(tokens.tolist())
        padding = segments < 0
        assert np.all(row["tokens"][padding] == PAD)
        assert np.all(row["targets"][padding] == -1)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=13), st.integers(12, 20))
def test_bins_hold_every_piece_and_never_overflow(counts, capacity):
    counts[0] = 0
    bins = pack_sizes(counts, capacity)
    held = collections.Counter()
    for sizes, number in bins:
        assert number > 0 and sum(size * n for size, n in sizes.items()) <= capacity
        for size, n in sizes.items():
            held[size] += n * number
    assert held == collections.Counter({size: n for size, n in enumerate(counts) if n})


@given(st.lists(st.integers(0, 30), min_size=2, max_size=13), st.integers(12, 20))
def test_all_bins_but_one_have_no_room_for_the_largest_piece(counts, capacity):
    counts[0] = 0
    bins = pack_sizes(counts, capacity)
    largest = max((size for size, n in enumerate(counts) if n), default=0)
    filled = [
        sum(size * n for size, n in sizes.items()) for sizes, number in bins for _ in range(number)
    ]
    assert sum(capacity - fill >= largest for fill in filled) <= 1


def test_documents_of_typical_lengths_waste_little_beyond_alignment():
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 20_000).astype(int) + 2
    plan = PackingPlan(lengths, 1024, 64, (0,))
    aligned = np.sum(-(-(lengths - 1) // 64) * 64)
    assert plan.padding < 0.05
    assert plan.rows * 1024 <= 1.01 * aligned


def test_epochs_shuffle_documents_differently_and_seeds_do_too():
    lengths = [9] * 64

    def order(seed, epoch):
        _, rows = rows_of(lengths, 8, 8, seed)
        return [int(rows[i]["tokens"][0]) for i in range(64 * epoch, 64 * (epoch + 1))]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(o) for o in orders}) == 3
    assert order(0, 1) == orders[1]


def test_a_document_of_one_token_is_never_placed():
    _, rows = rows_of([1, 5, 1])
    assert len(rows) == 1
    assert rows.plan.tokens == 4


def test_planning_costs_distinct_sizes_not_documents():
    plan = PackingPlan(np.full(1_000_000, 700), 1024, 64, (0,))
    assert plan.rows == 1_000_000
    assert len(plan.row(123_456_789)) == 1


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 11, 17])
def test_token_ranges_divide_a_store_at_any_token(cut):
    store = NumberedStore([5, 6, 6])
    parts = [TokenRange(store, 0, cut), TokenRange(store, cut, 17)]
    tokens = [
        token
        for part in parts
        for i, n in enumerate(part.lengths)
        for token in part.read(i, 0, int(n)).tolist()
    ]
    assert tokens == list(range(1, 18))
    assert sum(int(part.lengths.sum()) for part in parts) == 17
