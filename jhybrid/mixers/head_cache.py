"""Key/value caches that hold each head's tokens in one run: [B, G, S, K].

Every (row, key/value head) is a row of its own to attention. A step then reads a head's keys in
order and no copy of the cache is made to bring them into order.
"""

import math

import jax.numpy as jnp

from pallas_kernels import BlockMask, block_sparse_attention, decode_attention
from pallas_kernels.array_types import Array, Float, Int

PAGE_TOKENS = 64  # the Hopper kernel takes pages of whole multiples


def whole_pages(tokens: int) -> int:
    """Room for `tokens` tokens in whole pages, where there is more than one."""
    return tokens if tokens <= PAGE_TOKENS else -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def attend_newest(
    q: Float[Array, "B 1 H K"],
    keys: Float[Array, "B G S K"],
    values: Float[Array, "B G S V"],
    position: Int[Array, "B G"],
    **kernel,
) -> Float[Array, "B 1 H V"]:
    """Attention of one query per row over tokens 0 .. `position` of each head's cache.

    Pages behind that token are not read, so a step costs what the heads hold.
    """
    (B, _, H, _), (G, S) = q.shape, keys.shape[1:3]
    page = math.gcd(S, PAGE_TOKENS)
    starts = jnp.broadcast_to(jnp.arange(0, S, page), (B * G, 1, S // page))
    position = position.reshape(B * G, 1)
    ids = jnp.arange(starts.size).reshape(starts.shape)
    o, _ = decode_attention(
        q.reshape(B * G, 1, H // G, -1),
        keys.reshape(starts.size, page, -1),
        values.reshape(starts.size, page, -1),
        jnp.where(starts <= position[..., None], ids, -1),
        starts,
        position,
        **kernel,
    )
    return o.reshape(B, 1, H, -1)


def attend(
    q: Float[Array, "B T H K"],
    keys: Float[Array, "B G S K"],
    values: Float[Array, "B G S V"],
    mask: BlockMask,
    q_offset: int | Int[Array, "B G"],
    **kernel,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """Attention of query head h over the cache of head h // (H / G); `mask` is by (row, head).

    `q_offset` is the position of the first query among the cached keys.
    """
    (B, T, H, _), (G, S) = q.shape, keys.shape[1:3]

    def rows(cache: Array) -> Array:  # [B G, S, 1, K]
        return cache.reshape(B * G, S, 1, -1)

    queries = jnp.moveaxis(q.reshape(B, T, G, H // G, -1), 2, 1).reshape(B * G, T, H // G, -1)
    offset = q_offset if isinstance(q_offset, int) else q_offset.reshape(B * G)
    o, lse = block_sparse_attention(
        queries, rows(keys), rows(values), mask, q_offset=offset, **kernel
    )
    o = jnp.moveaxis(o.reshape(B, G, T, H // G, -1), 1, 2)
    return o.reshape(B, T, H, -1), lse.reshape(B, H, T)
