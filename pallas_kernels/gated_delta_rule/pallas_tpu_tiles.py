"""TPU kernels: what they share: gates of a tile, decays, products, the inverse, interleaving."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import pad_to_multiple
from pallas_kernels.gated_delta_rule.decays import (
    chunk_decays,
    coarse_and_fine_sums,
    reset_counts,
)

TILE = 128  # tokens computed together: the lanes of a vector register
GATES = 8  # rows of a tile's gates
_ROWS = 8  # of a vector register
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

    @property
    def spread(self) -> tuple[int, ...]:
        """The gates needed along the sublanes."""
        needed = COARSE, FINE, BETA, INTO, OUT
        return needed + (DOCUMENT,) * self.segments + (MASK,) * (self.unit is not None)

    def columns(self) -> Any:
        """Scratch memory for `spread_gates`."""
        return pltpu.VMEM((self.heads, TILE, len(self.spread) * TILE), jnp.float32)

    def side_by_side(self, least: int) -> int:
        """The fewest heads, at least `least`, of which every group begins at whole registers of
        lanes; all heads of a step if need be."""
        group = self.group

        def fits(size: int) -> bool:
            nested = size % group == 0 or group % size == 0
            keys = self.key_heads == 1 or max(1, size // group) * self.K % TILE == 0
            return self.heads % size == 0 and nested and keys and size * self.V % TILE == 0

        return min(filter(fits, range(least, self.heads)), default=self.heads)


class Heads:
    """Some consecutive heads of a grid step, and their parts of the step's blocks."""

    def __init__(self, layout: Layout, index: Any, size: int):
        self.layout, self.size = layout, size
        self._index, self._whole = index, size == layout.heads

    def _part(self, width: int, index: Any = None) -> Any:
        first = (self._index if index is None else index) * width
        return pl.ds(first if self._whole else pl.multiple_of(first, width), width)

    def own(self, ref: Any) -> Any:
        """Of [heads, ...]."""
        return ref.at[self._part(self.size)]

    def lanes(self, ref: Any, width: int) -> Any:
        """Of [1, C, heads * width]."""
        return ref.at[0, :, self._part(self.size * width)]

    def gates(self, gates_ref: Any, columns_ref: Any, head: int) -> "Gates":
        rows = self.own(gates_ref.at[0, :, 0])[head]
        return Gates(rows, self.own(columns_ref).at[head], self.layout)

    def keys(self, ref: Any, head: int) -> Any:
        """Of [1, C, key heads * K], the lanes of the key head that the group's `head` reads."""
        group, K = self.layout.group, self.layout.K
        if self.size % group == 0:
            part = ref.at[0, :, self._part(self.size // group * K)]
            return part.at[:, lanes(head // group, K)]
        return ref.at[0, :, self._part(K, self.key_head(head))]

    def key_head(self, head: int) -> Any:
        """Among the key heads of the step."""
        group = self.layout.group
        if self.size % group == 0:
            return self._index * (self.size // group) + head // group
        return jax.lax.div(self._index * self.size, group) if not self._whole else head // group


def for_heads(layout: Layout, size: int, stream: Callable[[Heads, int], Iterator[None]]) -> None:
    """Runs `stream(heads, h)` of all heads, `size` of them interleaved.

    A loop, where there are more: the compiler schedules its body alone, so that what lives in
    registers is that of `size` heads in one stage of the computation.
    """

    def body(index, carry):
        heads = Heads(layout, index, size)
        interleave(stream(heads, h) for h in range(size))
        return carry

    steps = layout.heads // size
    if steps == 1:
        body(0, None)
    else:
        jax.lax.fori_loop(0, steps, body, None)


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


def spread_gates(layout: Layout, rows: Float[Array, "8 C"], columns_ref: Any) -> None:
    """Fills `columns_ref`, [C, n C], with the n gates of `Layout.spread`, tokens along sublanes.

    Each fills the lanes of a [C, C] tile. A product with ones, exact: an fp32 number is a sum of
    three bf16 ones. The matrix unit does in passing what would keep the lane permuter busy.
    """
    parts, rest = [], rows
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16).astype(jnp.float32))
        rest -= parts[-1]
    parts = jnp.concatenate([*parts, jnp.zeros_like(rows)])
    gate = jax.lax.broadcasted_iota(jnp.int32, (parts.shape[0], TILE), 0) % GATES
    wanted = [jnp.where(gate == column, 1.0, 0.0) for column in layout.spread]
    wanted = jnp.concatenate(wanted, axis=1)
    columns_ref[...] = product(parts, wanted, TN, jnp.dtype(jnp.bfloat16))


class Gates:
    """One head's gates in both orientations, and the [C, C] tiles made of them."""

    def __init__(self, rows: Float[Array, "8 C"], columns_ref: Any, layout: Layout):
        self._rows, self._columns, self._layout = rows, columns_ref, layout

    def row(self, gate: int) -> Float[Array, "1 C"]:
        return self._rows[gate : gate + 1, :]

    def column(self, gate: int, width: int = TILE) -> Float[Array, "C {width}"]:
        """Repeated along `width` lanes."""
        column = self._columns[:, lanes(self._layout.spread.index(gate), TILE)]
        copies = [column] * (width // TILE) + [column[:, : width % TILE]] * (width % TILE > 0)
        return copies[0] if len(copies) == 1 else jnp.concatenate(copies, axis=1)

    @property
    def through(self) -> Float[Array, "1 1"]:
        return self._rows[THROUGH : THROUGH + 1, :1]

    @property
    def out_row(self) -> Float[Array, "1 C"]:
        """With the write mask's weights."""
        out = self.row(OUT)
        return out if self._layout.unit is None else out * self.row(MASK)

    def out_column(self, width: int) -> Float[Array, "C {width}"]:
        out = self.column(OUT, width)
        return out if self._layout.unit is None else out * self.column(MASK, width)

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


def row_sums(x: Float[Array, "C W"], dtype: jnp.dtype) -> Float[Array, "1 C"]:
    """The sum of each row, along the lanes: a product with ones of x as two or three bf16 parts."""
    parts = []
    for _ in range(3 if dtype == jnp.float32 else 2):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    both = jnp.concatenate(parts, axis=1)
    ones = jnp.ones((16, both.shape[1]), jnp.bfloat16)
    return product(ones, both, NT, jnp.dtype(jnp.bfloat16))[:1]


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
    registers = (TILE // _ROWS, _ROWS, TILE)
    n, i, j = (jax.lax.broadcasted_iota(jnp.int32, registers, axis) for axis in range(3))
    block = j // _ROWS == n
    first, j0 = i[:1], j[:1]  # within a register; the same for all
    differing = first ^ (j0 % _ROWS)  # its highest bit is the level at which rows i and j meet

    def below(size: int) -> Array:
        meet = (differing >= size) & (differing < 2 * size)
        near = strict_ref[...].reshape(registers)
        return jnp.where(meet & block, near, 0).reshape(TILE, TILE)

    identity = jnp.where(j == n * _ROWS + i, 1.0, 0.0).reshape(TILE, TILE)
    inverse_ref[...] = identity - below(1)
    size = 2
    while size < _ROWS:
        half = product(inverse_ref[...], below(size), NN, dtype)
        yield
        inverse_ref[...] -= product(half, inverse_ref[...], NN, dtype)
        yield
        size *= 2
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
    while size < TILE:  # whole registers: only the rows that change
        starts = range(size, TILE, 2 * size)
        coupling = []
        for start in starts:
            left = jnp.broadcast_to((lane >= start - size) & (lane < start), (size, TILE))
            block = jnp.where(left, strict_ref[start : start + size], 0)
            coupling += [jnp.zeros((size, TILE), dtype), block.astype(dtype)]
        rows = jnp.concatenate([inverse_ref[start : start + size] for start in starts], axis=0)
        half = product(rows, jnp.concatenate(coupling, axis=0), NN, dtype)
        yield
        corners = product(half, inverse_ref[...], NN, dtype)
        for n, start in enumerate(starts):
            inverse_ref[start : start + size] -= corners[n * size : (n + 1) * size]
        yield
        size *= 2
