"""Chunk routing's two branches as functions of arrays, each run on one device's heads and rows.

They say how routed chunks reach the ops of `pallas_kernels`; parameters and states are not known
here. Softmax heads come in groups of R = Ha / H that share one routing head.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jhybrid.layers import rms_normalise, upcast
from jhybrid.mixers import head_cache
from jhybrid.mixers.chunk_memory import Writes
from pallas_kernels import (
    BlockMask,
    block_sparse_attention,
    gated_delta_rule,
    gated_delta_step,
    simple_linear_attention,
)
from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import document_starts


def remember(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    writes: Writes,
    write_mask: Float[Array, "B N H"] | None,
    softmax: Bool[Array, "B N H"] | None,
    memory: Float[Array, "B H K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    *,
    chunk_size: int,
    decay_softmax_chunks: bool = True,
    **kernel,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Reads and the new memory; chunks keep their write by `write_mask` (None: all of them).

    Chunks in `softmax` still decay the memory, unless `decay_softmax_chunks` is off.
    """
    if not (decay_softmax_chunks or softmax is None):
        return _remember_without_decay(
            q, k, writes, write_mask, softmax, memory, segment_ids, chunk_size, kernel
        )
    kernel |= {"write_mask": write_mask, "segment_ids": segment_ids, "chunk_size": chunk_size}
    return _recurrence(q, k, writes, memory, kernel)


def remember_token(
    q: Float[Array, "B 1 H K"],
    k: Float[Array, "B 1 H K"],
    writes: Writes,
    memory: Float[Array, "B H K V"],
    **kernel,
) -> tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """`remember` of one token of the open chunk, whose write is kept until the chunk is decided."""
    v, g, beta = writes
    if beta is None:
        return _recurrence(q, k, writes, memory, kernel)
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    o, memory = gated_delta_step(q, k, v, g, beta, memory, **kernel)
    return o[:, None], memory


def _recurrence(q, k, writes: Writes, memory, kernel):
    """Mamba-2 reads without the delta rules' 1 / sqrt(K)."""
    v, g, beta = writes
    if beta is None:
        return simple_linear_attention(q, k, v, g, initial_state=memory, scale=1.0, **kernel)
    return gated_delta_rule(q, k, v, g, beta, initial_state=memory, **kernel)


def _remember_without_decay(
    q, k, writes: Writes, write_mask, softmax, memory, segment_ids, chunk_size, kernel
):
    """One chunk at a time: the op returns e^G S + m dS, a softmax chunk needs S + m dS.

    Documents start at chunk boundaries, so a reset is a chunk whose id differs from the token
    before it.
    """
    B, T, H, V = writes.v.shape
    N = softmax.shape[1]
    K = q.shape[-1]
    if memory is None:
        memory = jnp.zeros((B, H, K, V), jnp.promote_types(q.dtype, jnp.float32))
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def by_chunk(x: Array, mode: str = "constant") -> Array:  # [N, B, C, ...]
        x = jnp.pad(x, ((0, 0), (0, N * chunk_size - T)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(B, N, chunk_size, *x.shape[2:]), 1, 0)

    ids = by_chunk(segment_ids, "edge")
    before = jnp.concatenate([ids[:1, :, 0], ids[:-1, :, -1]])
    fresh = ids[:, :, 0] != before

    @jax.checkpoint
    def step(memory, chunk):
        (q, k, writes, ids), mask, softmax, fresh = chunk
        memory = jnp.where(fresh[:, None, None, None], 0, memory)
        options = {"write_mask": mask[:, None], "segment_ids": ids, "chunk_size": chunk_size}
        o, after = _recurrence(q, k, writes, memory, {**kernel, **options})
        lost = jnp.where(softmax, -jnp.expm1(writes.g.sum(1).astype(memory.dtype)), 0)
        return after + lost[..., None, None] * memory, o

    tokens = (*jax.tree.map(by_chunk, (q, k, writes)), ids)
    chunks = (tokens, jnp.moveaxis(write_mask, 1, 0), jnp.moveaxis(softmax, 1, 0), fresh)
    memory, o = jax.lax.scan(step, memory, chunks)
    return jnp.moveaxis(o, 0, 1).reshape(B, -1, H, V)[:, :T], memory


def attend(
    q: Float[Array, "B T Ha K"],
    k: Float[Array, "B T Ha K"],
    v: Float[Array, "B T Ha V"],
    softmax: Bool[Array, "B H N"],
    bias: Float[Array, "B H N"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    chunk_size: int,
    truncate_intra_grad: bool,
    **kernel,
) -> Float[Array, "B T Ha V"]:
    """Each query over its own chunk, causally, and all of the earlier chunks in `softmax`."""
    if truncate_intra_grad:
        return _attend_truncated(q, k, v, softmax, bias, segment_ids, chunk_size, kernel)
    mask = BlockMask.from_chunks(softmax, chunk_size=chunk_size)
    return block_sparse_attention(
        q, k, v, mask, block_bias=bias, segment_ids=segment_ids, **kernel
    )[0]


def _attend_truncated(q, k, v, softmax, bias, segment_ids, chunk_size, kernel):
    """`attend` without the gradient of same-chunk pairs, as the authors' released backward.

    Same-chunk logits, and v where it meets same-chunk probabilities, are constants to the gradient.
    The bias becomes one more key channel, because it only exists for `from_chunks` masks.
    """
    H, N = softmax.shape[1:]
    T, Ha, K = q.shape[1:]
    kernel = {**kernel, "scale": K**-0.5, "segment_ids": segment_ids}
    nothing = BlockMask.from_chunks(jnp.zeros_like(softmax), chunk_size=chunk_size)
    fixed = jax.lax.stop_gradient((q, k, v))
    own, own_lse = block_sparse_attention(*fixed, nothing, **kernel)

    by_token = jnp.repeat(jnp.repeat(bias / K**-0.5, Ha // H, 1), chunk_size, 2)[:, :, :T]
    channel = jnp.moveaxis(by_token, 1, 2)[..., None].astype(k.dtype)
    q = jnp.concatenate([q, jnp.ones_like(channel)], -1)
    k = jnp.concatenate([k, channel], -1)
    keep = softmax[:, :, None, :] & jnp.tril(jnp.ones((N, N), bool), -1)
    earlier = BlockMask.from_blocks(keep, block_size=chunk_size)
    return merge(own, own_lse, *block_sparse_attention(q, k, v, earlier, **kernel))


def attend_window(
    q: Float[Array, "B T Ha K"],
    k: Float[Array, "B T Ha K"],
    v: Float[Array, "B T Ha V"],
    softmax: Bool[Array, "B H N"],
    open_chunk: Int[Array, "B"],
    kept: Int[Array, "B H"],
    keys: Float[Array, "B H R M C K"],
    values: Float[Array, "B H R M C V"],
    **kernel,
) -> tuple[
    Float[Array, "B T Ha V"],
    Int[Array, "B H"],
    Float[Array, "B H R M C K"],
    Float[Array, "B H R M C V"],
]:
    """Attends over kept slots and a window that starts at a chunk; returns the updated slots.

    Of the window's N chunks, those in `softmax` join the kept slots, in order; chunk `open_chunk`
    goes to the slot after them, where decoding continues it. The others are forgotten.
    """
    B, H, R, M, C, _ = keys.shape
    N = softmax.shape[2]
    window = BlockMask.from_chunks(softmax, chunk_size=C)
    inside, inside_lse = block_sparse_attention(q, k, v, window, **kernel)

    used = jnp.arange(M) < kept[..., None]
    used = jnp.broadcast_to(used[:, :, None], (B, H, R, M)).reshape(-1, 1, M)
    earlier = BlockMask.from_chunks(used, chunk_size=C)
    past, past_lse = head_cache.attend(q, _slots(keys), _slots(values), earlier, M * C, **kernel)
    o = merge(inside, inside_lse, past, past_lse)

    slot = kept[..., None] + jnp.cumsum(softmax, 2) - softmax
    stays = softmax | (jnp.arange(N) == open_chunk[:, None])[:, None]
    slot = jnp.where(stays, slot, M)  # out of range: dropped
    write = jax.vmap(jax.vmap(lambda slots, at, new: slots.at[:, at].set(new, mode="drop")))

    def chunks(x: Array) -> Array:  # [B, H, R, N, C, K]
        return x.reshape(B, N, C, H, R, -1).transpose(0, 3, 4, 1, 2, 5)

    keys, values = write(keys, slot, chunks(k)), write(values, slot, chunks(v))
    return o, kept + softmax.sum(2, dtype=kept.dtype), keys, values


def attend_open(
    q: Float[Array, "B 1 Ha K"],
    k: Float[Array, "B 1 Ha K"],
    v: Float[Array, "B 1 Ha V"],
    offset: Int[Array, "B"],
    active: Bool[Array, "B"],
    kept: Int[Array, "B H"],
    keys: Float[Array, "B H R M C K"],
    values: Float[Array, "B H R M C V"],
    **kernel,
) -> tuple[Float[Array, "B 1 Ha V"], Float[Array, "B H R M C K"], Float[Array, "B H R M C V"]]:
    """One token per row: token `offset` of the open chunk, which lies in slot `kept`.

    In the order of slots this is plain causal attention, at a position of its own per head; slots
    behind the open one are not read.
    """
    B, H, R, M, C, _ = keys.shape
    slot = jnp.where(active[:, None], kept, M)
    places = jnp.broadcast_to(offset[:, None], slot.shape)
    write = jax.vmap(
        jax.vmap(lambda slots, at, place, new: slots.at[:, at, place].set(new, mode="drop"))
    )
    keys = write(keys, slot, places, k.reshape(B, H, R, -1))
    values = write(values, slot, places, v.reshape(B, H, R, -1))
    position = jnp.broadcast_to((kept * C + offset[:, None])[..., None], (B, H, R))
    position = position.reshape(B, H * R)
    o = head_cache.attend_newest(q, _slots(keys), _slots(values), position, **kernel)
    return o, keys, values


def fuse(
    read: Float[Array, "B T Ha V"],
    seen: Float[Array, "B T Ha V"],
    weights: Float[Array, "B T Ha 2"] | None,
    gate: Float[Array, "B T Ha*V"],
    read_weight: Float[Array, "V"],
    seen_weight: Float[Array, "V"],
    eps: float,
) -> Float[Array, "B T Ha*V"]:
    """silu(gate) * (w_0 RMSNorm(read) + w_1 RMSNorm(seen)), in fp32 and returned so.

    XLA makes one kernel of it; docs/speed.md has its bandwidth.
    """
    read, seen = rms_normalise(read, read_weight, eps), rms_normalise(seen, seen_weight, eps)
    if weights is not None:
        read, seen = weights[..., :1] * read, weights[..., 1:] * seen
    return (jax.nn.silu(upcast(gate)).reshape(read.shape) * (read + seen)).reshape(gate.shape)


def merge(
    first: Float[Array, "B T H V"],
    first_lse: Float[Array, "B H T"],
    second: Float[Array, "B T H V"],
    second_lse: Float[Array, "B H T"],
) -> Float[Array, "B T H V"]:
    """Attention over the union of two disjoint sets of keys, from attention over each."""
    largest = jax.lax.stop_gradient(jnp.maximum(first_lse, second_lse))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    first_sum, second_sum = jnp.exp(first_lse - largest), jnp.exp(second_lse - largest)
    total = first_sum + second_sum
    total = jnp.where(total == 0, 1, total)  # a query that sees nothing keeps its zeros

    def weight(sums: Array) -> Array:
        return jnp.moveaxis(sums / total, 1, 2)[..., None]

    return (weight(first_sum) * first + weight(second_sum) * second).astype(first.dtype)


def _slots(cache: Float[Array, "B H R M C K"]) -> Float[Array, "B Ha S K"]:
    B, H, R, M, C, K = cache.shape
    return cache.reshape(B, H * R, M * C, K)


def probe_documents(
    difference: Float[Array, "B N H"],
    segment_ids: Int[Array, "B T"] | None,
    chunk_size: int,
    chunks: int,
) -> tuple[Int[Array, "B N"], Float[Array, "B N H"]]:
    """Each chunk's number in its document, and the sum over the document's first `chunks`.

    Only meaningful for the chunks behind those.
    """
    B, N, _ = difference.shape
    index = jnp.broadcast_to(jnp.arange(N), (B, N))
    if segment_ids is None:
        start = jnp.zeros_like(index)
    else:
        start = document_starts(segment_ids)[:, ::chunk_size] // chunk_size
    number = index - start
    asked = jnp.where((number < chunks)[..., None], difference, 0)
    total = jax.vmap(partial(jax.ops.segment_sum, num_segments=N))(asked, start)
    return number, jnp.take_along_axis(total, start[..., None], 1)
