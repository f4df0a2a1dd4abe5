"""Dense masked attention over every listed token in fp32 (float64 for float64 inputs)."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.decode_attention.parts import Logits, visible


def attend(
    logits: Logits,
    q: Float[Array, "B t H K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
    pages: Int[Array, "B G N"],
    starts: Int[Array, "B G N"],
    positions: Int[Array, "B t"],
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """See `api.decode_attention`."""
    (B, t, H, _), (G, N), C = q.shape, pages.shape[1:], k_pages.shape[1]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (x[jnp.maximum(pages, 0)].astype(exact) for x in (k_pages, v_pages))
    k, v = (jnp.repeat(x.reshape(B, G, N * C, -1), H // G, axis=1) for x in (k, v))
    seen = visible(pages, starts, positions, C).reshape(B, G, t, N * C)
    seen = jnp.repeat(seen, H // G, axis=1)  # [B, H, t, S]
    precision = lax.Precision.HIGHEST
    a = logits.scale * jnp.einsum("bthk,bhsk->bhts", q.astype(exact), k, precision=precision)
    if logits.softcap is not None:
        a = logits.softcap * jnp.tanh(a / logits.softcap)
    largest = jnp.max(a, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    base = jnp.where(largest == -jnp.inf, 0, largest)
    p = jnp.where(seen, jnp.exp(jnp.where(seen, a - base, 0)), 0)
    weight = p.sum(-1, keepdims=True)
    some = weight > 0
    o = jnp.einsum("bhts,bhsv->bthv", p / jnp.where(some, weight, 1), v, precision=precision)
    lse = jnp.where(some, base + jnp.log(jnp.where(some, weight, 1)), -jnp.inf)[..., 0]
    return o.astype(v_pages.dtype), lse
