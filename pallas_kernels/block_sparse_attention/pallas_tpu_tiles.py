"""What the TPU kernels share: visiting tiles with copies in flight, and the logits of a tile.

Scores are held [keys, queries]: all that belongs to a query (lse, its position, its segment id) is
then a row of lanes, sums over keys add whole registers, and a tile of 64 keys wastes no lanes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.schedule import NEVER, Near, Tiling

Ref = Any  # a reference to memory inside a kernel
VMEM: Any = pltpu.VMEM
IN_HBM: Any = pl.BlockSpec(memory_space=pl.ANY)
STEP_TOKENS, STEP_TILES = 512, 8  # at most, of a step that is computed while the next is copied


class Setup(NamedTuple):
    """What is known before the program runs."""

    scale: float
    window: int | None
    softcap: float | None
    tiling: Tiling
    near: tuple[Near, ...]  # of each leaf of the mask
    T: int
    S: int

    def per_step(self, tile: int, tiles: int) -> int:
        """Tiles of `tile` tokens in a step, of `tiles` that there are."""
        return max(1, min(STEP_TOKENS // tile, STEP_TILES, tiles))


class Queries(NamedTuple):
    """What decides which keys a tile of queries sees: rows of lanes."""

    lower: Int[Array, "1 q"]  # the window
    upper: Int[Array, "1 q"]
    near: Int[Array, "1 q"]
    ids: Int[Array, "1 q"] | None
    biased: Bool[Array, ""]


def queries(setup: Setup, offset, tile, leaf, ids: Int[Array, "1 q"] | None) -> Queries:
    """The tile `tile`, ruled by leaf `leaf` of the mask."""
    size = setup.tiling.query
    position = offset + tile * size + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    near, biased = jnp.full_like(position, NEVER), jnp.zeros((), bool)
    for f, rule in enumerate(setup.near):
        if rule.size:
            near = jnp.where(leaf == f, rule.start(position), near)
        if rule.biased:
            biased |= leaf == f
    upper = jnp.minimum(position, setup.S - 1)
    return Queries(
        lower=jnp.zeros_like(position) if setup.window is None else position - setup.window + 1,
        upper=upper if ids is None else jnp.where(ids < 0, -1, upper),
        near=near,
        ids=ids,
        biased=biased,
    )


def carries_bias(queries: Queries, start, shape: tuple[int, ...]) -> Bool[Array, "s q"]:
    """The pairs of queries with the keys from `start` on that carry the bias of their chunk."""
    key = start + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (key < queries.near) & queries.biased


def masked(
    queries: Queries, logits: Float[Array, "s q"], start, far, bias, key_ids
) -> Float[Array, "s q"]:
    """The logits of the key tile at `start` with its bias, -inf where a pair is hidden."""
    key = start + lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    if bias is not None:
        logits += jnp.where(carries_bias(queries, start, logits.shape), bias, 0)
    lower = jnp.maximum(queries.lower, jnp.minimum(queries.near, far))
    visible = (key <= queries.upper) & (key >= lower)
    if key_ids is not None:
        visible &= key_ids == queries.ids
    return jnp.where(visible, logits, -jnp.inf)


def logits_and_slope(setup: Setup, keys: Float[Array, "s K"], queries: Float[Array, "q K"]):
    """cap(scale k . q) [s, q] and its slope in scale k . q, or None where that is 1."""
    x = setup.scale * dot(keys, queries, (1, 1))
    if setup.softcap is None:
        return x, None
    bounded = jnp.tanh(x / setup.softcap)
    return setup.softcap * bounded, 1 - bounded * bounded


def dot(a: Array, b: Array, contracted: tuple[int, int]) -> Float[Array, "m n"]:
    """Matrix product over the given dimension of each, accumulated in fp32."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def scalars(array: Array, index: Callable[..., tuple]) -> Any:
    """The last two dimensions of an array in scalar memory, one grid step's at a time."""
    shape = (*(1 for _ in array.shape[:-2]), *array.shape[-2:])
    return pl.BlockSpec(shape, index, memory_space=pltpu.SMEM)


def block(shape: tuple[int, ...], index: Callable[..., tuple]) -> Any:
    """A block of an array in vector memory, one grid step's at a time."""
    return pl.BlockSpec(shape, index)


def column(row: Int[Array, "1 n"]) -> Int[Array, "n 1"]:
    """A row of lanes as a column of sublanes."""
    n = row.shape[1]
    diagonal = lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(
        jnp.int32, (n, n), 1
    )
    return jnp.where(diagonal, row, 0).sum(1, keepdims=True)


def visited(rows: Ref, listed: Ref, entry, tiles: int):
    """(how many tiles are visited, which the `entry`-th is; some tile where there is none)."""
    start, count, first, length = (rows[0, 0, 0, 0, x] for x in range(4))
    place = jnp.minimum(start + entry, listed.shape[-1] - 1)
    tile = jnp.where(entry < count, listed[0, 0, 0, 0, place], first + entry - count)
    return count + length, jnp.clip(tile, 0, tiles - 1)


Copy = tuple[Ref, Ref]  # from, to


def stream(
    count: Int[Array, ""],
    per_step: int,
    copies: Callable[[Any, Any, int], Iterator[Copy]],
    buffers: Sequence[Ref],
    semaphores: Ref,
    compute: Callable[[Any, Any, Any], Any],
    carry: Any,
) -> Any:
    """compute(step, slot, carry) over `count` entries, `per_step` at a time.

    `copies(entry, slot, t)` brings an entry to place t of a slot of `buffers`, which they fill; the
    next step's run during the computation. The last step repeats its last entry.
    """

    def begin(step, slot):
        for t in range(per_step):
            entry = jnp.minimum(step * per_step + t, count - 1)
            for source, target in copies(entry, slot, t):
                pltpu.make_async_copy(source, target, semaphores.at[slot]).start()

    steps = (count + per_step - 1) // per_step

    @pl.when(steps > 0)
    def _():
        begin(0, 0)

    def body(step, carry):
        slot = step % 2

        @pl.when(step + 1 < steps)
        def _():
            begin(step + 1, 1 - slot)

        for buffer in buffers:  # a semaphore counts bytes: one wait for all copies to a slot
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], semaphores.at[slot]).wait()
        return compute(step, slot, carry)

    return lax.fori_loop(0, steps, body, carry)


def fold_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays [B, ...], mapped over another axis by making that axis part of B."""
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def rule(axis_size, in_batched, *args):
        def fold(x, batched):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        out = folded(*jax.tree.map(fold, args, tuple(in_batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return unfolded, jax.tree.map(lambda _: True, out)

    return functools.wraps(function)(folded)
