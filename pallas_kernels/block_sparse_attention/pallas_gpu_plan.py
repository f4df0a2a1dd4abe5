"""How the Hopper kernels divide the work: tiles, shared memory, and which block takes which tile.

A tile stays with a block of threads, whose warpgroups hold 64 of its rows each; what it visits is
streamed past it through a ring in shared memory. Nothing here is specific to Mosaic GPU.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.block_sparse_attention.schedule import (
    LARGEST_TILE,
    Facts,
    Tiling,
    Visits,
    tiling,
)
from pallas_kernels.blocks import pad_to_multiple

ROWS = 64  # of a warpgroup: the M of one wgmma instruction
SMEM_BYTES = 227 * 1024
RESERVED_BYTES = 4 * 1024  # barriers, and what Mosaic keeps for reductions
L2_BYTES = 32 * 2**20  # what neighbouring tiles may stream and still find in the 50 MiB of L2
MULTIPROCESSORS = 132
MOST_STAGES = 4
LANE_WORDS = 16  # in memory, of an `Item`
ITEM_WORDS = 32  # of a row of items: two lanes, and what the copy engine takes at once


class Plan(NamedTuple):
    """The shape of one kernel."""

    tiling: Tiling  # of its schedule
    tile: int  # tokens that stay: of queries (forward, dq) or of keys (dk and dv)
    step: int  # tokens streamed at a time
    stages: int  # steps in shared memory at once
    lanes: int = 1  # tiles that a block works on at once, each with its own ring
    slices: int = 1  # warpgroups that share rows and split the columns of the results
    tiles: int = 1  # in shared memory at once, for each lane: 2 load the next during the last
    blocks: int = MULTIPROCESSORS  # of threads, which claim tiles until none is left
    take_turns: bool = False  # of two warpgroups one multiplies while the other exponentiates

    @property
    def workers(self) -> int:
        """Warpgroups that compute; one more copies."""
        return self.lanes * (self.tile // ROWS) * self.slices


class Plans(NamedTuple):
    forward: Plan
    dq: Plan
    dkv: Plan


class Item(NamedTuple):
    """A tile and what it visits, in the order in which blocks take them."""

    batch: Int[Array, ""]
    head: Int[Array, ""]  # of queries; of keys for dk and dv
    tile: Int[Array, ""]  # -1: nothing to do
    position: Int[Array, ""]  # of the tile's first query; of query 0 for dk and dv
    leaf: Int[Array, ""]
    start: Int[Array, ""]  # the rest is of `Visits`, 0 for dk and dv
    count: Int[Array, ""]
    first: Int[Array, ""]
    length: Int[Array, ""]


def largest_tiling(mask: BlockMask) -> Tiling:
    """The largest tiles of the mask's blocks, whatever the length of the row."""
    query, key = tiling(mask, 2**30)
    return Tiling(min(query, LARGEST_TILE), key)


def plans(mask: BlockMask, K: int, V: int, ids: bool) -> Plans:
    """Default shapes: what fits in registers (see each kernel) and in shared memory."""
    query, key = largest_tiling(mask)
    wide = max(K, V) > 128
    token = 2 * (K + V)

    def depths(resident: int, streamed: int, enough: int) -> tuple[int, int] | None:
        """(tiles, stages) in shared memory, a second tile where `enough` stages fit beside it.

        None where two stages do not fit.
        """
        free = SMEM_BYTES - RESERVED_BYTES
        tiles = 2 if 2 * resident + enough * streamed <= free else 1
        stages = min(MOST_STAGES, (free - tiles * resident) // streamed)
        return (tiles, stages) if stages >= 2 else None

    def by_query(query: int, step: int, resident: int, enough: int) -> Plan:
        """`resident` bytes for each query; two lanes where they leave room for two stages."""
        streamed = step * (token + 4 * ids)
        for lanes in (2, 1) if query == ROWS else (1,):
            depth = depths(lanes * query * resident, lanes * streamed, enough)
            if depth is not None:
                return Plan(
                    Tiling(query, key),
                    query,
                    step,
                    stages=depth[1],
                    lanes=lanes,
                    tiles=depth[0],
                )
        return by_query(ROWS, step, resident, enough)

    key_tile = ROWS if wide else key
    lanes = 2 if key_tile == ROWS and not wide else 1
    streamed = ROWS * (token + 8 + 4 * ids)
    depth = depths(lanes * key_tile * token, lanes * streamed, 3)
    assert depth is not None, (K, V)
    forward = by_query(query, 64 if wide or query == ROWS else 128, 2 * K, 2)
    return Plans(
        forward=forward._replace(take_turns=forward.tile > ROWS),  # dq, dk and dv: slower with
        dq=by_query(query, 64, token, 3),
        dkv=Plan(
            Tiling(query, key_tile),
            key_tile,
            ROWS,
            stages=depth[1],
            lanes=lanes,
            slices=2 if wide else 1,
            tiles=depth[0],
        ),
    )


def order(plan: Plan, work: Int[Array, "L X"], together: int) -> Int[Array, "rows lanes"]:
    """Places in `work` in the order in which blocks claim them; -1 where a lane rests.

    The lists of `together` heads in a row, which share keys in L2, are done before others, the
    groups with most work first, and in a group the longest tiles first: what is left for the end
    is short.
    """
    work = work.reshape(-1, together * work.shape[1])
    place = jnp.argsort(-work, axis=1, stable=True).astype(jnp.int32)
    place += jnp.arange(work.shape[0])[:, None] * work.shape[1]
    place = place[jnp.argsort(-work.sum(1), stable=True)].reshape(-1)
    return (pad_to_multiple(place + 1, plan.lanes, axis=0) - 1).reshape(-1, plan.lanes)


def _heads_together(bytes_of_a_head: int, heads: int) -> int:
    """The most heads whose bytes fit in L2, of those that divide `heads`."""
    most = max(1, min(heads, L2_BYTES // bytes_of_a_head))
    return next(n for n in range(most, 0, -1) if heads % n == 0)


def _items(place: Array, fields: list[Array], shape: tuple[int, ...]) -> Array:
    """The fields (broadcast to `shape`) of each place, and a row without a tile at the end."""
    table = jnp.stack([jnp.broadcast_to(x, shape).reshape(-1) for x in fields], axis=-1)
    place = jnp.pad(place, ((0, 1), (0, 0)), constant_values=-1)
    rest = jnp.zeros(len(fields), jnp.int32).at[2].set(-1)
    rows = jnp.where(place[..., None] >= 0, table[place], rest).astype(jnp.int32)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, LANE_WORDS - len(fields))))
    rows = rows.reshape(place.shape[0], -1)
    return jnp.pad(rows, ((0, 0), (0, ITEM_WORDS - rows.shape[1])))


def items_by_query(
    plan: Plan, visits: Visits, facts: Facts, offset: Int[Array, "#B"], head_bytes: int, G: int
) -> Int[Array, "rows 32"]:
    """`Item`s of all query tiles; `head_bytes` are what a key/value head streams."""
    B, _, _ = shape = facts.leaf.shape
    start, count, first, length = jnp.moveaxis(visits.rows, -1, 0)
    place = order(plan, (count + length).reshape(B * G, -1), _heads_together(head_bytes, B * G))
    b, h, m = _places(shape)
    position = offset[:, None, None] + m * plan.tile
    return _items(place, [b, h, m, position, facts.leaf, start, count, first, length], shape)


def items_by_key(
    plan: Plan, visits: Visits, offset: Int[Array, "#B"], head_bytes: int, G: int
) -> Int[Array, "rows 32"]:
    """`Item`s of all key tiles; `head_bytes` are what the queries of a key/value head stream."""
    B, _, N, _ = visits.rows.shape
    work = (visits.rows[..., 1] + visits.rows[..., 3]).reshape(B, G, -1, N).sum(2)
    place = order(plan, work.reshape(B * G, N), _heads_together(head_bytes, B * G))
    none = jnp.zeros((), jnp.int32)
    fields = [*_places((B, G, N)), offset[:, None, None], *[none] * 5]
    return _items(place, fields, (B, G, N))


def _places(shape: tuple[int, int, int]) -> list[Array]:
    return [
        jnp.arange(n, dtype=jnp.int32).reshape([-1 if axis == a else 1 for a in range(3)])
        for axis, n in enumerate(shape)
    ]


def runs(ids: Int[Array, "B T"], size: int, otherwise: int) -> Int[Array, "B N"]:
    """The id that all tokens of each `size` have, `otherwise` where they differ or are padding."""
    parts = ids.reshape(ids.shape[0], -1, size)
    one = (parts.min(-1) == parts.max(-1)) & (parts[..., 0] >= 0)
    return jnp.where(one, parts[..., 0], otherwise)
