"""The recurrence over tiles of tokens in plain JAX, differentiated by JAX.

With S entering a tile of C tokens, c the running sum of g inside it (a vector per key channel) and
e^x elementwise, GLA's tile form (arXiv 2312.06635) is

    M_ij   = sum over d of q_id k_jd e^(c_id - c_jd)   for i >= j, else 0
    O      = scale (Q ∘ e^c) S + scale M V
    S_next = e^(c_C) ∘ S + (K ∘ e^(c_C - c))^T V

The delta rule replaces V by U - W S, the solution of a triangular system as for the scalar decay
(../gated_delta_rule/README.md); L is M with k in the place of q, strictly below the diagonal:

    (I + beta L) U = beta V,     (I + beta L) W = beta (K ∘ e^c)

An exclusive read (RWKV-6) has c_(i-1) in the place of c_i on the side of q, and the bonus on the
diagonal of M. A document boundary hides pairs of tokens, and tokens from S or S_next; it does not
touch c.

Axes inside: N tiles, B rows, H heads, C tokens of a tile; einsums spell them n b h and i, j or c.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv, merge_chunks, pad_to_multiple, split_chunks
from pallas_kernels.gated_delta_rule.decays import reset_counts, visible
from pallas_kernels.gated_delta_rule.triangular import unit_lower_inverse
from pallas_kernels.gated_linear_attention.decayed_products import (
    SUB_CHUNK,
    decayed_products,
    sums_after,
    sums_until,
)
from pallas_kernels.products import product

_UNROLL = 4  # tiles per iteration of the state pass


def gated_linear_attention(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    *,
    beta: Float[Array, "B T H"] | None,
    bonus: Float[Array, "H K"] | None,
    initial_state: Float[Array, "B H K V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """See `api.gated_linear_attention`. The backward keeps the arguments and computes the rest
    again."""
    T, H = v.shape[1:3]
    sub_chunk = min(SUB_CHUNK, chunk_size, T)
    tile = sub_chunk * min(cdiv(chunk_size, sub_chunk), cdiv(T, sub_chunk))

    def tiles(x, **padding):  # [B, T, ...] -> [N, B, C, ...]
        return jnp.moveaxis(split_chunks(pad_to_multiple(x, tile, 1, **padding), tile), 1, 0)

    def by_head(x):  # [B, T, H or Hk, ...] -> [N, B, H, C, ...], in fp32 or wider
        x = jnp.repeat(x, H // x.shape[2], axis=2)
        return jnp.moveaxis(tiles(x), 3, 2).astype(g.dtype)

    resets = None
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        before = jnp.pad(counts[:, :-1], ((0, 0), (1, 0)))
        resets = (tiles(before, repeat_last=True)[..., 0], tiles(counts, repeat_last=True))
    over_tiles = partial(_over_tiles, q.dtype, sub_chunk, precision)
    o, state = jax.checkpoint(over_tiles)(
        *(by_head(x) for x in (q, k, v, g)),
        None if beta is None else by_head(beta),
        bonus,
        initial_state,
        resets,
    )
    o = merge_chunks(jnp.moveaxis(o, (0, 3), (1, 2)))[:, :T]
    return (scale * o).astype(v.dtype), state


def _over_tiles(dtype, sub_chunk, precision, q, k, v, g, beta, bonus, initial, resets):
    """(o / scale [N, B, H, C, V], final state) from [N, B, H, C, ...] tiles."""
    multiply = partial(product, dtype=dtype, precision=precision)
    pairs = partial(decayed_products, multiply=multiply, sub_chunk=sub_chunk)
    exclusive = bonus is not None
    C = g.shape[3]
    seen = visible(resets, C)
    until = sums_until(g, 3)
    into = jnp.where(seen.into[:, :, None, :, None], jnp.exp(until), 0)
    out = jnp.where(seen.out[:, :, None, :, None], jnp.exp(sums_after(g, 3)), 0)
    through = jnp.where(seen.through[:, :, None, None], jnp.exp(until[..., -1, :]), 0)
    hidden = ~seen.pair[:, :, None]

    own = (q * k if bonus is None else q * k * bonus[:, None]).sum(-1)
    attention = jnp.where(hidden, 0, pairs(q, k, g, exclusive=exclusive))
    attention += own[..., None] * jnp.eye(C, dtype=g.dtype)
    reading = q * into
    if exclusive:  # the decays up to the token before; a new document starts from nothing
        before = sums_until(g, 3, exclusive=True)
        reading = q * jnp.where(seen.into[:, :, None, :, None], jnp.exp(before), 0)

    if beta is None:
        write = multiply("nbhck,nbhcv->nbhkv", k * out, v)
        final, entering = jax.lax.scan(
            lambda state, tile: (tile[0][..., None] * state + tile[1], state),
            initial,
            (through, write),
            unroll=_UNROLL,
        )
    else:
        strict = beta[..., None] * jnp.where(hidden, 0, pairs(k, k, g, exclusive=False))
        inverse = unit_lower_inverse(strict) * beta[..., None, :]
        solved = multiply("nbhij,nbhjv->nbhiv", inverse, v)
        recalled = multiply("nbhij,nbhjk->nbhik", inverse, k * into)

        def step(state, tile):
            through, recalled, solved, writing = tile
            written = solved - multiply("bhck,bhkv->bhcv", recalled, state)
            after = through[..., None] * state
            after += multiply("bhck,bhcv->bhkv", writing, written)
            return after, (state, written)

        tiles = (through, recalled, solved, k * out)
        final, (entering, v) = jax.lax.scan(step, initial, tiles, unroll=_UNROLL)
    o = multiply("nbhck,nbhkv->nbhcv", reading, entering)
    return o + multiply("nbhij,nbhjv->nbhiv", attention, v), final
