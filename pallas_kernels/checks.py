"""What the recurrences' public ops check before anything compiles, each error one line."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array
from pallas_kernels.blocks import cdiv


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What decides which implementation can run: shapes, dtypes, options; no values."""

    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int
    dtype: str  # of q, k, v and o
    chunk_size: int
    write_mask: bool
    segments: bool


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: Iterable[Array]) -> Array:
    """Zeros that inside a `shard_map` vary over the mesh axes over which any of `like` varies.

    A scan over the arrays makes such a state of them, and must begin with one.
    """
    scalars = (jnp.zeros_like(x, dtype, ()) for x in like)
    return jnp.broadcast_to(functools.reduce(jnp.add, scalars), shape)


def check_recurrence(
    arguments: Mapping[str, Array | None],
    shapes: Mapping[str, str],
    *,
    scale: float | None,
    chunk_size: int,
) -> Problem:
    """Raises TypeError or ValueError in one line: the argument, what it is, what it must be.

    `arguments` holds q, k, v and g first, then the others by name, None where one is left out;
    `shapes` the letters of each, as "B T H V". The letters get their sizes from q [B, T, Hk, K] and
    v [B, T, H, V], T is 1 where they have none, and N is the number of chunks. segment_ids are
    integers, write_mask may be boolean, all others are floating.
    """
    given = {name: x for name, x in arguments.items() if x is not None}
    for name, x in given.items():
        integers, boolean = name == "segment_ids", name == "write_mask" and x.dtype == jnp.bool_
        if integers and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be an integer type")
        if not integers and not boolean and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be floating")
    q, v, g = given["q"], given["v"], given["g"]
    for name in ("k", "v"):
        if given[name].dtype != q.dtype:
            raise TypeError(f"{name} has dtype {given[name].dtype}, q has {q.dtype}; use one")
    for name in ("q", "v"):
        letters = shapes[name].split()
        if given[name].ndim != len(letters):
            wanted = f"{len(letters)}: [{', '.join(letters)}]"
            raise ValueError(f"{name} has {given[name].ndim} axes; it must be {wanted}")
    sizes = dict(zip(shapes["v"].split(), v.shape, strict=True))
    sizes |= dict(zip(shapes["q"].split(), q.shape, strict=True))
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; it must be an integer >= 1")
    for letter, size in sizes.items():
        if size < 1:
            raise ValueError(f"axis {letter} has size {size}; it must be >= 1")
    Hk, H = sizes.setdefault("Hk", sizes["H"]), sizes["H"]
    if H % Hk:
        raise ValueError(f"v has {H} heads, q and k have {Hk}; {H} is not a multiple of {Hk}")
    sizes["N"] = cdiv(sizes.setdefault("T", 1), chunk_size)
    for name, x in given.items():
        expected = tuple(sizes[letter] for letter in shapes[name].split())
        if x.shape != expected:
            raise ValueError(f"{name} has shape {x.shape}; it must be {expected}")
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a Python number")
    concrete = not isinstance(g, jax.core.Tracer) and getattr(g, "is_fully_addressable", True)
    if concrete and (largest := float(np.max(np.asarray(g)))) > 0:
        raise ValueError(f"g reaches {largest:g}; a log decay must be <= 0")
    return Problem(
        **{letter: sizes[letter] for letter in ("B", "T", "Hk", "H", "K", "V")},
        dtype=q.dtype.name,
        chunk_size=chunk_size,
        write_mask="write_mask" in given,
        segments="segment_ids" in given,
    )
