"""Inverse of unit lower-triangular tiles, stable for any input."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float

_SCALAR_PRODUCTS_UP_TO = 4  # rows; below this a batched matrix product costs more than its sums


def unit_lower_inverse(
    strict: Float[Array, "*batch C C"], precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> Float[Array, "*batch C C"]:
    """(I + strict)^-1 by doubling the size of the inverted diagonal blocks.

    With X the inverse of the block diagonal and S the part of `strict` just below it, each step is
    X <- X - X S X, that is [[A, 0], [-D S A, D]] from neighbouring inverted blocks A and D. Every
    intermediate is a block of the exact inverse, so nothing grows that the result does not contain
    (powers of `strict`, as in a Neumann series, overflow for identical keys). `strict` must be zero
    on and above the diagonal; C need not be a power of two.
    """
    C = strict.shape[-1]
    batch = strict.shape[:-2]
    size = 1 << (C - 1).bit_length()
    strict = jnp.pad(strict, [(0, 0)] * len(batch) + [(0, size - C)] * 2)
    inverse = jnp.ones((*batch, size, 1, 1), strict.dtype)  # [*batch, blocks, rows, rows]
    rows = 1
    while rows < size:
        pairs = size // (2 * rows)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        grid = strict.reshape(*batch, pairs, 2, rows, pairs, 2, rows)[..., :, 1, :, :, 0, :]
        below = jnp.diagonal(grid, axis1=-4, axis2=-2)  # [*batch, rows, rows, pairs]
        below = jnp.moveaxis(below, -1, -3)
        corner = -_product(lower, _product(below, upper, precision), precision)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
                jnp.concatenate([corner, lower], axis=-1),
            ],
            axis=-2,
        )
        rows *= 2
    return inverse.reshape(*batch, size, size)[..., :C, :C]


def _product(x: Array, y: Array, precision: jax.lax.Precision) -> Array:
    if x.shape[-1] <= _SCALAR_PRODUCTS_UP_TO:
        return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)
    return jnp.matmul(x, y, precision=precision)
