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


def widen_chunks(x: Array, chunk_size: int, width: int, *, repeat_last: bool = False) -> Array:
    """[B, T, ...] -> [B, N * width, ...]: each chunk of `chunk_size` tokens, the last one too,
    followed by zeros (or copies of its last entry) up to `width` tokens."""
    chunks = split_chunks(pad_to_multiple(x, chunk_size, 1, repeat_last=repeat_last), chunk_size)
    return merge_chunks(pad_to_multiple(chunks, width, 2, repeat_last=repeat_last))


def narrow_chunks(x: Array, chunk_size: int, width: int, length: int) -> Array:
    """The inverse of `widen_chunks` of `length` tokens."""
    return merge_chunks(split_chunks(x, width)[:, :, :chunk_size])[:, :length]
