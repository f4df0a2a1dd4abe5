"""Which tiles meet: any mask as the key tiles of each query tile, and the other way round.

The kernels walk tiles of `Tiling.query` queries and `Tiling.key` keys. All masks take one form
(`Visits`): a tile visits a slice of an ascending list, then a range. A mask without a query axis
needs one list per head, O(S) numbers, and ranges; only one with (`from_blocks`, a route by query
block) needs a list per tile. Inside a visited pair of tiles one rule decides, whatever the mask: a
query at position p sees key s <= p where s >= near(p) or s >= far, with `near` a function of p for
each leaf of the mask (`Near`), and `far` a number for each head, leaf and key tile.

Everything is built from traced arrays, on the device, inside jit.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Int
from pallas_kernels.block_sparse_attention.block_mask import (
    BlockMask,
    Blocks,
    ByHead,
    Chunks,
    Streaming,
    rows_to_heads,
)
from pallas_kernels.block_sparse_attention.reference import Scene
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks

NEVER = 2**30  # a position after every key
LARGEST_TILE = 128
LARGEST_FREE_TILE = 256  # of queries, where no array of the mask has a query axis


class Tiling(NamedTuple):
    """Tokens in a tile of queries and in a tile of keys."""

    query: int
    key: int


class Near(NamedTuple):
    """The near keys of a leaf: the query's own block of `size` keys and the `blocks` - 1 before.

    Size 0: the leaf has no such rule.
    """

    size: int = 0
    blocks: int = 1
    biased: bool = False  # block_bias is for the keys before them

    def start(self, position):
        """Position of the first near key of a query, of either sign; NEVER without a rule."""
        if self.size == 0:
            return jnp.full_like(position, NEVER)
        return (floor_divide(position, self.size) - (self.blocks - 1)) * self.size


class Visits(NamedTuple):
    """Entries listed[start : start + count] of a tile's list, then a range, all ascending."""

    listed: Int[Array, "B H #row E"]
    rows: Int[Array, "B H row 4"]  # start, count, first of the range, length of the range


class Facts(NamedTuple):
    """A scene in M query tiles, N key tiles and F leaves of the mask."""

    leaf: Int[Array, "B H M"]  # the leaf that rules the query tile
    far: Int[Array, "B H F N"]  # the keys of the tile from here on are seen by all later queries
    near: Int[Array, "B H M"]  # the first tile with near keys
    meets: Bool[Array, "B M N"]  # causality, window and segment ids leave some pair
    pairs: Bool[Array, "B H M N"] | None  # so does the mask; only for a mask with a query axis


def tiling(mask: BlockMask, T: int) -> Tiling:
    """The largest tiles that the mask's blocks are whole multiples of."""
    blocks = _query_blocks(mask)
    query = math.gcd(LARGEST_TILE, *blocks) if blocks else LARGEST_FREE_TILE
    return Tiling(min(query, cdiv(T, 16) * 16), math.gcd(LARGEST_TILE, *mask.block_sizes()))


def near_rules(mask: BlockMask) -> tuple[Near, ...]:
    """One for each of `mask.leaves()`."""

    def rule(leaf: BlockMask) -> Near:
        if isinstance(leaf, Streaming):
            return Near(leaf.block_size, leaf.local_blocks)
        return Near(leaf.chunk_size, biased=True) if isinstance(leaf, Chunks) else Near()

    return tuple(map(rule, mask.leaves()))


def facts(
    scene: Scene, B: int, H: int, T: int, S: int, window: int | None, tiling: Tiling
) -> Facts:
    """What both directions of visits are made of, for q [B, T, H, _] and S keys."""
    mask, M, N = scene.mask, cdiv(T, tiling.query), cdiv(S, tiling.key)
    leaf = jnp.broadcast_to(_leaf(mask, H, M, tiling.query), (B, H, M))
    far = [_far(x, scene.document_start, H, N, tiling.key) for x in mask.leaves()]
    far = [jnp.broadcast_to(x, (B, H, N)) for x in far]
    first_query = scene.offset[:, None] + jnp.arange(M, dtype=jnp.int32) * tiling.query  # [#B, M]
    meets = jnp.broadcast_to(_meets(scene, first_query, T, S, window, tiling), (B, M, N))

    tile = jnp.arange(N, dtype=jnp.int32)
    near = jnp.zeros((B, H, M), jnp.int32)
    pairs = jnp.zeros((B, H, M, N), bool) if _query_blocks(mask) else None
    for f, (x, rule) in enumerate(zip(mask.leaves(), near_rules(mask), strict=True)):
        # a leaf without the rule either shows all keys or lists them
        start = rule.start(first_query) if rule.size else jnp.zeros_like(first_query)
        start = jnp.maximum(floor_divide(start, tiling.key), 0)
        near = jnp.where(leaf == f, start[:, None], near)
        if pairs is not None:
            shown = (far[f] < (tile + 1) * tiling.key)[:, :, None] | (
                tile >= start[:, None, :, None]
            )
            if isinstance(x, Blocks):
                shown = _kept(x, H, M, N, tiling)
            pairs |= (leaf == f)[..., None] & shown
    if pairs is not None:
        pairs &= meets[:, None]
    return Facts(leaf, jnp.stack(far, axis=2), near, meets, pairs)


def visits_by_query(facts: Facts, tiling: Tiling) -> Visits:
    """The key tiles of every query tile."""
    if facts.pairs is not None:
        return _listed(facts.pairs)
    first, end = _span(facts.meets)  # [B, M]
    shown = _shown(facts, tiling)
    before = jnp.pad(jnp.cumsum(shown, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    near = jnp.clip(facts.near, first[:, None], end[:, None])
    first = jnp.broadcast_to(first[:, None], near.shape)
    start, stop = (jnp.take_along_axis(before, x, axis=2) for x in (first, near))
    rows = jnp.stack([start, stop - start, near, end[:, None] - near], axis=-1)
    return Visits(_ascending(shown)[:, :, None], rows)


def visits_by_key(facts: Facts, tiling: Tiling) -> Visits:
    """The query tiles of every key tile: those of `visits_by_query` the other way round.

    Where segment ids come back after others, a range may hold tiles that see nothing.
    """
    if facts.pairs is not None:
        return _listed(facts.pairs.swapaxes(2, 3))
    B, H = facts.near.shape[:2]
    first, end = (x[:, None] for x in _span(facts.meets.swapaxes(1, 2)))  # [B, 1, N]
    tile = jnp.arange(end.shape[-1], dtype=jnp.int32)
    # `near` ascends with the query tile, so those that reach back to a key tile come first
    reaching = (facts.near[..., None] <= tile).sum(2, dtype=jnp.int32)
    stop = jnp.where(_shown(facts, tiling), end, jnp.minimum(end, reaching))
    length = jnp.maximum(stop - first, 0)
    none = jnp.zeros_like(length)
    rows = jnp.stack([none, none, jnp.broadcast_to(first, length.shape), length], axis=-1)
    return Visits(jnp.zeros((B, H, 1, 1), jnp.int32), rows)


def floor_divide(position, size: int):
    """position // size of integers of either sign, as a shift where that is enough."""
    if size & (size - 1) == 0:
        return position >> (size.bit_length() - 1)
    return position // size


def _query_blocks(mask: BlockMask) -> list[int]:
    """The block sizes of the mask's arrays with a query axis."""
    if isinstance(mask, Blocks):
        return [mask.block_size]
    if isinstance(mask, ByHead):
        own = [mask.block_size] if len(mask.route.shape) == 3 else []
        return own + _query_blocks(mask.when_true) + _query_blocks(mask.when_false)
    return []


def _leaf(mask: BlockMask, H: int, M: int, query_tile: int) -> Int[Array, "#B #H #M"]:
    """Which of `mask.leaves()` rules each query tile."""
    if not isinstance(mask, ByHead):
        return jnp.zeros((1, 1, 1), jnp.int32)
    route = rows_to_heads(mask.route, H)
    if route.ndim == 3:
        route = jnp.repeat(route, cdiv(mask.block_size, query_tile), axis=2)[:, :, :M]
    else:
        route = route[..., None]
    when_true = _leaf(mask.when_true, H, M, query_tile)
    when_false = _leaf(mask.when_false, H, M, query_tile) + len(mask.when_true.leaves())
    return jnp.where(route, when_true, when_false)


def _far(
    leaf: BlockMask, document_start: Int[Array, "#B S"], H: int, N: int, key_tile: int
) -> Int[Array, "#B #H N"]:
    """From which position on the keys of each tile are seen by all later queries."""
    start = jnp.arange(N, dtype=jnp.int32) * key_tile
    if isinstance(leaf, Chunks):
        selected = jnp.repeat(leaf.selected, leaf.chunk_size // key_tile, axis=-1)[..., :N]
        return jnp.where(rows_to_heads(selected, H), start, NEVER)
    if isinstance(leaf, Streaming):
        # within a tile documents only begin: sinks, whose document began lately, come last
        document = pad_to_multiple(document_start, key_tile, axis=1, repeat_last=True)
        begun = floor_divide(split_chunks(document, key_tile), leaf.block_size)
        block = floor_divide(start, leaf.block_size)[:, None]
        before = (block - begun >= leaf.sink_blocks).sum(-1, dtype=jnp.int32)
        return (start + before)[:, None]
    return jnp.zeros((1, 1, N), jnp.int32)


def _shown(facts: Facts, tiling: Tiling) -> Bool[Array, "B H N"]:
    """Tiles with keys that all later queries see, for a mask without a query axis."""
    far = jnp.take_along_axis(facts.far, facts.leaf[:, :, :1, None], axis=2)[:, :, 0]
    return far < (jnp.arange(far.shape[-1]) + 1) * tiling.key


def _kept(leaf: Blocks, H: int, M: int, N: int, tiling: Tiling) -> Bool[Array, "B H M N"]:
    keep = jnp.repeat(leaf.keep, cdiv(leaf.block_size, tiling.query), axis=2)[:, :, :M]
    keep = jnp.repeat(keep, leaf.block_size // tiling.key, axis=3)[..., :N]
    return rows_to_heads(keep, H)


def _meets(
    scene: Scene,
    first_query: Int[Array, "#B M"],
    T: int,
    S: int,
    window: int | None,
    tiling: Tiling,
) -> Bool[Array, "#B M N"]:
    """Whether causality, the window and the segment ids may leave a pair of the tiles."""
    last_query = jnp.minimum(first_query + tiling.query, scene.offset[:, None] + T) - 1
    first_key = jnp.arange(cdiv(S, tiling.key), dtype=jnp.int32) * tiling.key
    meets = last_query[..., None] >= first_key
    if window is not None:
        last_key = jnp.minimum(first_key + tiling.key, S) - 1
        meets &= first_query[..., None] - last_key < window
    if scene.documents is None:
        return meets
    queries, keys = (_id_range(x, n) for x, n in zip(scene.documents, tiling, strict=True))
    overlap = queries.least[..., None] <= keys.most[:, None]
    return meets & overlap & (queries.most[..., None] >= keys.least[:, None])


class _IdRange(NamedTuple):
    """Of the ids >= 0 in a tile; a least above every most where there is none."""

    least: Int[Array, "B M"]
    most: Int[Array, "B M"]


def _id_range(ids: Int[Array, "B T"], size: int) -> _IdRange:
    ids = split_chunks(pad_to_multiple(ids + 1, size, axis=1) - 1, size)
    least = jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids).min(-1)
    return _IdRange(least, ids.max(-1))


def _span(meets: Bool[Array, "B M N"]) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """(first, end) of the tiles that meet each row; (0, 0) where none does."""
    N, some = meets.shape[-1], meets.any(-1)
    first = jnp.argmax(meets, -1)
    end = jnp.where(some, N - jnp.argmax(meets[..., ::-1], -1), 0)
    return first.astype(jnp.int32), end.astype(jnp.int32)


def _listed(pairs: Bool[Array, "B H M N"]) -> Visits:
    count = pairs.sum(-1, dtype=jnp.int32)
    none = jnp.zeros_like(count)
    return Visits(_ascending(pairs), jnp.stack([none, count, none, none], axis=-1))


def _ascending(chosen: Bool[Array, "*x N"]) -> Int[Array, "*x N"]:
    """The places of the chosen entries in ascending order, then the others."""
    return jnp.argsort(~chosen, axis=-1, stable=True).astype(jnp.int32)
