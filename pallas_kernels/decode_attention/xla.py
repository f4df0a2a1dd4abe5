"""The plain XLA form: pages are copied together a group at a time, online softmax over groups."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv
from pallas_kernels.decode_attention.parts import Logits, visible

GROUP_TOKENS = 1024


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
    (B, t, H, K), (G, N), (C, V) = q.shape, pages.shape[1:], v_pages.shape[1:]
    scale, softcap = logits
    exact = jnp.promote_types(q.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q.dtype == exact else None
    grouped = q.reshape(B, t, G, H // G, K)
    group = max(1, min(GROUP_TOKENS // C, N))

    def split(x, nothing):  # [B, G, N] -> [groups, B, G, group]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -N % group)), constant_values=nothing)
        return jnp.moveaxis(x.reshape(B, G, cdiv(N, group), group), 2, 0)

    def add_group(carry, listed):
        """Online softmax: one group of pages more."""
        largest, weight, total = carry
        page, start = listed
        keys, values = (x[jnp.maximum(page, 0)] for x in (k_pages, v_pages))  # [B, G, n, C, K]
        seen = visible(page, start, positions, C)[:, :, None]
        a = scale * jnp.einsum(
            "btgrk,bgnck->bgrtnc",
            grouped,
            keys,
            precision=precision,
            preferred_element_type=exact,
        )
        if softcap is not None:
            a = softcap * jnp.tanh(a / softcap)
        a = jnp.where(seen, a, -jnp.inf).reshape(B, G, H // G, t, -1)
        raised = jnp.maximum(largest, a.max(-1))
        base = jnp.where(raised == -jnp.inf, 0, raised)[..., None]
        p, shrink = jnp.exp(a - base), jnp.exp(largest[..., None] - base)
        added = jnp.einsum(
            "bgrts,bgsv->bgrtv",
            p.astype(values.dtype),
            values.reshape(B, G, -1, V),
            precision=precision,
            preferred_element_type=exact,
        )
        return (raised, weight * shrink[..., 0] + p.sum(-1), total * shrink + added), None

    rows = (B, G, H // G, t)
    empty = jnp.full(rows, -jnp.inf, exact), jnp.zeros(rows, exact), jnp.zeros((*rows, V), exact)
    listed = split(pages, -1), split(starts, 0)
    (largest, weight, total), _ = lax.scan(add_group, empty, listed)
    some = weight > 0
    weight = jnp.where(some, weight, 1)
    o = (total / weight[..., None]).reshape(B, H, t, V)
    lse = jnp.where(some, largest + jnp.log(weight), -jnp.inf).reshape(B, H, t)
    return o.swapaxes(1, 2).astype(v_pages.dtype), lse
