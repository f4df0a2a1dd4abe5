"""The gated delta rule one token at a time: the definition the other implementations must match."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


def kept(
    segment_ids: Int[Array, "B T"] | None, shape: tuple[int, int], dtype: jnp.dtype
) -> Float[Array, "B T"]:
    """The factor of the state before each token: 0 where the segment changes, else 1."""
    if segment_ids is None:
        return jnp.ones(shape, dtype)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return 1 - jnp.pad(changes, ((0, 0), (1, 0))).astype(dtype)


def chunk_ends(
    write_mask: Float[Array, "B N H"] | None,
    shape: tuple[int, int, int],
    chunk_size: int,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "T B H"], Bool[Array, "T"]]:
    """The weight of each token's chunk, and whether the chunk closes after the token."""
    B, T, H = shape
    token = jnp.arange(T)
    closes = (token % chunk_size == chunk_size - 1) | (token == T - 1)
    if write_mask is None:
        return jnp.ones((T, B, H), dtype), closes
    return jnp.moveaxis(write_mask.astype(dtype), 1, 0)[token // chunk_size], closes


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
    """The token recurrence, with a_t = exp(g_t), or 0 where the segment changes:

        S_t = a_t S_{t-1} + k_t (beta_t (v_t - a_t S_{t-1}^T k_t))^T;  o_t = scale S_t^T q_t

    Beside S it carries `base`, what S would be had the open chunk written nothing. When a chunk
    closes, S becomes base + m_c (S - base). Computes in the dtype of `initial_state`; `precision`
    is ignored: every product is exact to that dtype.
    """
    B, T, H, _ = v.shape
    dtype = initial_state.dtype
    q, k = (jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in (q, k))
    keep = kept(segment_ids, (B, T), dtype)
    weight, closes = chunk_ends(write_mask, (B, T, H), chunk_size, dtype)

    def step(carry, token_inputs):
        state, base = carry  # [B, H, K, V] each
        q_t, k_t, v_t, g_t, beta_t, keep_t, weight_t, closes_t = token_inputs
        decay = (jnp.exp(g_t) * keep_t[:, None])[..., None, None]
        state, base = decay * state, decay * base
        recalled = jnp.einsum("bhkv,bhk->bhv", state, k_t, precision=_HIGHEST)
        state += k_t[..., :, None] * (beta_t[..., None] * (v_t - recalled))[..., None, :]
        o_t = scale * jnp.einsum("bhkv,bhk->bhv", state, q_t, precision=_HIGHEST)
        rolled_back = base + weight_t[..., None, None] * (state - base)
        state = jnp.where(closes_t, rolled_back, state)
        return (state, jnp.where(closes_t, state, base)), o_t

    by_token = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, g, beta, keep)]
    (state, _), o = jax.lax.scan(step, (initial_state, initial_state), (*by_token, weight, closes))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state
