"""The gated delta rule over chunks in plain JAX: batched matrix products, and one state pass.

Derivation and notation: README.md beside this file. Axes inside: N tiles, B rows, Hk query/key
heads, R = H / Hk value heads to each of them, C tokens of a tile; einsums spell them n b h r and
i, j or c.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks
from pallas_kernels.gated_delta_rule import state_pass
from pallas_kernels.gated_delta_rule.decays import (
    chunk_decays,
    log_decay_gradient,
    reset_counts,
    weighted,
    write_weights,
)
from pallas_kernels.gated_delta_rule.triangular import unit_lower_inverse
from pallas_kernels.products import einsum


class Tiling(NamedTuple):
    tile: int  # tokens computed together, a multiple of the write mask's chunks
    stretches: int  # of each row, see `state_pass`


def choose_tiling(T: int, unit: int, states: int, state_size: int) -> Tiling:
    """The tiling of rows of T tokens, write mask in units of `unit`, `states` states at a time.

    On a GPU a sequential step over the tiles costs about 6 microseconds whatever it holds, up to a
    megabyte of states: larger tiles make fewer steps, and stretches fill the steps of long rows
    with few heads. Elsewhere a step costs its arithmetic, which both would increase.
    """
    on_gpu = dispatch.Target.current().platform == "gpu"
    units = max(1, (128 if on_gpu else 64) // unit)
    tile = unit * min(units, cdiv(T, unit))
    tiles = cdiv(T, tile)
    stretches = min(48 * 128 * 128 // (states * state_size), tiles // 8)
    return Tiling(tile, stretches if on_gpu and stretches >= 4 else 1)


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    precision: jax.lax.PrecisionLike
    unit: int
    stretches: int

    def product(self, spec: str, x: Array, y: Array, *, like: Array) -> Array:
        return einsum(spec, x, y, like.dtype, self.precision)


def gated_delta_rule(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """See `api.gated_delta_rule`. Backward memory is linear in T: it keeps q, k, v, g, beta and one
    [C, C] inverse per tile and value head, and recomputes the rest."""
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    R = H // Hk
    # A whole row in one chunk may end the chunk; without a mask chunks do not matter.
    unit = 1 if write_mask is None else min(chunk_size, T)
    tile, stretches = choose_tiling(T, unit, B * H, K * V)

    def tiles(x, size, **padding):
        """[B, T, ...] -> [N, B, size, ...]; N counts the stretches first: tile i of each, then
        tile i + 1 of each."""
        x = split_chunks(pad_to_multiple(x, stretches * size, 1, **padding), size)
        x = x.reshape(B, stretches, -1, *x.shape[2:])
        return jnp.moveaxis(x, (2, 1), (0, 1)).reshape(-1, B, *x.shape[3:])

    def tokens(x):
        """The inverse of `tiles`, padding cut off."""
        x = x.reshape(-1, stretches, *x.shape[1:])
        x = jnp.moveaxis(x, (0, 1), (2, 1))
        return x.reshape(B, -1, *x.shape[4:])[:, :T]

    def grouped(x, size=tile):  # [B, T, H, ...] -> [N, B, Hk, R, size, ...]
        return jnp.moveaxis(tiles(x.reshape(B, -1, Hk, R, *x.shape[3:]), size), 2, 4)

    resets = None
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        before = jnp.pad(counts[:, :-1], ((0, 0), (1, 0)))
        resets = (
            tiles(before, tile, repeat_last=True)[..., 0],
            tiles(counts, tile, repeat_last=True),
        )
    if write_mask is not None:
        write_mask = grouped(write_mask, tile // unit)
    o, state = _over_chunks(
        _Options(scale, precision, unit, stretches),
        jnp.moveaxis(tiles(q, tile), 3, 2),  # [N, B, Hk, C, K]
        jnp.moveaxis(tiles(k, tile), 3, 2),
        grouped(v),
        grouped(g),
        grouped(beta),
        write_mask,
        initial_state.reshape(B, Hk, R, K, V),
        resets,
    )
    o = tokens(jnp.moveaxis(o, 4, 2))  # [B, T, Hk, R, V]
    return o.reshape(B, T, H, V), state.reshape(B, H, K, V)


def _outputs(options, q, k, v, g, beta, write_mask, initial, resets) -> tuple[Array, Array]:
    return _forward(options, q, k, v, g, beta, write_mask, initial, resets)[0]


_over_chunks = jax.custom_vjp(_outputs, nondiff_argnums=(0,))


def _chunk_maps(options, k, v, beta, decays, inverse):
    """W and U of every chunk and its affine map of the state: (I + L) Vn = Z makes Vn = U - W S."""
    product = functools.partial(options.product, like=k)
    dtype = k.dtype
    out = decays.out[..., None]
    k_heads = _by_value_head(k, v)

    def solved(columns, x):
        """A x and its decayed twin, each rounded once."""
        spec = "nbhrij,nbhjk->nbhrik" if x.ndim == 5 else "nbhrij,nbhrjk->nbhrik"
        tile = inverse * columns[..., None, :]
        return product(spec, tile, x).astype(dtype), product(spec, out * tile, x).astype(dtype)

    w, w_out = solved(beta * decays.into, k)
    u, u_out = solved(beta, v)
    affine = state_pass.AffineMap(
        decays.through,
        product("nbhrck,nbhrcw->nbhrkw", k_heads, w_out).astype(dtype),
        product("nbhrck,nbhrcv->nbhrkv", k_heads, u_out).astype(dtype),
    )
    return w, u, affine


def _by_value_head(k, v):
    """[N, B, Hk, C, K] -> [N, B, Hk, R, C, K]: repeats k, where the alternative is to transpose a
    product with R value heads, which is larger."""
    return jnp.broadcast_to(k[:, :, :, None], (*v.shape[:-1], k.shape[-1]))


def _by_stretch(options, affine):
    """[N, ...] -> [chunks of a stretch, stretches, ...]"""
    return jax.tree.map(lambda x: x.reshape(-1, options.stretches, *x.shape[1:]), affine)


def _entering(options, affine, initial, like):
    product = functools.partial(options.product, like=like)
    entering, final, stretches = state_pass.entering_states(
        _by_stretch(options, affine), initial, product
    )
    return entering.reshape(-1, *entering.shape[2:]), final, stretches


def _reading(options, q, w, attention, decays):
    """What of the entering state each output reads, both directly and through the new values."""
    direct = options.scale * q[:, :, :, None] * decays.into[..., None]
    indirect = options.product("nbhrij,nbhrjk->nbhrik", attention, w, like=q)
    return (direct - indirect).astype(q.dtype)


def _attention(options, q, k, decays):
    scores = options.product("nbhik,nbhjk->nbhij", q, k, like=k)[:, :, :, None]
    return scores, (options.scale * scores * decays.pair).astype(k.dtype)


def _forward(options, q, k, v, g, beta, write_mask, initial, resets):
    product = functools.partial(options.product, like=k)
    decays = weighted(chunk_decays(g, resets), write_mask, options.unit)
    similarity = product("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
    strict = jnp.tril(beta[..., None] * similarity * decays.pair, -1)
    # TF32, on a GPU, has more digits than the bf16 the inverse is rounded to.
    narrow = k.dtype.itemsize < strict.dtype.itemsize
    precision = jax.lax.Precision.HIGH if narrow else jax.lax.Precision.HIGHEST
    inverse = unit_lower_inverse(strict, precision).astype(k.dtype)
    w, u, affine = _chunk_maps(options, k, v, beta, decays, inverse)
    entering, final, _ = _entering(options, affine, initial, k)
    _, attention = _attention(options, q, k, decays)
    reading = _reading(options, q, w, attention, decays)
    o = product("nbhrck,nbhrkv->nbhrcv", reading, entering)
    o += product("nbhrij,nbhrjv->nbhriv", attention, u)
    return (o.astype(v.dtype), final), (q, k, v, g, beta, write_mask, initial, resets, inverse)


def _backward(options, residuals, cotangents):
    """Gradients from the identities of README.md: (I + L) Vn = Z = beta (V - into K S)."""
    q, k, v, g, beta, write_mask, initial, resets, inverse = residuals
    do, dfinal = cotangents
    dtype = k.dtype
    scale = options.scale
    product = functools.partial(options.product, like=k)
    decays = weighted(chunk_decays(g, resets), write_mask, options.unit)
    w, u, affine = _chunk_maps(options, k, v, beta, decays, inverse)
    entering, _, stretches = _entering(options, affine, initial, k)
    new = (u - product("nbhrck,nbhrkv->nbhrcv", w, entering)).astype(dtype)

    scores, attention = _attention(options, q, k, decays)
    reading = _reading(options, q, w, attention, decays)
    dwrite = product("nbhrck,nbhrcv->nbhrkv", reading, do).astype(dtype)
    dstate, dinitial = state_pass.leaving_cotangents(
        _by_stretch(options, affine._replace(write=dwrite)), stretches, dfinal, product
    )
    dstate = dstate.reshape(entering.shape)

    similarity = product("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
    dnew = product("nbhrij,nbhriv->nbhrjv", attention, do)
    dnew += decays.out[..., None] * product("nbhrck,nbhrkv->nbhrcv", _by_value_head(k, v), dstate)
    dz = product("nbhrij,nbhriv->nbhrjv", inverse, dnew).astype(dtype)

    dattention = scale * product("nbhriv,nbhrjv->nbhrij", do, new)  # before `pair`, as the next
    dstrict = -jnp.tril(product("nbhriv,nbhrjv->nbhrij", dz, new), -1)
    dpair = dattention * scores + beta[..., None] * dstrict * similarity
    dattention, dstrict = dattention * decays.pair, dstrict * decays.pair

    dq_read = scale * product("nbhrcv,nbhrkv->nbhrck", do, entering)
    dk_read = -product("nbhrcv,nbhrkv->nbhrck", dz, entering)  # of beta into k, through Z
    dk_write = product("nbhrcv,nbhrkv->nbhrck", new, dstate)  # of out k
    k_row, q_row = k[:, :, :, None], q[:, :, :, None]
    read = (dk_read * k_row).sum(-1)
    dinto = (dq_read * q_row).sum(-1) + beta * read
    dout = (dk_write * k_row).sum(-1)
    dthrough = (entering.astype(g.dtype) * dstate.astype(g.dtype)).sum((-2, -1))

    dbeta = decays.into * read + (dz * v).sum(-1, dtype=g.dtype)
    dbeta += (dstrict * similarity).sum(-1)
    dv = (beta[..., None] * dz).astype(v.dtype)
    dq = (decays.into[..., None] * dq_read).sum(3)
    dk = ((beta * decays.into)[..., None] * dk_read + decays.out[..., None] * dk_write).sum(3)
    dattention, dsimilarity = dattention.sum(3), (beta[..., None] * dstrict).sum(3)
    dq += product("nbhij,nbhjk->nbhik", dattention, k)
    dk += product("nbhij,nbhik->nbhjk", dattention, q)
    dk += product("nbhij,nbhjk->nbhik", dsimilarity + jnp.swapaxes(dsimilarity, -1, -2), k)
    dg = log_decay_gradient(
        dpair * decays.pair, dinto * decays.into, dout * decays.out, dthrough * decays.through
    )
    dmask = None
    if write_mask is not None:
        whole = chunk_decays(g, resets)
        weights = functools.partial(write_weights, unit=options.unit, tile=g.shape[-1])
        _, weights_pullback = jax.vjp(weights, write_mask)
        (dmask,) = weights_pullback((dpair * whole.pair, dout * whole.out))
    return dq.astype(dtype), dk.astype(dtype), dv, dg, dbeta, dmask, dinitial, None


_over_chunks.defvjp(_forward, _backward)
