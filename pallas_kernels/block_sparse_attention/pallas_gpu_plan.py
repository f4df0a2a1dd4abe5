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
from pallas_kernels.blocks import cdiv

ROWS = 64  # of a warpgroup: the M of one wgmma instruction
SMEM_BYTES = 227 * 1024
RESERVED_BYTES = 3 * 1024  # barriers, and what Mosaic keeps for reductions
L2_BYTES = 32 * 2**20  # what neighbouring tiles may stream and still find in the 50 MiB of L2
MULTIPROCESSORS = 132
MOST_STAGES = 4


class Plan(NamedTuple):
    """The shape of one kernel."""

    tiling: Tiling  # of its schedule
    tile: int  # tokens that stay: of queries (forward, dq) or of keys (dk and dv)
    step: int  # tokens streamed at a time
    stages: int  # steps in shared memory at once
    lanes: int = 1  # tiles that a block works on at once, each with its own ring
    slices: int = 1  # warpgroups that share rows and split the columns of the results
    blocks: int | None = MULTIPROCESSORS  # among which tiles are dealt out; None: one a tile
    take_turns: bool = True  # of two warpgroups one multiplies while the other exponentiates

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

    def stages(resident: int, streamed: int) -> int:
        return min(MOST_STAGES, (SMEM_BYTES - RESERVED_BYTES - resident) // streamed)

    def by_query(query: int, step: int, resident: int, take_turns: bool) -> Plan:
        """`resident` bytes for each query; two lanes where they leave room for two stages."""
        streamed = step * (token + 4 * ids)
        for lanes in (2, 1) if query == ROWS else (1,):
            depth = stages(lanes * query * resident, lanes * streamed)
            if depth >= 2:
                turns = take_turns and query > ROWS
                return Plan(Tiling(query, key), query, step, depth, lanes, take_turns=turns)
        return by_query(ROWS, step, resident, take_turns)

    key_tile = ROWS if wide else key
    lanes = 2 if key_tile == ROWS and not wide else 1
    streamed = ROWS * (token + 8 + 4 * ids)
    return Plans(
        forward=by_query(query, 64 if wide or query == ROWS else 128, 2 * K, take_turns=True),
        dq=by_query(query, 64, token, take_turns=False),
        dkv=Plan(
            Tiling(query, key_tile),
            key_tile,
            ROWS,
            stages(lanes * key_tile * token, lanes * streamed),
            lanes,
            slices=2 if wide else 1,
            take_turns=False,
        ),
    )


def order(plan: Plan, work: Int[Array, "L X"], together: int) -> Int[Array, "rounds blocks lanes"]:
    """Places in `work` in the order in which blocks take them; -1 where a lane rests.

    The lists of `together` heads in a row, which share keys in L2, are done before others, the
    groups with most work first, and in a group the longest tiles first. A persistent block takes
    one place a lane of each round; every other round runs backwards, so that all blocks get the
    same sum where lengths fall evenly. Other blocks are started in order as those before end.
    """
    L, X = work.shape
    groups = cdiv(L, together)
    work = jnp.pad(work, ((0, groups * together - L), (0, 0)), constant_values=-1)
    work = work.reshape(groups, together * X)
    place = jnp.argsort(-work, axis=1, stable=True).astype(jnp.int32)
    alive = jnp.take_along_axis(work, place, axis=1) >= 0
    place = jnp.where(alive, place + (jnp.arange(groups) * together * X)[:, None], -1)
    place = place[jnp.argsort(-jnp.maximum(work, 0).sum(1), stable=True)]
    if plan.blocks is None:
        place = place.reshape(-1)
        place = jnp.pad(place, (0, -place.size % plan.lanes), constant_values=-1)
        return place.reshape(1, -1, plan.lanes)
    blocks = min(plan.blocks, cdiv(L * X, plan.lanes))
    width = blocks * plan.lanes
    rest = -place.shape[1] % (width if groups == 1 else 2 * width)
    place = jnp.pad(place, ((0, 0), (0, rest)), constant_values=-1).reshape(groups, -1, width)
    place = place.at[:, 1::2].set(place[:, 1::2, ::-1])
    return place.reshape(-1, blocks, plan.lanes)


def _heads_together(bytes_of_a_head: int, heads: int) -> int:
    return max(1, min(heads, L2_BYTES // bytes_of_a_head))


def _items(place: Array, fields: list[Array], shape: tuple[int, ...]) -> Array:
    """[rounds, blocks, lanes, 9]: the fields (broadcast to `shape`) of each place."""
    table = jnp.stack([jnp.broadcast_to(x, shape).reshape(-1) for x in fields], axis=-1)
    rest = jnp.zeros(len(fields), jnp.int32).at[2].set(-1)
    return jnp.where(place[..., None] >= 0, table[place], rest).astype(jnp.int32)


def items_by_query(
    plan: Plan, visits: Visits, facts: Facts, offset: Int[Array, "#B"], head_bytes: int, G: int
) -> Int[Array, "rounds blocks lanes 9"]:
    """`Item`s of all query tiles; `head_bytes` are what a key/value head streams."""
    B, _, _ = shape = facts.leaf.shape
    start, count, first, length = jnp.moveaxis(visits.rows, -1, 0)
    place = order(plan, (count + length).reshape(B * G, -1), _heads_together(head_bytes, B * G))
    b, h, m = _places(shape)
    position = offset[:, None, None] + m * plan.tile
    return _items(place, [b, h, m, position, facts.leaf, start, count, first, length], shape)


def items_by_key(
    plan: Plan, visits: Visits, offset: Int[Array, "#B"], head_bytes: int, G: int
) -> Int[Array, "rounds blocks lanes 9"]:
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
