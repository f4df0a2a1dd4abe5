"""The recurrence one token at a time: the definition the other implementations must match."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.gated_delta_rule.reference import chunk_ends, kept


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
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t; a_t = exp(g_t), 0 at a new segment.

    S is carried in two parts, `closed` and what the `open` chunk wrote. When a chunk closes,
    `closed` takes m_c times the open part. Computes in the dtype of `initial_state`; `precision`
    is ignored: every product is exact to that dtype.
    """
    B, T, H, _ = v.shape
    dtype = initial_state.dtype
    q, k = (jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in (q, k))
    weight, closes = chunk_ends(write_mask, (B, T, H), chunk_size, dtype)

    def step(carry, token):
        q_t, k_t, v_t, g_t, keep_t, weight_t, closes_t = token
        decay = (jnp.exp(g_t) * keep_t[:, None])[..., None, None]
        closed, opened = (decay * state for state in carry)  # [B, H, K, V] each
        opened += k_t[..., :, None] * v_t[..., None, :]
        highest = jax.lax.Precision.HIGHEST
        o_t = scale * jnp.einsum("bhkv,bhk->bhv", closed + opened, q_t, precision=highest)
        merged = closed + weight_t[..., None, None] * opened
        return (
            jnp.where(closes_t, merged, closed),
            jnp.where(closes_t, jnp.zeros_like(opened), opened),
        ), o_t

    keep = kept(segment_ids, (B, T), dtype)
    by_token = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, g, keep)]
    start = (initial_state, jnp.zeros_like(initial_state))
    (state, _), o = jax.lax.scan(step, start, (*by_token, weight, closes))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state
