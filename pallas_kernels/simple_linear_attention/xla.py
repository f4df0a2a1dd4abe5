"""The recurrence over tiles of tokens in plain JAX, differentiated by JAX.

It is the gated delta rule's tile form (README.md there) without the erase: with the decay factors
of `decays`, S entering a tile and S_next leaving it,

    O      = scale in (Q S) + [scale Q K^T ∘ D] V
    S_next = a S + (out K)^T V

Axes inside: N tiles, B rows, Hk query/key heads, R = H / Hk value heads to each of them, C tokens
of a tile; einsums spell them n b h r and i, j or c. A state is held as [K, R, V], so that the R
value heads of a query/key head, w = (r, v), are columns of one product.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import merge_chunks, pad_to_multiple, split_chunks
from pallas_kernels.gated_delta_rule.decays import chunk_decays, reset_counts, weighted
from pallas_kernels.gated_delta_rule.state_pass import pass_decayed
from pallas_kernels.gated_delta_rule.xla import choose_tiling
from pallas_kernels.products import product


def simple_linear_attention(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """See `api.simple_linear_attention`. The backward keeps the arguments and computes the rest
    again."""
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    R = H // Hk
    # A whole row in one chunk may end the chunk; without a mask chunks do not matter.
    unit = 1 if write_mask is None else min(chunk_size, T)
    tile = choose_tiling(T, unit, B * H, K * V).tile

    def tiles(x, size=tile, **padding):  # [B, T, ...] -> [N, B, size, ...]
        return jnp.moveaxis(split_chunks(pad_to_multiple(x, size, 1, **padding), size), 1, 0)

    def grouped(x, size=tile):  # [B, T, H] -> [N, B, Hk, R, size]
        return jnp.moveaxis(tiles(x.reshape(B, -1, Hk, R), size), 2, 4)

    resets = None
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        before = jnp.pad(counts[:, :-1], ((0, 0), (1, 0)))
        resets = (tiles(before, repeat_last=True)[..., 0], tiles(counts, repeat_last=True))
    over_tiles = partial(_over_tiles, q.dtype, unit, scale, precision)
    o, state = jax.checkpoint(over_tiles)(
        jnp.moveaxis(tiles(q), 3, 2),  # [N, B, Hk, C, K]
        jnp.moveaxis(tiles(k), 3, 2),
        jnp.moveaxis(tiles(v.reshape(B, T, Hk, R, V)), 3, 2),  # [N, B, Hk, C, R, V]
        grouped(g),
        None if write_mask is None else grouped(write_mask, tile // unit),
        jnp.moveaxis(initial_state.reshape(B, Hk, R, K, V), 2, 3),
        resets,
    )
    o = merge_chunks(jnp.moveaxis(o, (0, 3), (1, 2)))[:, :T]  # [B, T, Hk, R, V]
    state = jnp.moveaxis(state, 3, 2)
    return o.reshape(B, T, H, V).astype(v.dtype), state.reshape(B, H, K, V)


def _over_tiles(dtype, unit, scale, precision, q, k, v, g, write_mask, initial, resets):
    multiply = partial(product, dtype=dtype, precision=precision)
    q, k, v = (x.astype(g.dtype) for x in (q, k, v))  # for gradients summed in fp32
    decays = weighted(chunk_decays(g, resets), write_mask, unit)
    into, out = (jnp.swapaxes(x, 3, 4)[..., None] for x in (decays.into, decays.out))
    through = decays.through[:, :, :, None, :, None]

    def side_by_side(x):  # [..., R, V] -> [..., R * V]
        return x.reshape(*x.shape[:-2], -1)

    def apart(x):
        return x.reshape(*x.shape[:-1], *v.shape[-2:])

    write = apart(multiply("nbhck,nbhcw->nbhkw", k, side_by_side(out * v)))
    entering, final = pass_decayed(through, write, initial)
    attention = multiply("nbhik,nbhjk->nbhij", q, k)[:, :, :, None] * decays.pair
    o = multiply("nbhrij,nbhjrv->nbhirv", attention, v)
    o += into * apart(multiply("nbhck,nbhkw->nbhcw", q, side_by_side(entering)))
    return scale * o, final
