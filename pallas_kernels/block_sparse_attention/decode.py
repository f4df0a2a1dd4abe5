"""Attention of one or a few new queries over a cache of pages, each head with a list of its own.

What a head keeps is its list's business: all pages; the first ones and a ring of the latest; the
chunks that were routed to softmax. One rule serves them all, because every page says where its
tokens stand. This is the plain XLA form: pages are copied together a group at a time.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.blocks import cdiv

GROUP_TOKENS = 1024


def decode_attention(
    q: Float[Array, "B t H K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
    pages: Int[Array, "B G N"],
    starts: Int[Array, "B G N"],
    positions: Int[Array, "B t"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """Softmax attention of query head h over the pages listed for key/value head h // (H / G).

    Token c of a listed page n stands at position starts[n] + c; a query sees it when that is <= its
    own position. A page id < 0 is no page. The order of a list does not matter, so it may be a
    ring: with pages of the mask's block size, the sink pages and a ring of `local_blocks` pages
    give what `BlockMask.streaming` gives, as long as the queries of a call lie in one block. A page
    that is being written again hides what is left in it, which now stands after the query.

    A query that sees no token gets o = 0, lse = -inf. Accumulation in fp32; o has the dtype of v.

    Raises:
      ValueError, TypeError: for shapes and dtypes that disagree, naming both.
    """
    _check(q, k_pages, v_pages, pages, starts, positions)
    (B, t, H, K), (G, N), (C, V) = q.shape, pages.shape[1:], v_pages.shape[1:]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if q.dtype == exact else None
    grouped = q.reshape(B, t, G, H // G, K)
    group = max(1, min(GROUP_TOKENS // C, N))

    def split(x, nothing):  # [B, G, N] -> [groups, B, G, group]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -N % group)), constant_values=nothing)
        return jnp.moveaxis(x.reshape(B, G, cdiv(N, group), group), 2, 0)

    def attend(carry, listed):
        """Online softmax: one group of pages more."""
        largest, weight, total = carry
        page, start = listed
        keys, values = (x[jnp.maximum(page, 0)] for x in (k_pages, v_pages))  # [B, G, n, C, K]
        visible = _visible(page, start, positions, C)
        logits = (K**-0.5 if scale is None else scale) * jnp.einsum(
            "btgrk,bgnck->bgrtnc",
            grouped,
            keys,
            precision=precision,
            preferred_element_type=exact,
        )
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logits = jnp.where(visible, logits, -jnp.inf).reshape(B, G, H // G, t, -1)
        raised = jnp.maximum(largest, logits.max(-1))
        base = jnp.where(raised == -jnp.inf, 0, raised)[..., None]
        p, shrink = jnp.exp(logits - base), jnp.exp(largest[..., None] - base)
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
    (largest, weight, total), _ = lax.scan(attend, empty, listed)
    o = (total / jnp.where(weight == 0, 1, weight)[..., None]).reshape(B, H, t, V)
    lse = (largest + jnp.log(weight)).reshape(B, H, t)
    return o.swapaxes(1, 2).astype(v_pages.dtype), lse


def _visible(
    page: Int[Array, "B G n"], start: Int[Array, "B G n"], positions: Int[Array, "B t"], C: int
) -> Bool[Array, "B G 1 t n C"]:
    position = start[..., None] + jnp.arange(C)  # [B, G, n, C]
    before = position[:, :, None] <= positions[:, None, :, None, None]
    return (before & (page >= 0)[:, :, None, :, None])[:, :, None]


def _check(q, k_pages, v_pages, pages, starts, positions) -> None:
    ranks = {"q": (q, 4), "k_pages": (k_pages, 3), "v_pages": (v_pages, 3), "pages": (pages, 3)}
    for name, (array, rank) in ranks.items():
        if array.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} is empty: {array.shape}")
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages)):
        if array.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {array.dtype}")
    for name, array in (("pages", pages), ("starts", starts), ("positions", positions)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be integer, got {array.dtype}")
    if k_pages.shape[:2] != v_pages.shape[:2]:
        raise ValueError(
            f"k_pages is {k_pages.shape[:2]} pages of tokens, v_pages {v_pages.shape[:2]}"
        )
    if q.shape[3] != k_pages.shape[2]:
        raise ValueError(f"q has head dim {q.shape[3]}, k_pages has {k_pages.shape[2]}")
    if pages.shape[0] != q.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, pages has batch {pages.shape[0]}")
    if q.shape[2] % pages.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {pages.shape[1]} lists")
    if starts.shape != pages.shape:
        raise ValueError(f"starts has shape {starts.shape}, pages has {pages.shape}")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be {list(q.shape[:2])}, got {list(positions.shape)}")
