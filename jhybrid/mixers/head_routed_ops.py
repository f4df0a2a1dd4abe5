"""Head routing's arithmetic: pooled keys, masks, and caches in which sparse heads forget.

A state holds whole caches for as many heads as `kv_capacity` gives room for, handed out in the
order of the heads that are full, and for every head the sink blocks and a ring of the local ones.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhybrid.config import HeadRoutedConfig
from jhybrid.layers import upcast
from jhybrid.mixers import head_cache
from pallas_kernels import BlockMask, block_sparse_attention, xattention_select
from pallas_kernels.array_types import Array, Bool, Float, Int, Shaped
from pallas_kernels.block_sparse_attention.block_mask import document_starts


class HeadRoutedState(NamedTuple):
    """After `length` tokens of each row. Slot f of `keys` belongs to the f-th full head of the row.

    `recent` is None where sparse heads forget nothing; else position p lies in slot p of it, and
    from the end of the sink blocks on in a ring of R = local_blocks * block_size slots behind them.
    """

    length: Int[Array, "B"]
    full: Bool[Array, "B G"]
    refused: Bool[Array, "B G"]  # wanted to be full and had no slot
    keys: Float[Array, "B F S K"]
    values: Float[Array, "B F S K"]
    recent: tuple[Float[Array, "B G W K"], Float[Array, "B G W K"]] | None  # keys, values


Whole = tuple[Array, Array]
Recent = tuple[Array, Array] | None


def initial_state(
    config: HeadRoutedConfig, batch: int, max_length: int, dtype: str, kv_capacity: float
) -> HeadRoutedState:
    G, K = config.attention.num_kv_heads, config.attention.head_dim
    F = math.ceil(kv_capacity * G) if config.trims else G
    W = (config.sink_blocks + config.local_blocks) * config.block_size
    room = head_cache.whole_pages(max_length)

    def zeros(heads: int, slots: int) -> Array:
        return jnp.zeros((batch, heads, slots, K), dtype)

    return HeadRoutedState(
        length=jnp.zeros((batch,), jnp.int32),
        full=jnp.zeros((batch, G), bool),
        refused=jnp.zeros((batch, G), bool),
        keys=zeros(F, room),
        values=zeros(F, room),
        recent=(zeros(G, W), zeros(G, W)) if config.trims else None,
    )


# ---- Decisions by document ----


def document_blocks(segment_ids: Int[Array, "B T"], block_size: int) -> Int[Array, "B T"]:
    """The block in which each token's document starts."""
    return document_starts(segment_ids) // block_size


def boundary_means(
    k: Float[Array, "B T G K"],
    counted: Bool[Array, "B T"],
    documents: Int[Array, "B T"] | None,
    *,
    block_size: int,
    pool_tokens: int,
) -> tuple[Float[Array, "B N G K"], Bool[Array, "B N"]]:
    """By document: (mean of the first n + mean of the last n counted tokens) / 2; 0 without any.

    n = min(pool_tokens, s) for s counted tokens: in a short document tokens count twice.
    """
    B, T = counted.shape
    N = 1 if documents is None else -(-T // block_size)
    documents = jnp.zeros((B, T), jnp.int32) if documents is None else documents
    add = jax.vmap(partial(jax.ops.segment_sum, num_segments=N))
    size = add(counted.astype(jnp.int32), documents)
    before = jnp.cumsum(size, 1) - size  # counted tokens of earlier documents
    own = partial(jnp.take_along_axis, indices=documents, axis=1)
    rank = jnp.cumsum(counted, 1) - 1 - own(before)
    n = jnp.minimum(pool_tokens, size)
    ends = (rank < own(n)).astype(k.dtype) + (rank >= own(size - n)).astype(k.dtype)
    weight = jnp.where(counted, ends, 0)[..., None, None]
    total = add(weight * k, documents)
    return total / jnp.maximum(2 * n, 1)[..., None, None], size > 0


def row_means(
    k: Float[Array, "B T G K"], counts: Int[Array, "B"], *, pool_tokens: int
) -> tuple[Float[Array, "B 1 G K"], Bool[Array, "B 1"]]:
    """`boundary_means` of rows that are documents, of their first `counts` tokens; fp32.

    Reads no other keys than it averages: the work does not grow with T.
    """
    T = k.shape[1]
    n = jnp.minimum(pool_tokens, counts)
    step = jnp.arange(min(pool_tokens, T))

    def total(start: Int[Array, "B"]) -> Float[Array, "B G K"]:
        """Of n tokens from `start` on."""
        place = jnp.clip(start[:, None] + step, 0, T - 1)
        keys = upcast(jnp.take_along_axis(k, place[..., None, None], 1))
        return jnp.sum(jnp.where((step < n[:, None])[..., None, None], keys, 0), 1)

    both = total(jnp.zeros_like(counts)) + total(counts - n)
    return (both / jnp.maximum(2 * n, 1)[:, None, None])[:, None], (counts > 0)[:, None]


def by_query_block(
    decisions: Bool[Array, "B N G"], documents: Int[Array, "B T"] | None, block_size: int
) -> Bool[Array, "B G"] | Bool[Array, "B G N"]:
    """A `by_head` route: each block of a packed row goes by its own document."""
    if documents is None:
        return decisions[:, 0]
    of_block = documents[:, ::block_size, None]
    return jnp.moveaxis(jnp.take_along_axis(decisions, of_block, 1), 1, 2)


def by_token(
    decisions: Shaped[Array, "B N G"],
    documents: Int[Array, "B T"] | None,
    heads: int,
) -> Shaped[Array, "B #T H"]:
    """Decisions of each token's document, for each query head."""
    by_head = jnp.repeat(decisions, heads // decisions.shape[2], axis=2)
    return by_head if documents is None else jnp.take_along_axis(by_head, documents[..., None], 1)


# ---- Attention ----


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    route: Bool[Array, "B G"] | Bool[Array, "B G N"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    config: HeadRoutedConfig,
    implementation,
) -> Float[Array, "B T H K"]:
    """Whole rows, full heads (where `route`) and sparse ones in one launch."""
    retrieval, sparse = config.mode.split("-")

    def mask(kind: str) -> BlockMask:
        if kind == "FA":
            return BlockMask.causal()
        if kind == "SSA":
            return streaming(config)
        keep = xattention_select(
            q,
            k,
            block_size=config.block_size,
            stride=config.stride,
            threshold=config.threshold,
            segment_ids=segment_ids,
        )
        return BlockMask.from_blocks(keep, config.block_size)

    chosen = BlockMask.by_head(route, mask(retrieval), mask(sparse))
    return block_sparse_attention(
        q, k, v, chosen, segment_ids=segment_ids, implementation=implementation
    )[0]


def hide_padding(valid: Bool[Array, "B T"], config: HeadRoutedConfig) -> Int[Array, "B T"] | None:
    """Segment ids for right-padded rows, None where masks do not look at values.

    XAttention scores whole blocks: padding in a row's last one would choose for its real queries.
    """
    return jnp.where(valid, 0, -1) if "XA" in config.mode else None


def streaming(config: HeadRoutedConfig) -> BlockMask:
    return BlockMask.streaming(config.sink_blocks, config.local_blocks, config.block_size)


def extend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    full: Bool[Array, "B G"],
    length: Int[Array, "B"],
    counts: Int[Array, "B"],
    whole: Whole,
    recent: Recent,
    *,
    config: HeadRoutedConfig,
    implementation,
) -> tuple[Float[Array, "B T H K"], Whole, Recent]:
    """The next T tokens of every row, `counts` of them real, and the caches with them.

    Where every row begins, that is `attend`. Elsewhere full heads read their whole cache, and so do
    heads on XAttention; SSA heads read `recent`, the same blocks as if the row were whole.
    """
    kept = full if config.trims else jnp.ones_like(full)
    slots, S = whole[0].shape[1:3]
    position = length[:, None] + jnp.arange(q.shape[1])
    new = position < (length + counts)[:, None]
    owns = kept & (jnp.cumsum(kept, 1) - 1 == jnp.arange(slots)[:, None, None])  # [F, B, G]
    used, head = owns.any(-1).T, jnp.argmax(owns, -1).T  # of each slot, [B, F]
    place = jnp.where(new, position, S)

    def of_slots(x: Array) -> Array:
        return jnp.take_along_axis(x, head[:, None, :, None], 2)

    whole = _write(whole[0], place, of_slots(k)), _write(whole[1], place, of_slots(v))
    after: Recent = None
    if recent is not None:
        W, R = recent[0].shape[2], config.local_blocks * config.block_size
        lasts = (position < W - R) | (position >= (length + counts)[:, None] - R)
        place = jnp.where(new & lasts, _recent_slot(position, W, R), W)
        after = _write(recent[0], place, k), _write(recent[1], place, v)

    def from_nothing(_):
        ids = hide_padding(new, config)
        return attend(q, k, v, full, ids, config=config, implementation=implementation)

    def from_caches(_):
        r = q.shape[2] // k.shape[2]
        grouped = q.reshape(*q.shape[:2], k.shape[2], r, -1)
        queries = jnp.take_along_axis(grouped, head[:, None, :, None, None], 2)
        flat = queries.reshape(*q.shape[:2], -1, q.shape[3])
        kernel = {"implementation": implementation}
        if q.shape[1] == 1:
            newest = jnp.where(used, length[:, None], -1)  # an unused slot has no page to read
            o = head_cache.attend_newest(flat, *whole, newest, **kernel)
        else:
            offset = jnp.broadcast_to(length[:, None], head.shape)
            o, _ = head_cache.attend(flat, *whole, BlockMask.causal(), offset, **kernel)
        slot = jnp.clip(jnp.cumsum(kept, 1) - 1, 0)
        o = o.reshape(queries.shape)
        o = jnp.take_along_axis(o, slot[:, None, :, None, None], 2).reshape(q.shape)
        if recent is None or after is None:
            return o
        if q.shape[1] == 1:
            near = _attend_recent(q, *after, length, config)
        else:
            near = _attend_unrolled(q, k, v, *recent, length, config, implementation)
        return jnp.where(jnp.repeat(kept, r, 1)[:, None, :, None], o, near)

    if q.shape[1] == 1:
        o = from_caches(None)
    else:
        o = jax.lax.cond(jnp.all(length == 0), from_nothing, from_caches, None)
    return o, whole, after


def _write(
    cache: Float[Array, "B F S K"], place: Int[Array, "B T"], new: Float[Array, "B T F K"]
) -> Float[Array, "B F S K"]:
    """Token t of each row at slot `place`, of every head; nowhere if there is no such slot."""
    write = jax.vmap(lambda cache, at, new: cache.at[:, at].set(new, mode="drop"))
    return write(cache, place, jnp.moveaxis(new, 1, 2))


def _recent_slot(position: Int[Array, "*n"], W: int, R: int) -> Int[Array, "*n"]:
    sinks = W - R
    return jnp.where(position < sinks, position, sinks + (position - sinks) % R)


def _attend_recent(
    q: Float[Array, "B 1 H K"],
    keys: Float[Array, "B G W K"],
    values: Float[Array, "B G W K"],
    length: Int[Array, "B"],
    config: HeadRoutedConfig,
) -> Float[Array, "B 1 H K"]:
    """The query at position `length` against its sink and local blocks, in the ring's own order."""
    block, R = config.block_size, config.local_blocks * config.block_size
    (B, _, H, K), (G, W) = q.shape, keys.shape[1:3]
    slot, now = jnp.arange(W), length[:, None]
    position = now - (now - slot) % R  # the latest that a slot of the ring can hold
    local = (position >= W - R) & (now // block - position // block < config.local_blocks)
    visible = jnp.where(slot < W - R, slot <= now, local)[:, None, None]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    scores = product("bgrk,bgwk->bgrw", q.reshape(B, G, H // G, K), keys) * K**-0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    o = product("bgrw,bgwk->bgrk", weights.astype(values.dtype), values)
    return o.reshape(q.shape).astype(q.dtype)


def _attend_unrolled(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    recent_keys: Float[Array, "B G W K"],
    recent_values: Float[Array, "B G W K"],
    length: Int[Array, "B"],
    config: HeadRoutedConfig,
    implementation,
) -> Float[Array, "B T H K"]:
    """Several queries: sinks, the local blocks in order and the new tokens, as one shorter row.

    The row leaves out the whole blocks between the sinks and what the first query still sees, so
    that distances between blocks and places within them are those of the real row.
    """
    block, R = config.block_size, config.local_blocks * config.block_size
    W, T = recent_keys.shape[2], q.shape[1]
    left_out = jnp.maximum(length // block - (W // block - 1), 0) * block
    place = jnp.arange(W)
    position = jnp.where(place < W - R, place, place + left_out[:, None])
    slot = _recent_slot(position, W, R)[:, None, :, None]

    def row(recent: Array, new: Array) -> Array:
        unrolled = jnp.take_along_axis(recent, slot, 2)
        unrolled = jnp.pad(unrolled, ((0, 0), (0, 0), (0, T), (0, 0)))
        put = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
        return put(unrolled, jnp.moveaxis(new, 1, 2), length - left_out)

    offset = jnp.broadcast_to((length - left_out)[:, None], k.shape[::2])
    return head_cache.attend(
        q,
        row(recent_keys, k),
        row(recent_values, v),
        streaming(config),
        offset,
        implementation=implementation,
    )[0]
