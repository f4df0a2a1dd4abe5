"""Dense masked attention in fp32 (float64 for float64 inputs): the ground truth, by autodiff.

It holds the full [B, H, T, S] scores. `scene` and `visibility` turn a mask, offsets, a window and
segment ids into the visible pairs; the XLA implementation asks them for fewer queries at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import (
    BlockMask,
    Chunks,
    Pairs,
    blocks_to_keys,
    document_starts,
    rows_to_heads,
)


class Scene(NamedTuple):
    """Everything but q, k, v and the bias that decides what a query sees."""

    mask: BlockMask
    offset: Int[Array, "#B"]
    documents: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None  # ids of queries and keys
    document_start: Int[Array, "#B S"]


def scene(
    mask: BlockMask,
    T: int,
    S: int,
    q_offset: int | Int[Array, "*B"] | None,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
) -> Scene:
    """Fills in the defaults: q_offset = S - T, kv_segment_ids = segment_ids."""
    offset = jnp.atleast_1d(jnp.asarray(S - T if q_offset is None else q_offset, jnp.int32))
    if segment_ids is None:
        return Scene(mask, offset, None, jnp.zeros((1, S), jnp.int32))
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    return Scene(mask, offset, (segment_ids, kv_segment_ids), document_starts(kv_segment_ids))


def visibility(
    scene: Scene, heads: int, index: Int[Array, "t"], window: int | None, keys: int
) -> tuple[Bool[Array, "#B #H #t #S"], Bool[Array, "#B #H #t #S"]]:
    """For the queries `index` and the first S = `keys` keys: (visible pairs, inter-chunk pairs)."""
    position = scene.offset[:, None] + index
    pairs = Pairs(heads, index, position, scene.document_start[:, :keys])
    distance = position[:, :, None] - pairs.key
    near = distance >= 0
    if window is not None:
        near &= distance < window
    if scene.documents is not None:
        query_ids, key_ids = scene.documents
        own = jnp.take(query_ids, index, axis=1, mode="clip")[:, :, None]
        near &= (own == key_ids[:, None, :keys]) & (own >= 0)
    return near[:, None] & scene.mask.visible(pairs), scene.mask.inter_chunk(pairs)


def block_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    mask: BlockMask,
    *,
    scale: float,
    block_bias: Float[Array, "B R N"] | None,
    q_offset: int | Int[Array, "*B"] | None,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """See `pallas_kernels.block_sparse_attention`."""
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    out_dtype, dtype = v.dtype, jnp.promote_types(v.dtype, jnp.float32)
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    everything = scene(mask, T, S, q_offset, segment_ids, kv_segment_ids)
    visible, biased = visibility(everything, H, jnp.arange(T, dtype=jnp.int32), window, S)

    grouped = q.reshape(B, T, G, H // G, K)
    scores = scale * jnp.einsum("btgrk,bsgk->bgrts", grouped, k, precision=lax.Precision.HIGHEST)
    scores = scores.reshape(B, H, T, S)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if block_bias is not None:
        scores += jnp.where(biased, bias_by_key(block_bias.astype(dtype), mask, H, S), 0)

    some = visible.any(-1, keepdims=True)
    # a row that sees nothing computes with zeros and is replaced, so that no NaN is differentiated
    scores = jnp.where(visible, scores, jnp.where(some, -jnp.inf, 0))
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    probabilities = (weights / total).reshape(B, G, H // G, T, S)
    o = jnp.einsum("bgrts,bsgv->bgrtv", probabilities, v, precision=lax.Precision.HIGHEST)
    o = jnp.where(some, o.reshape(B, H, T, v.shape[-1]), 0).swapaxes(1, 2)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]
    return o.astype(out_dtype), lse


def bias_by_key(
    block_bias: Float[Array, "B R N"], mask: BlockMask, heads: int, S: int
) -> Float[Array, "B H 1 S"]:
    """The bias of each key's chunk, for each query head."""
    chunk_size = next(leaf.chunk_size for leaf in mask.leaves() if isinstance(leaf, Chunks))
    return blocks_to_keys(rows_to_heads(block_bias, heads), chunk_size, S)[:, :, None, :]
