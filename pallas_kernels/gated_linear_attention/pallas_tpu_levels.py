"""TPU kernels: the decays of a tile by levels, each a matrix product, and the blocks of a step.

Two tokens i > j of a tile of 128 meet at one level, the highest bit in which i and j differ: they
are in the two halves, of b tokens each, of one block of 2 b. With m the first token of the right
half and a_t = exp(g_t) of one channel, the decay from j to i is

    a_(j+1) ... a_i = (a_(j+1) ... a_(m-1)) (a_m ... a_i) = out_j into_i

Both factors are products of numbers at most 1, so none is ever larger, nothing is divided, and each
is as accurate as the last bit however strong its neighbours are. The pairs of a level are then one
product of rows (into ∘ q) of right halves with rows (out ∘ k) of left halves, and seven levels make
the tile. The eighth is the tile itself, between what came before it and what comes after.

A token whose g is -inf starts a document: every product across it is 0.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.gated_delta_rule import pallas_tpu_tiles as delta_rule
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import NN, TILE, positions, product

LEVELS = 7  # of two halves inside a tile
_ROWS = 8  # of a vector register


@dataclasses.dataclass(frozen=True, slots=True)
class Layout(delta_rule.Layout):
    """As the gated delta rule's, with a state that is held transposed, [V, K]."""

    exclusive: bool = False  # a token reads the state before its own decay and write

    def states(self) -> pl.BlockSpec:
        """Of the states of all tiles, [B, H, N, V, K]."""
        block = (1, self.heads, 1, self.V, self.K)
        return pl.BlockSpec(block, lambda b, h, n: (b, h, self._tile(n), 0, 0))

    def state(self) -> pl.BlockSpec:
        """Of one state a row and head, [B, H, V, K]."""
        return pl.BlockSpec((1, self.heads, self.V, self.K), lambda b, h, n: (b, h, 0, 0))

    def bonus(self) -> pl.BlockSpec:
        """Of [H, 1, K]."""
        return pl.BlockSpec((self.heads, 1, self.K), lambda b, h, n: (h, 0, 0))


class Level(NamedTuple):
    """Blocks of 2 `size` tokens, of which the right half sees the left."""

    size: int
    into: Float[Array, "C K"]  # from the start of a token's half to the token
    out: Float[Array, "C K"]  # from the token to the end of its half
    through: Float[Array, "1 K"] | None = None  # of the whole tile, where the half is the tile

    def choose(self, right: Array, left: Array) -> Array:
        """Rows of `right` in right halves, rows of `left` in left halves."""
        if self.size < _ROWS:
            return jnp.where(_rows(right.shape) & self.size != 0, right, left)
        return jnp.concatenate([side[rows] for rows, side in _halves(self.size, left, right)])

    def latest(self, differing: Int[Array, "C C"]) -> Bool[Array, "C C"]:
        """The pairs of this level and of those of larger blocks, from `differing_bits`."""
        return differing >= self.size

    def meeting(self, differing: Int[Array, "C C"]) -> Bool[Array, "C C"]:
        """The pairs of the level."""
        return (differing ^ self.size) < self.size


def differing_bits(*, both_orders: bool) -> Int[Array, "C C"]:
    """i ^ j; where i is later than j, or else 0, unless in both orders."""
    i, j = positions()
    return i ^ j if both_orders else jnp.where(i > j, i ^ j, 0)


def decayed_on_the_way(exclusive: bool) -> Float[Array, "L C C"]:
    """Of each level, for the sums over a tile's tokens that are the gradient of g: one where token
    t, along rows, is decayed on the way to c of its half, if that is a right one, or from it. The
    last two are of the tile, as a right half and as a left one."""
    t, c = np.arange(TILE)[:, None], np.arange(TILE)
    late = t < c if exclusive else t <= c
    sizes = 2 ** np.arange(LEVELS)
    matrices = [((t ^ c) < size) & np.where(t & size, late, c < t) for size in sizes]
    return jnp.asarray(np.stack([*matrices, late, c < t]), jnp.bfloat16)


def _rows(shape: tuple[int, ...]) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _halves(size: int, left: Array, right: Array) -> list[tuple[slice, Array]]:
    """The halves of the tile's blocks in order, each with the array of its side."""
    starts = range(0, TILE, size)
    return [(slice(s, s + size), right if n % 2 else left) for n, s in enumerate(starts)]


def levels(g: Float[Array, "C K"], exclusive: bool) -> Iterator[Level]:
    """Those of 1, 2, ..., 64 tokens and, last, of the tile: `into` from the state that enters,
    `out` to the state that leaves it. `exclusive` leaves the token's own decay out of `into`."""
    decay = jnp.exp(g)
    into, out = decay, jnp.ones_like(decay)
    if exclusive:
        into = jnp.where(g == -jnp.inf, 0.0, 1.0)
    whole = decay  # of the token's half, in each of its rows
    size = 1
    while size < _ROWS:
        yield Level(size, into, out)
        other = _other_half(whole, size)
        right = _rows(into.shape) & size != 0
        into = jnp.where(right, into * other, into)
        out = jnp.where(right, out, out * other)
        whole *= other
        size *= 2
    wholes = [whole[start : start + 1] for start in range(0, TILE, _ROWS)]
    while size < TILE:
        level = Level(size, into, out)
        yield level
        into, out = (
            jnp.concatenate(
                [
                    x[rows] if n % 2 == kept else x[rows] * wholes[n ^ 1]
                    for n, (rows, x) in enumerate(_halves(size, y, y))
                ]
            )
            for y, kept in ((into, 0), (out, 1))
        )
        wholes = [x * y for x, y in zip(wholes[::2], wholes[1::2], strict=True)]
        size *= 2
    yield Level(size, into, out, wholes[0])


def _other_half(x: Float[Array, "C K"], size: int) -> Float[Array, "C K"]:
    """Row i ^ size in the place of row i; `size` is less than a register's rows."""
    registers = x.reshape(-1, _ROWS, x.shape[1])
    row = jax.lax.broadcasted_iota(jnp.int32, registers.shape, 1)
    earlier, later = (pltpu.roll(registers, by, 1) for by in (size, _ROWS - size))
    return jnp.where(row & size != 0, earlier, later).reshape(x.shape)


def sums(ones: Float[Array, "C C"], x: Float[Array, "C K"], dtype: jnp.dtype) -> Array:
    """Row i is the sum of the rows j of x where ones_ij is 1: x as two or three bf16 parts, which
    is exact to 16 or 24 bits."""
    parts = []
    for _ in range(3 if dtype == jnp.float32 else 2):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return product(
        jnp.concatenate([ones] * len(parts), axis=1),
        jnp.concatenate(parts, axis=0),
        NN,
        jnp.dtype(jnp.bfloat16),
    )
