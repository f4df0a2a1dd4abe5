"""Block-sparse attention in plain XLA: one block of queries against all keys at a time.

The scores of one query block are the only [block, S] array that ever exists; the backward pass
recomputes them from lse. Masked pairs are computed and discarded, so time does not depend on the
mask. Matmuls take the input dtype and accumulate in fp32 (float64 for float64 inputs).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.block_sparse_attention.reference import Scene, bias_by_key, scene, visibility
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks

SCORES_PER_BLOCK = 2**25  # 128 MiB of fp32 scores, over batch and heads


class _Options(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


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
    everything = scene(mask, q.shape[1], k.shape[1], q_offset, segment_ids, kv_segment_ids)
    return _attend(_Options(scale, window, softcap), q, k, v, block_bias, everything)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, block_bias, scene: Scene):
    return _forward(options, q, k, v, block_bias, scene)[0]


def _forward(options: _Options, q, k, v, block_bias, scene: Scene):
    T, G = q.shape[1], k.shape[2]
    tokens = _query_block(q.shape, k.shape)
    score = _scorer(options, q, k, block_bias, scene)
    values = v.swapaxes(1, 2)  # [B, G, S, V]

    def attend(block):
        index, q = block
        scores, _, visible, _ = score(index, q)
        largest = jnp.max(scores, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
        # a row that sees nothing has no largest score; 0 keeps the exponent a number
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        weights = jnp.where(visible, jnp.exp(scores - largest), 0)
        total = weights.sum(-1, keepdims=True)
        o = _matmul("bgrts,bgsv->bgrtv", weights.astype(v.dtype), values)
        o = o / jnp.where(total == 0, 1, total)
        return o.astype(v.dtype), largest + jnp.log(total)

    o, lse = lax.map(attend, (_indices(T, tokens), _split(q, tokens, G)))
    o, lse = _merge(o, T), _merge(lse, T)[..., 0].swapaxes(1, 2)
    return (o, lse), (q, k, v, block_bias, scene, o, lse)


def _backward(options: _Options, residuals, cotangents):
    """The formulas are in README.md; `da` is the gradient of the logits a_ij."""
    q, k, v, block_bias, scene, o, lse = residuals
    do, dlse = cotangents
    T, G = q.shape[1], k.shape[2]
    tokens = _query_block(q.shape, k.shape)
    score = _scorer(options, q, k, block_bias, scene)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, G, S, _]

    lse, dlse = lse.swapaxes(1, 2)[..., None], dlse.swapaxes(1, 2)[..., None]  # [B, T, H, 1]
    some = lse > -jnp.inf  # rows that see nothing pass no gradient on, whatever arrives
    do = jnp.where(some, do, 0)
    delta = (do.astype(lse.dtype) * o.astype(lse.dtype)).sum(-1, keepdims=True)
    shift = jnp.where(some, dlse - delta, 0)
    lse = jnp.where(some, lse, 0)

    def differentiate(sums, block):
        dk, dv, dbias = sums
        index, q, do, lse, shift = block
        scores, slope, visible, biased = score(index, q)
        p = jnp.where(visible, jnp.exp(scores - lse), 0)
        da = p * (_matmul("bgrtv,bgsv->bgrts", do, values) + shift)
        if dbias is not None:
            dbias += jnp.where(biased, da, 0).sum(3, keepdims=True)
        dx = (da * slope * options.scale).astype(q.dtype)
        dq = _matmul("bgrts,bgsk->bgrtk", dx, keys)
        dk += _matmul("bgrts,bgrtk->bgsk", dx, q)
        dv += _matmul("bgrts,bgrtv->bgsv", p.astype(v.dtype), do)
        return (dk, dv, dbias), dq.astype(q.dtype)

    dbias, bias_vjp = None, None
    if block_bias is not None:
        bias, bias_vjp = jax.vjp(lambda x: _grouped_bias(x, q, k, scene.mask), block_bias)
        dbias = jnp.zeros_like(bias)
    sums = (jnp.zeros_like(keys, lse.dtype), jnp.zeros_like(values, lse.dtype), dbias)
    blocks = (_indices(T, tokens), *(_split(x, tokens, G) for x in (q, do, lse, shift)))
    (dk, dv, dbias), dq = lax.scan(differentiate, sums, blocks)
    dk, dv = dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype)
    return _merge(dq, T), dk, dv, bias_vjp and bias_vjp(dbias)[0], None


_attend.defvjp(_forward, _backward)


def _scorer(options: _Options, q, k, block_bias, scene: Scene):
    """A function of a query block: (logits, d logit / d (scale q.k), visible, biased pairs)."""
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    keys = k.swapaxes(1, 2)  # [B, G, S, K]
    bias = 0 if block_bias is None else _grouped_bias(block_bias, q, k, scene.mask)

    def grouped(pairs):  # [#B, #H, t, S] -> [#B, #G, #r, t, S]
        heads = (1, 1) if pairs.shape[1] == 1 else (G, H // G)
        return pairs.reshape(pairs.shape[0], *heads, *pairs.shape[2:])

    def score(index, q):
        visible, biased = (grouped(x) for x in visibility(scene, H, index, options.window))
        visible &= (index < T)[:, None]  # the last block is padded
        scores, slope = options.scale * _matmul("bgrtk,bgsk->bgrts", q, keys), 1
        if options.softcap is not None:
            bounded = jnp.tanh(scores / options.softcap)
            scores, slope = options.softcap * bounded, 1 - bounded * bounded
        if block_bias is not None:
            scores += jnp.where(biased, bias, 0)
        return scores, slope, visible, biased

    return score


def _grouped_bias(block_bias, q, k, mask: BlockMask) -> Float[Array, "B G r 1 S"]:
    (B, _, H, _), (S, G) = q.shape, k.shape[1:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    return bias_by_key(block_bias.astype(dtype), mask, H, S).reshape(B, G, H // G, 1, S)


def _matmul(equation: str, a: Array, b: Array) -> Array:
    accumulator = jnp.promote_types(a.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == accumulator else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=accumulator)


def _query_block(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> int:
    """Queries per block: what SCORES_PER_BLOCK allows, in blocks of equal size."""
    (B, T, H, _), S = q_shape, k_shape[1]
    return cdiv(T, min(T, cdiv(B * H * T * S, SCORES_PER_BLOCK)))


def _indices(T: int, tokens: int) -> Int[Array, "n t"]:
    return split_chunks(jnp.arange(cdiv(T, tokens) * tokens, dtype=jnp.int32), tokens, axis=0)


def _split(x: Float[Array, "B T H d"], tokens: int, G: int) -> Float[Array, "n B G r t d"]:
    B, _, H, d = x.shape
    x = split_chunks(pad_to_multiple(x, tokens, axis=1), tokens)
    return x.reshape(B, -1, tokens, G, H // G, d).transpose(1, 0, 3, 4, 2, 5)


def _merge(x: Float[Array, "n B G r t d"], T: int) -> Float[Array, "B T H d"]:
    n, B, G, r, t, d = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(B, n * t, G * r, d)[:, :T]
