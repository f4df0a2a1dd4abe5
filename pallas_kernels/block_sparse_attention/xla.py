"""Block-sparse attention in plain XLA: one block of queries against all keys at a time.

The scores of one query block are the only [block, S] array that ever exists; the backward pass
recomputes them from lse. Pairs that a mask hides are computed and discarded, so time does not
depend on the mask, but a long row is cut into spans that leave out the keys after their last query.
Matmuls take the input dtype and accumulate in fp32 (float64 for float64 inputs).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.block_sparse_attention.reference import Scene, bias_by_key, scene, visibility
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks

QUERY_BLOCK = 128
SPAN_TOKENS, MAX_SPANS = 512, 4


class _Options(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    offset: int | None  # q_offset where it is known before the program runs


class _Span(NamedTuple):
    """Queries [start, stop), in blocks of `block`, against the first `keys` keys."""

    start: int
    stop: int
    block: int
    keys: int


class _ByKey(NamedTuple):
    """What the queries meet at each key. G key/value heads, r query heads for each of them."""

    keys: Float[Array, "B G S K"]
    values: Float[Array, "B G S V"]
    bias: Float[Array, "B G S r"] | None


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
    T, S = q.shape[1], k.shape[1]
    options = _Options(scale, window, softcap, S - T if q_offset is None else None)
    everything = scene(mask, T, S, q_offset, segment_ids, kv_segment_ids)
    return _attend(options, q, k, v, block_bias, everything)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, block_bias, scene: Scene):
    return _forward(options, q, k, v, block_bias, scene)[0]


def _forward(options: _Options, q, k, v, block_bias, scene: Scene):
    by_key = _by_key(k, v, block_bias, q.shape[2], scene.mask)
    spans = _spans(q.shape[1], k.shape[1], options.offset)
    outputs = [_forward_span(options, span, q, by_key, scene) for span in spans]
    o, lse = (jnp.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True))
    lse = lse[..., 0].swapaxes(1, 2)
    return (o, lse), (q, k, v, block_bias, scene, o, lse)


def _forward_span(options: _Options, span: _Span, q, by_key: _ByKey, scene: Scene):
    """(o [B, t, H, V], lse [B, t, H, 1]) of the queries of a span."""
    by_key = _first_keys(by_key, span)

    def attend(block):
        index, q = block
        scores, _, _ = _scores(options, span, index, q, by_key, scene)
        largest = scores.max(-1, keepdims=True)
        # a row that sees nothing has no largest score; 0 keeps the exponent a number
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        o = _matmul("bgrts,bgsv->bgrtv", weights.astype(by_key.values.dtype), by_key.values)
        o = o / jnp.where(total == 0, 1, total)
        return o.astype(by_key.values.dtype), largest + jnp.log(total)

    o, lse = lax.map(attend, (_indices(span), _split(q, span, by_key)))
    return _merge(o, span), _merge(lse, span)


def _backward(options: _Options, residuals, cotangents):
    """The formulas are in README.md."""
    q, k, v, block_bias, scene, o, lse = residuals
    do, dlse = cotangents
    lse, dlse = lse.swapaxes(1, 2)[..., None], dlse.swapaxes(1, 2)[..., None]  # [B, T, H, 1]
    some = lse > -jnp.inf  # rows that see nothing pass no gradient on, whatever arrives
    do = jnp.where(some, do, 0)
    delta = (do.astype(lse.dtype) * o.astype(lse.dtype)).sum(-1, keepdims=True)
    rows = (q, do, jnp.where(some, lse, 0), jnp.where(some, dlse - delta, 0))

    arrange = partial(_by_key, heads=q.shape[2], mask=scene.mask)
    by_key, vjp = jax.vjp(arrange, k, v, block_bias)
    sums = jax.tree.map(lambda x: jnp.zeros_like(x, lse.dtype), by_key)
    dqs = []
    for span in _spans(q.shape[1], k.shape[1], options.offset):
        dq, sums = _backward_span(options, span, rows, by_key, sums, scene)
        dqs.append(dq)
    dk, dv, dbias = vjp(jax.tree.map(lambda total, x: total.astype(x.dtype), sums, by_key))
    return jnp.concatenate(dqs, axis=1), dk, dv, dbias, None


def _backward_span(
    options: _Options, span: _Span, rows, by_key: _ByKey, sums: _ByKey, scene: Scene
):
    """dq of the queries of a span, and `sums` with what they add to the gradients by key."""
    near = _first_keys(by_key, span)

    def differentiate(sums, block):
        index, q, do, lse, shift = block
        scores, slope, biased = _scores(options, span, index, q, near, scene)
        p = jnp.exp(scores - lse)
        da = p * (_matmul("bgrtv,bgsv->bgrts", do, near.values) + shift)
        dx = (da * slope * options.scale).astype(q.dtype)
        added = _ByKey(
            keys=_matmul("bgrts,bgrtk->bgsk", dx, q),
            values=_matmul("bgrts,bgrtv->bgsv", p.astype(do.dtype), do),
            bias=None if near.bias is None else jnp.where(biased, da, 0).sum(3).swapaxes(2, 3),
        )
        dq = _matmul("bgrts,bgsk->bgrtk", dx, near.keys).astype(q.dtype)
        return jax.tree.map(jnp.add, sums, added), dq

    blocks = (_indices(span), *(_split(x, span, by_key) for x in rows))
    zeros = jax.tree.map(jnp.zeros_like, _first_keys(sums, span))
    added, dq = lax.scan(differentiate, zeros, blocks)

    def add(total, x):
        return total + jnp.pad(x, ((0, 0), (0, 0), (0, total.shape[2] - span.keys), (0, 0)))

    return _merge(dq, span), jax.tree.map(add, sums, added)


_attend.defvjp(_forward, _backward)


def _scores(
    options: _Options, span: _Span, index: Int[Array, "t"], q, by_key: _ByKey, scene: Scene
) -> tuple[Float[Array, "B G r t s"], Float[Array, "..."], Bool[Array, "#B #G #r #t #s"]]:
    """(logits, -inf where hidden; their slope in scale q.k; the pairs that carry the bias)."""
    G, r = q.shape[1:3]
    visible, biased = visibility(scene, G * r, index, options.window, span.keys)
    visible &= (index < span.stop)[:, None]  # the last block of a span is padded

    def grouped(pairs):  # [#B, #H, t, s] -> [#B, #G, #r, t, s]
        heads = (1, 1) if pairs.shape[1] == 1 else (G, r)
        return pairs.reshape(pairs.shape[0], *heads, *pairs.shape[2:])

    visible, biased = grouped(visible), grouped(biased)
    scores = options.scale * _matmul("bgrtk,bgsk->bgrts", q, by_key.keys)
    slope = jnp.ones((), scores.dtype)
    if options.softcap is not None:
        bounded = jnp.tanh(scores / options.softcap)
        scores, slope = options.softcap * bounded, 1 - bounded * bounded
    if by_key.bias is not None:
        scores += jnp.where(biased, by_key.bias.swapaxes(2, 3)[..., None, :], 0)
    return jnp.where(visible, scores, -jnp.inf), slope, biased


def _matmul(equation: str, a: Array, b: Array) -> Array:
    accumulator = jnp.promote_types(a.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == accumulator else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=accumulator)


def _by_key(k, v, block_bias, heads: int, mask: BlockMask) -> _ByKey:
    B, S, G, _ = k.shape
    bias = None
    if block_bias is not None:
        block_bias = block_bias.astype(jnp.promote_types(k.dtype, jnp.float32))
        bias = bias_by_key(block_bias, mask, heads, S).reshape(B, G, -1, S).swapaxes(2, 3)
    return _ByKey(k.swapaxes(1, 2), v.swapaxes(1, 2), bias)


def _first_keys(by_key: _ByKey, span: _Span) -> _ByKey:
    return jax.tree.map(lambda x: x[:, :, : span.keys], by_key)


def _spans(T: int, S: int, offset: int | None) -> list[_Span]:
    """Cuts T queries into spans of whole blocks; query i sees no key after offset + i."""
    block = cdiv(T, cdiv(T, QUERY_BLOCK))
    count = 1 if offset is None else min(MAX_SPANS, cdiv(T, SPAN_TOKENS))
    length = block * cdiv(cdiv(T, count), block)
    spans = []
    for start in range(0, T, length):
        stop = min(start + length, T)
        keys = S if offset is None else min(max(offset + stop, 1), S)
        spans.append(_Span(start, stop, block, keys))
    return spans


def _indices(span: _Span) -> Int[Array, "n t"]:
    count = cdiv(span.stop - span.start, span.block) * span.block
    return split_chunks(span.start + jnp.arange(count, dtype=jnp.int32), span.block, axis=0)


def _split(x: Float[Array, "B T H d"], span: _Span, by_key: _ByKey) -> Array:
    """The rows of a span: [B, T, H, d] -> [n, B, G, r, t, d]."""
    B, _, H, d = x.shape
    G = by_key.keys.shape[1]
    x = split_chunks(pad_to_multiple(x[:, span.start : span.stop], span.block, axis=1), span.block)
    return x.reshape(B, -1, span.block, G, H // G, d).transpose(1, 0, 3, 4, 2, 5)


def _merge(x: Float[Array, "n B G r t d"], span: _Span) -> Float[Array, "B rows H d"]:
    n, B, G, r, t, d = x.shape
    merged = x.transpose(1, 0, 4, 2, 3, 5).reshape(B, n * t, G * r, d)
    return merged[:, : span.stop - span.start]
