"""The step in plain JAX: two passes over the state, one that reads it and one that updates it."""

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float


def step(
    scale: float,
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """See `api.gated_delta_step`. Sums over K are elementwise, in the dtype of the state.

    With w = beta (v - exp(g) S^T k) the output needs no second reading of the new state:
    S_new^T q = exp(g) S^T q + (k . q) w.
    """
    dtype, group = state.dtype, v.shape[1] // q.shape[1]
    q, k = (jnp.repeat(x.astype(dtype), group, axis=1)[..., None] for x in (q, k))
    decay = jnp.exp(g)[..., None]
    recalled, read = ((state * x).sum(-2) for x in (k, q))  # S^T k, S^T q: [B, H, V]
    written = beta[..., None] * (v.astype(dtype) - decay * recalled)
    o = scale * (decay * read + (k * q).sum(-2) * written)
    return o.astype(v.dtype), decay[..., None] * state + k * written[..., None, :]
