"""Shape arithmetic shared by the ops: padding the time axis and splitting it into chunks."""

import jax.numpy as jnp

from pallas_kernels.array_types import Array


def cdiv(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) of two positive integers."""
    return -(-numerator // denominator)


def pad_to_multiple(x: Array, multiple: int, axis: int, *, repeat_last: bool = False) -> Array:
    """Appends zeros (or copies of the last entry) until `axis` is a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    if missing == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, mode="edge" if repeat_last else "constant")


def split_chunks(x: Array, chunk_size: int, *, axis: int = 1) -> Array:
    """[..., N * C, ...] -> [..., N, C, ...] with C = `chunk_size`."""
    axis %= x.ndim
    chunks = x.shape[axis] // chunk_size
    return x.reshape(*x.shape[:axis], chunks, chunk_size, *x.shape[axis + 1 :])


def merge_chunks(x: Array, *, axis: int = 1) -> Array:
    """[..., N, C, ...] -> [..., N * C, ...], the inverse of `split_chunks`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
