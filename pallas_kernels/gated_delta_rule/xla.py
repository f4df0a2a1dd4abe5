"""The gated delta rule over chunks in plain JAX: batched matrix products, and one state pass.

Derivation and notation: README.md beside this file. Axes inside: N chunks, B rows, Hk query/key
heads, R = H / Hk value heads to each of them, C tokens; einsums spell them n b h r i (or j, c).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv, merge_chunks, pad_to_multiple, split_chunks
from pallas_kernels.gated_delta_rule import state_pass
from pallas_kernels.gated_delta_rule.decays import (
    Decays,
    chunk_decays,
    log_decay_gradient,
    reset_counts,
)
from pallas_kernels.gated_delta_rule.triangular import unit_lower_inverse

_TREE_FROM_CHUNKS = 16  # on a GPU, where each sequential step costs several kernel launches


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    precision: jax.lax.PrecisionLike
    state_pass: state_pass.Strategy

    def product(self, spec: str, x: Array, y: Array, *, like: Array) -> Array:
        """An einsum of operands in the dtype of `like` (q, k, v), accumulated in fp32 or wider."""
        accumulator = jnp.promote_types(like.dtype, jnp.float32)
        precision = self.precision
        if precision is None and like.dtype == accumulator:
            precision = jax.lax.Precision.HIGHEST
        x, y = x.astype(like.dtype), y.astype(like.dtype)
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=accumulator)


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
    [C, C] tile per chunk and value head, and recomputes the rest."""
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    N, R = cdiv(T, chunk_size), H // Hk

    def chunks(x):  # [B, T, ...] -> [N, B, C, ...]
        return jnp.moveaxis(split_chunks(pad_to_multiple(x, chunk_size, 1), chunk_size), 1, 0)

    resets = None
    if segment_ids is not None:
        padded = pad_to_multiple(segment_ids, chunk_size, 1, repeat_last=True)
        resets = chunks(reset_counts(padded))
    if write_mask is not None:
        write_mask = jnp.moveaxis(write_mask, 1, 0).reshape(N, B, Hk, R)
    strategy = "scan"
    if N >= _TREE_FROM_CHUNKS and dispatch.Target.current().platform == "gpu":
        strategy = "tree"
    o, state = _over_chunks(
        _Options(scale, precision, strategy),
        jnp.moveaxis(chunks(q), 3, 2),  # [N, B, Hk, C, K]
        jnp.moveaxis(chunks(k), 3, 2),
        jnp.moveaxis(chunks(v).reshape(N, B, chunk_size, Hk, R, V), 2, 4),
        jnp.moveaxis(chunks(g).reshape(N, B, chunk_size, Hk, R), 2, 4),
        jnp.moveaxis(chunks(beta).reshape(N, B, chunk_size, Hk, R), 2, 4),
        write_mask,
        initial_state.reshape(B, Hk, R, K, V),
        resets,
    )
    o = merge_chunks(jnp.moveaxis(o, (0, 4), (1, 2)))[:, :T]  # [B, T, Hk, R, V]
    return o.reshape(B, T, H, V), state.reshape(B, H, K, V)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_chunks(options, q, k, v, g, beta, write_mask, initial, resets):
    return _forward(options, q, k, v, g, beta, write_mask, initial, resets)[0]


def _decays(g, write_mask, resets) -> Decays:
    """The chunk's decays with `write_mask` in `out`: the weight of a write in the next state."""
    decays = chunk_decays(g, resets)
    if write_mask is None:
        return decays
    return decays._replace(out=decays.out * write_mask[..., None])


def _states(options, k, v, beta, decays, inverse, initial):
    """Recalls and states: new values Vn [.. C V], entering states, final state, transitions."""
    product = functools.partial(options.product, like=k)
    dtype = k.dtype
    erasing = (inverse * (beta * decays.into)[..., None, :]).astype(dtype)
    writing = (inverse * beta[..., None, :]).astype(dtype)
    w = product("nbhrij,nbhjk->nbhrik", erasing, k).astype(dtype)
    u = product("nbhrij,nbhrjv->nbhriv", writing, v).astype(dtype)
    k_out = (k[:, :, :, None] * decays.out[..., None]).astype(dtype)
    erase = product("nbhrck,nbhrcw->nbhrkw", k_out, w).astype(dtype)
    write = product("nbhrck,nbhrcv->nbhrkv", k_out, u).astype(dtype)
    transition = state_pass.Transition(decays.through, erase)
    levels = state_pass.transition_levels(transition, product, options.state_pass)
    entering, final = state_pass.entering_states(levels, write, initial, product)
    entering = entering.astype(dtype)
    new = (u - product("nbhrck,nbhrkv->nbhrcv", w, entering)).astype(dtype)
    return w, k_out, levels, entering, final, new


def _forward(options, q, k, v, g, beta, write_mask, initial, resets):
    product = functools.partial(options.product, like=k)
    decays = _decays(g, write_mask, resets)
    similarity = product("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
    strict = jnp.tril(beta[..., None] * similarity * decays.pair, -1)
    inverse = unit_lower_inverse(strict).astype(k.dtype)
    _, _, _, entering, final, new = _states(options, k, v, beta, decays, inverse, initial)
    attention = product("nbhik,nbhjk->nbhij", q, k)[:, :, :, None] * decays.pair
    recalled = product("nbhck,nbhrkv->nbhrcv", q, entering)
    o = decays.into[..., None] * recalled + product("nbhrij,nbhrjv->nbhriv", attention, new)
    o = (options.scale * o).astype(v.dtype)
    return (o, final), (q, k, v, g, beta, write_mask, initial, resets, inverse)


def _backward(options, residuals, cotangents):
    """Gradients from the identities of README.md: (I + L) Vn = Z = beta (V - into K S)."""
    q, k, v, g, beta, write_mask, initial, resets, inverse = residuals
    do, dfinal = cotangents
    dtype = k.dtype
    scale = options.scale
    product = functools.partial(options.product, like=k)
    decays = _decays(g, write_mask, resets)
    w, k_out, levels, entering, _, new = _states(options, k, v, beta, decays, inverse, initial)

    similarity = product("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
    scores = scale * product("nbhik,nbhjk->nbhij", q, k)[:, :, :, None]
    attention = (scores * decays.pair).astype(dtype)
    q_into = scale * q[:, :, :, None] * decays.into[..., None]
    reading = q_into - product("nbhrij,nbhrjk->nbhrik", attention, w)
    dwrite = product("nbhrck,nbhrcv->nbhrkv", reading, do)
    dstate, dinitial = state_pass.leaving_cotangents(levels, dwrite, dfinal, product)
    dstate = dstate.astype(dtype)

    dnew = product("nbhrij,nbhriv->nbhrjv", attention, do)
    dnew += product("nbhrck,nbhrkv->nbhrcv", k_out, dstate)
    dz = product("nbhrij,nbhriv->nbhrjv", inverse, dnew).astype(dtype)

    dattention = scale * product("nbhriv,nbhrjv->nbhrij", do, new) * decays.pair
    dstrict = -jnp.tril(product("nbhriv,nbhrjv->nbhrij", dz, new) * decays.pair, -1)
    dsimilarity = beta[..., None] * dstrict
    pair = dattention * (scores / scale) + dsimilarity * similarity

    dq_read = scale * product("nbhrcv,nbhrkv->nbhrck", do, entering)
    dk_read = -product("nbhrcv,nbhrkv->nbhrck", dz, entering)  # of beta into k, through Z
    dk_write = product("nbhrcv,nbhrkv->nbhrck", new, dstate)  # of out k
    k_row, q_row = k[:, :, :, None], q[:, :, :, None]
    read = (dk_read * k_row).sum(-1)
    dinto = (dq_read * q_row).sum(-1) + beta * read
    dout = (dk_write * k_row).sum(-1)
    dthrough = (entering.astype(g.dtype) * dstate).sum((-2, -1))

    dbeta = decays.into * read + (dz * v).sum(-1, dtype=g.dtype)
    dbeta += (dstrict * similarity).sum(-1)
    dv = (beta[..., None] * dz).astype(v.dtype)
    dq = (decays.into[..., None] * dq_read).sum(3)
    dk = ((beta * decays.into)[..., None] * dk_read + decays.out[..., None] * dk_write).sum(3)
    dattention, dsimilarity = dattention.sum(3), dsimilarity.sum(3)
    dq += product("nbhij,nbhjk->nbhik", dattention, k)
    dk += product("nbhij,nbhik->nbhjk", dattention, q)
    dk += product("nbhij,nbhjk->nbhik", dsimilarity + jnp.swapaxes(dsimilarity, -1, -2), k)
    dg = log_decay_gradient(pair, dinto * decays.into, dout * decays.out, dthrough * decays.through)
    dmask = None
    if write_mask is not None:
        dmask = (dout * chunk_decays(g, resets).out).sum(-1)
    return dq.astype(dtype), dk.astype(dtype), dv, dg, dbeta, dmask, dinitial, None


_over_chunks.defvjp(_forward, _backward)
