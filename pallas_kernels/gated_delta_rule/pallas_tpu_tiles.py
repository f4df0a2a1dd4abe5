"""TPU kernels: what they share: gates of a tile, decays, products, the inverse, interleaving."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import pad_to_multiple
from pallas_kernels.gated_delta_rule.decays import (
    chunk_decays,
    coarse_and_fine_sums,
    reset_counts,
)

TILE = 128  # tokens computed together: the lanes of a vector register
GATES = 8  # rows of a tile's gates
COARSE, FINE, BETA, INTO, OUT, THROUGH, DOCUMENT, MASK = range(GATES)


def pack_gates(
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    unit: int | None,
) -> Float[Array, "B H N 8 C"]:
    """What the kernels need of every token beside q, k and v, in rows along the lanes.

    COARSE and FINE sum to the log decay since the tile's first token, INTO, OUT and THROUGH are the
    factors of `decays.Decays` (THROUGH repeated), DOCUMENT counts resets and MASK is the weight of
    the token's chunk of `unit` tokens. Padding has g = 0 and beta = 0.
    """

    def tiles(x, size=TILE, **padding):  # [B, T, ...] -> [N, B, ..., C]
        x = pad_to_multiple(x, size, 1, **padding)
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (0, 2), (1, -1))

    g, beta = tiles(g), tiles(beta)  # [N, B, H, C]
    resets, document = None, jnp.zeros_like(g)
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        before = jnp.pad(counts[:, :-1], ((0, 0), (1, 0)))
        counts = tiles(counts, repeat_last=True)
        resets = (tiles(before, repeat_last=True)[..., 0], counts)
        document = jnp.broadcast_to((counts - counts[..., :1])[:, :, None], g.shape)
    decays = chunk_decays(g[:, :, None], resets)
    mask = jnp.ones_like(g)
    if write_mask is not None and unit is not None:
        by_token = jnp.repeat(write_mask, unit, axis=1)[:, : g.shape[0] * TILE]
        mask = tiles(by_token, repeat_last=True)
    through = jnp.broadcast_to(decays.through[..., None], (*g.shape[:2], 1, *g.shape[2:]))
    into, out, through = (x[:, :, 0] for x in (decays.into, decays.out, through))
    rows = (*coarse_and_fine_sums(g, -1), beta, into, out, through, document.astype(g.dtype), mask)
    return jnp.moveaxis(jnp.stack(rows, axis=-2), 0, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, and how the grid (B, H / heads, N) cuts the arrays into blocks.

    Arrays of tokens are [B, T, heads * width]: with whole heads side by side along the lanes, a
    block needs no transposition. T is a multiple of the tile.
    """

    B: int
    N: int
    Hk: int
    H: int
    K: int
    V: int
    heads: int  # value heads of one grid step: a multiple or a divisor of H / Hk
    dtype: jnp.dtype  # of q, k and v, and of the operands of products
    scale: float
    segments: bool
    unit: int | None  # tokens of a chunk of the write mask
    reverse: bool = False  # from the last tile to the first

    def reversed(self) -> "Layout":
        return dataclasses.replace(self, reverse=True)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.B, self.H // self.heads, self.N

    @property
    def group(self) -> int:
        """Value heads of a step that read the same key head."""
        return min(self.heads, self.H // self.Hk)

    @property
    def key_heads(self) -> int:
        """Key heads of a step."""
        return self.heads // self.group

    def _tile(self, n):
        return self.N - 1 - n if self.reverse else n

    def keys(self) -> pl.BlockSpec:
        """Of q and k, [B, T, Hk * K]."""
        steps = self.H // self.Hk // self.group  # that share a key head
        block = (1, TILE, self.key_heads * self.K)
        return pl.BlockSpec(block, lambda b, h, n: (b, self._tile(n), h // steps))

    def tokens(self, width: int) -> pl.BlockSpec:
        """Of [B, T, steps * width], where a grid step owns `width` lanes."""
        return pl.BlockSpec((1, TILE, width), lambda b, h, n: (b, self._tile(n), h))

    def gates(self) -> pl.BlockSpec:
        """Of [B, H, N, 8, C]."""
        block = (1, self.heads, 1, GATES, TILE)
        return pl.BlockSpec(block, lambda b, h, n: (b, h, self._tile(n), 0, 0))

    def states(self) -> pl.BlockSpec:
        """Of the states of all tiles, [B, H, N, K, V]."""
        block = (1, self.heads, 1, self.K, self.V)
        return pl.BlockSpec(block, lambda b, h, n: (b, h, self._tile(n), 0, 0))

    def state(self) -> pl.BlockSpec:
        """Of one state a row and head, [B, H, K, V]."""
        return pl.BlockSpec((1, self.heads, self.K, self.V), lambda b, h, n: (b, h, 0, 0))

    def key_lanes(self, head: int) -> slice:
        """The lanes of a step's value head `head` in a block of `keys`."""
        first = head // self.group * self.K
        return slice(first, first + self.K)


def lanes(head: int, width: int) -> slice:
    """Of a head in a block with `width` lanes a head."""
    return slice(head * width, (head + 1) * width)


def interleave(streams: Iterable[Iterator[None]]) -> None:
    """Traces generators in turns, each to its next `yield`.

    The compiler schedules in about the order of the program: with the stages of several heads side
    by side, one head's vector work fills the wait for another's product.
    """
    waiting = list(streams)
    while waiting:
        waiting = [stream for stream in waiting if next(stream, stream) is not stream]


NN, NT, TN = (1, 0), (1, 1), (0, 0)  # x y, x y^T, x^T y


def product(x: Array, y: Array, axes: tuple[int, int], like: jnp.dtype) -> Float[Array, "M N"]:
    """x and y, rounded to `like`, contracted over one axis of each, accumulated in fp32.

    fp32 products take several passes through the bf16 matrix unit.
    """
    exact = like == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x.astype(like),
        y.astype(like),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class Gates:
    """One head's gates in both orientations, and the [C, C] tiles made of them."""

    def __init__(self, rows: Float[Array, "8 C"], columns: Float[Array, "C 8"], layout: Layout):
        self._rows, self._columns, self._layout = rows, columns, layout

    def row(self, gate: int) -> Float[Array, "1 C"]:
        return self._rows[gate : gate + 1, :]

    def column(self, gate: int) -> Float[Array, "C 1"]:
        return self._columns[:, gate : gate + 1]

    @property
    def through(self) -> Float[Array, "1 1"]:
        return self._rows[THROUGH : THROUGH + 1, :1]

    @property
    def out(self) -> Float[Array, "C 1"]:
        """With the write mask's weights."""
        out = self.column(OUT)
        return out if self._layout.unit is None else out * self.column(MASK)

    def pair(self) -> Float[Array, "C C"]:
        """D_ij = exp(c_i - c_j) for i >= j of one document, else 0."""
        i, j = positions()
        seen = i >= j
        if self._layout.segments:
            seen &= self.column(DOCUMENT) == self.row(DOCUMENT)
        coarse = self.column(COARSE) - self.row(COARSE)
        fine = self.column(FINE) - self.row(FINE)
        return jnp.exp(jnp.where(seen, coarse + fine, -jnp.inf))

    def weighted(self, pair: Float[Array, "C C"]) -> Float[Array, "C C"]:
        """`pair` times the write mask where the two tokens are of different chunks."""
        crossing = self.crossing()
        return pair if crossing is None else jnp.where(crossing, pair * self.row(MASK), pair)

    def crossing(self) -> Array | None:
        """Whether i and j are of different chunks; None where that cannot be, or is no matter."""
        unit = self._layout.unit
        if unit is None or unit >= TILE:
            return None
        i, j = positions()
        return (i ^ j) >= unit  # a power of two


def positions() -> tuple[Array, Array]:
    """i and j of a [C, C] tile."""
    i = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
    return i, jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)


def invert(strict_ref, inverse_ref, dtype: jnp.dtype) -> Iterator[None]:
    """Leaves (I + strict)^-1 in `inverse_ref`; both fp32 [C, C]. A stream for `interleave`.

    Doubling, as `triangular.unit_lower_inverse`: X <- X - X S X, S the blocks below those that X
    inverts. Every intermediate is a block of the exact inverse, so bf16 products keep their
    relative accuracy for any keys.
    """
    i, j = positions()
    differing = i ^ j  # its highest bit is the level at which rows i and j meet
    first = jnp.where(differing == 1, -strict_ref[...], 0)
    inverse_ref[...] = jnp.where(i == j, 1.0, first)
    level = 1
    while 1 << level < TILE:
        below = jnp.where((differing >> level) == 1, strict_ref[...], 0)
        half = product(inverse_ref[...], below, NN, dtype)
        yield
        inverse_ref[...] -= product(half, inverse_ref[...], NN, dtype)
        yield
        level += 1
