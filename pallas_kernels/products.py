"""Matrix products of rounded operands, accumulated in fp32: forward, and the same backward."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array


def einsum(
    spec: str, x: Array, y: Array, dtype: str | jnp.dtype, precision: jax.lax.PrecisionLike = None
) -> Array:
    """The einsum of x and y rounded to `dtype`, accumulated and returned in fp32 or wider.

    Products of fp32 operands are exact to fp32 unless `precision` says otherwise.
    """
    accumulator = jnp.promote_types(dtype, jnp.float32)
    if precision is None and jnp.dtype(dtype) == accumulator:
        precision = jax.lax.Precision.HIGHEST
    x, y = x.astype(dtype), y.astype(dtype)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=accumulator)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def product(
    spec: str, x: Array, y: Array, dtype: str, precision: jax.lax.PrecisionLike = None
) -> Array:
    """`einsum`, whose gradients are products of the same kind: cotangents are rounded to `dtype`
    too, where differentiating `einsum` would multiply fp32 cotangents. The gradients come in the
    dtypes of x and y, so operands that are used several times are better handed over in fp32.

    Every letter of one operand must be in the other or in the result.
    """
    return einsum(spec, x, y, dtype, precision)


def _forward(spec, x, y, dtype, precision):
    return einsum(spec, x, y, dtype, precision), (x, y)


def _backward(spec, dtype, precision, operands, cotangent):
    x, y = operands
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    dx = einsum(f"{out},{b}->{a}", cotangent, y, dtype, precision)
    dy = einsum(f"{out},{a}->{b}", cotangent, x, dtype, precision)
    return dx.astype(x.dtype), dy.astype(y.dtype)


product.defvjp(_forward, _backward)
