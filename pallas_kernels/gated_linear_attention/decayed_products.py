"""Products of rows and columns with the decay between them, one rate per channel.

    P_ij = sum over d of x_id y_jd exp(g_(j+1)d + ... + g_id)      for i > j, else 0

As a matrix product this is (x ∘ e^c) (y ∘ e^-c)^T, but e^-c overflows. So a tile is cut into
sub-chunks (secondary chunking, arXiv 2312.06635, section 4.3). Between two of them the decay is the
product of three factors, each at most 1: from j to the end of its sub-chunk, through the sub-chunks
in between, and from the start of i's sub-chunk to i. Inside one, differences are exponentiated pair
by pair.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.blocks import split_chunks
from pallas_kernels.gated_delta_rule.decays import coarse_and_fine_sums

SUB_CHUNK = 16


def sums_until(x: Array, axis: int, *, exclusive: bool = False) -> Array:
    """Sums along `axis` up to each entry; with `exclusive`, up to the one before it."""
    return jnp.cumsum(_shifted(x, axis, 1) if exclusive else x, axis)


def sums_after(x: Array, axis: int) -> Array:
    """Sums along `axis` of what follows each entry."""
    return jnp.flip(jnp.cumsum(jnp.flip(_shifted(x, axis, -1), axis), axis), axis)


def _shifted(x: Array, axis: int, by: int) -> Array:
    """x moved by one place along `axis`, a zero moving in."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (1, 0) if by == 1 else (0, 1)
    length = x.shape[axis]
    start = 0 if by == 1 else 1
    return jax.lax.slice_in_dim(jnp.pad(x, widths), start, start + length, axis=axis)


def decayed_products(
    x: Float[Array, "N B H C K"],
    y: Float[Array, "N B H C K"],
    g: Float[Array, "N B H C K"],
    *,
    exclusive: bool,
    multiply: Callable[[str, Array, Array], Array],
    sub_chunk: int,
) -> Float[Array, "N B H C C"]:
    """P of every tile; with `exclusive` the decay of i itself is left out."""
    *leading, C, K = g.shape
    x, y, g = (split_chunks(a.reshape(-1, C, K), sub_chunk) for a in (x, y, g))  # [n, s, c, K]
    S = C // sub_chunk
    row, column = jnp.arange(S)[:, None, None], jnp.arange(S)[None, :, None]
    between = (column < jnp.arange(S)) & (jnp.arange(S) < row)  # sub-chunk m lies between s and t
    passed = jnp.einsum(
        "stm,nmk->nstk", between.astype(g.dtype), g.sum(2), precision=jax.lax.Precision.HIGHEST
    )
    rows = x * jnp.exp(sums_until(g, 2, exclusive=exclusive))
    columns = y[:, None] * jnp.exp(sums_after(g, 2)[:, None] + passed[:, :, :, None])
    columns = columns.reshape(-1, S, C, K)
    across = multiply("nsik,nsjk->nsij", rows, columns).reshape(-1, S, sub_chunk, S, sub_chunk)
    earlier = (jnp.arange(S)[:, None] > jnp.arange(S))[:, None, :, None]
    across = jnp.where(earlier, across, 0)

    coarse, fine = coarse_and_fine_sums(g, 2)
    until = [_shifted(c, 2, 1) if exclusive else c for c in (coarse, fine)]
    log_decay = sum(
        u[:, :, :, None] - c[:, :, None] for u, c in zip(until, (coarse, fine), strict=True)
    )
    strictly = jnp.tri(sub_chunk, k=-1, dtype=bool)
    decaying = jnp.tri(sub_chunk, k=-2 if exclusive else -1, dtype=bool)
    decay = jnp.exp(jnp.where(decaying[..., None], log_decay, 0))
    inside = jnp.where(strictly, (x[:, :, :, None] * y[:, :, None] * decay).sum(-1), 0)
    own = jnp.eye(S, dtype=bool)[:, None, :, None]
    tile = jnp.where(own, inside[:, :, :, None], across)
    return tile.reshape(*leading, C, C)
