"""The recurrence one token at a time: the definition the other implementations must match."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.gated_delta_rule.reference import kept

_HIGHEST = jax.lax.Precision.HIGHEST


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
    """See `api.gated_linear_attention`; S_{t-1} is zero where the segment changes.

    Computes in the dtype of `initial_state`; `chunk_size` and `precision` are ignored: every
    product is exact to that dtype.
    """
    B, T, H, _ = v.shape
    dtype = initial_state.dtype
    q, k = (jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in (q, k))

    def transposed_product(state, x):  # state^T x
        return jnp.einsum("bhkv,bhk->bhv", state, x, precision=_HIGHEST)

    def step(state, token):
        q_t, k_t, v_t, g_t, keep_t, beta_t = token
        before = keep_t[:, None, None, None] * state  # [B, H, K, V]
        decayed = jnp.exp(g_t)[..., None] * before
        write = v_t
        if beta is not None:
            write = beta_t[..., None] * (v_t - transposed_product(decayed, k_t))
        state = decayed + k_t[..., :, None] * write[..., None, :]
        read = state
        if bonus is not None:
            read = before + (bonus * k_t)[..., :, None] * write[..., None, :]
        return state, scale * transposed_product(read, q_t)

    keep = kept(segment_ids, (B, T), dtype)
    strength = jnp.ones((B, T, H), dtype) if beta is None else beta
    by_token = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, g, keep, strength)]
    state, o = jax.lax.scan(step, initial_state, tuple(by_token))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state
