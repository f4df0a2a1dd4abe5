"""Schedules of tiles against the dense expansion of the mask, by brute force."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockMask
from pallas_kernels.block_sparse_attention import schedule
from pallas_kernels.block_sparse_attention.cases import BY_NAME, Case, tagged
from pallas_kernels.block_sparse_attention.reference import scene, visibility


def met(visits: schedule.Visits, entries: int) -> np.ndarray:
    """[B, H, rows, entries]: how often each row visits each entry."""
    listed, rows = map(np.asarray, visits)
    counts = np.zeros((*rows.shape[:3], entries), int)
    for b, h, row in np.ndindex(rows.shape[:3]):
        start, count, first, length = rows[b, h, row]
        found = listed[b, h, min(row, listed.shape[2] - 1), start : start + count]
        found = [*found, *range(first, first + length)]
        assert found == sorted(found)
        np.add.at(counts[b, h, row], found, 1)
    return counts


def tiles_of(pairs: np.ndarray, tiling: schedule.Tiling) -> np.ndarray:
    """[B, H, T, S] -> [B, H, M, N]: tiles with a visible pair."""
    rest = [(0, -n % size) for n, size in zip(pairs.shape[2:], tiling, strict=True)]
    pairs = np.pad(pairs, ((0, 0), (0, 0), *rest))
    B, H, T, S = pairs.shape
    return pairs.reshape(B, H, T // tiling[0], tiling[0], S // tiling[1], tiling[1]).any((3, 5))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that short rows have several."""
    monkeypatch.setattr(schedule, "LARGEST_FREE_TILE", 32)


def schedules(case: Case, tiling: schedule.Tiling | None = None):
    """(visits by query and by key as counts, facts, tiling, dense visible pairs)."""
    _, fixed, _ = case.draw(jax.random.key(0), jnp.float32)
    B, T, S, H = case.B, case.T, case.S, case.H
    arrays = {name: fixed.get(name) for name in ("q_offset", "segment_ids", "kv_segment_ids")}
    tiling = tiling or schedule.tiling(fixed["mask"], T)

    @jax.jit
    def build(mask, arrays):
        everything = scene(mask, T, S, **arrays)
        facts = schedule.facts(everything, B, H, T, S, case.window, tiling)
        by_query = schedule.visits_by_query(facts, tiling)
        visible, _ = visibility(everything, H, jnp.arange(T), case.window, S)
        visible = jnp.broadcast_to(visible, (B, H, T, S))
        return by_query, schedule.visits_by_key(facts, tiling), facts, visible

    by_query, by_key, facts, visible = build(fixed["mask"], arrays)
    M, N = -(-T // tiling.query), -(-S // tiling.key)
    return met(by_query, N), met(by_key, M), facts, tiling, np.asarray(visible)


@pytest.mark.parametrize("name", [case.name for case in tagged("ci")])
def test_every_visible_pair_is_visited_once_from_either_side(name):
    by_query, by_key, _, tiling, visible = schedules(BY_NAME[name])
    needed = tiles_of(visible, tiling)
    for found in (by_query, by_key.swapaxes(2, 3)):
        assert found.max() == 1
        assert np.all(found >= needed)


ALIGNED = Case("aligned", 2, 56, 72, 4, 2, 8, 8, 2, block_size=8, q_offset=(16, -8))


@pytest.mark.parametrize("mask", ["causal", "streaming", "blocks", "chunks", "mixed", "routed"])
@pytest.mark.parametrize("window", [None, 17])
def test_no_tile_without_a_visible_pair_is_visited(mask, window):
    case = dataclasses.replace(ALIGNED, mask=mask, window=window)
    by_query, by_key, _, tiling, visible = schedules(case, schedule.Tiling(8, 8))
    needed = tiles_of(visible, tiling)
    assert np.array_equal(by_query, needed)
    assert np.array_equal(by_key.swapaxes(2, 3), needed)


def test_packed_rows_visit_no_tile_of_another_document():
    case = dataclasses.replace(ALIGNED, T=72, q_offset=None, mask="mixed", documents=4)
    by_query, by_key, _, tiling, visible = schedules(case)
    assert np.array_equal(by_query, tiles_of(visible, tiling))
    assert np.array_equal(by_key.swapaxes(2, 3), tiles_of(visible, tiling))


@pytest.mark.parametrize("name", [case.name for case in tagged("ci")])
def test_one_rule_decides_inside_a_visited_pair(name):
    """s >= near(p) or s >= far, within causality, window and ids, is the mask."""
    case = BY_NAME[name]
    by_query, _, facts, tiling, visible = schedules(case)
    _, fixed, _ = case.draw(jax.random.key(0), jnp.float32)
    B, H, T, S = visible.shape
    everything = scene(
        BlockMask.causal(),
        T,
        S,
        *(fixed.get(name) for name in ("q_offset", "segment_ids", "kv_segment_ids")),
    )
    allowed, _ = visibility(everything, H, jnp.arange(T), case.window, S)
    tile_of_query, tile_of_key = np.arange(T) // tiling.query, np.arange(S) // tiling.key
    leaf = np.asarray(facts.leaf)[:, :, tile_of_query]
    position = np.broadcast_to(everything.offset, (B,))[:, None] + np.arange(T)
    near = [np.asarray(rule.start(position)) for rule in schedule.near_rules(fixed["mask"])]
    near = np.take_along_axis(np.stack(near, 1)[:, None], leaf[:, :, None], axis=2)[:, :, 0]
    far = np.asarray(facts.far)[..., tile_of_key]  # [B, H, F, S]
    far = np.take_along_axis(far, leaf[..., None], axis=2)
    rule = np.arange(S) >= np.minimum(near[..., None], far)
    visited = by_query[:, :, tile_of_query][..., tile_of_key] > 0
    assert np.array_equal(rule & visited & np.asarray(allowed), visible)


def test_lists_are_per_tile_only_for_masks_with_a_query_axis():
    selected, keep = jnp.ones((1, 2, 4), bool), jnp.ones((1, 2, 4, 4), bool)
    chunks = BlockMask.from_chunks(selected, 16)
    route = jnp.ones((1, 2), bool)

    def listed(mask):
        everything = scene(mask, 64, 64, None, None, None)
        facts = schedule.facts(everything, 1, 2, 64, 64, None, schedule.Tiling(16, 16))
        visits = schedule.visits_by_query, schedule.visits_by_key
        return [build(facts, schedule.Tiling(16, 16)).listed.shape[2] for build in visits]

    assert listed(BlockMask.by_head(route, chunks, BlockMask.streaming(1, 1, 16))) == [1, 1]
    assert listed(BlockMask.from_blocks(keep, 16)) == [4, 4]
    by_block = BlockMask.by_head(jnp.ones((1, 2, 4), bool), chunks, BlockMask.causal())
    assert listed(by_block) == [4, 4]


def test_tiles_fit_every_block(monkeypatch):
    monkeypatch.undo()

    def tiling(mask, T=512):
        return tuple(schedule.tiling(mask, T))

    keep, selected = jnp.ones((1, 1, 4, 4), bool), jnp.ones((1, 1, 8), bool)
    assert tiling(BlockMask.causal()) == (256, 128)
    assert tiling(BlockMask.causal(), T=1) == (16, 128)
    assert tiling(BlockMask.from_chunks(selected, 64)) == (256, 64)
    assert tiling(BlockMask.from_blocks(keep, 128)) == (128, 128)
    assert tiling(BlockMask.from_blocks(keep, 64)) == (64, 64)
    assert tiling(BlockMask.streaming(1, 1, 192)) == (256, 64)
