"""What the Hopper kernels share: reading the schedule, and the logits of a tile of pairs.

A tile of logits is [queries, keys], or [keys, queries] where keys stay (`key_axis` 0). Its keys
come in one part or in two from different places of the row (two chunks fill a step). Scalars are
read from device memory one step ahead of their use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import Item
from pallas_kernels.block_sparse_attention.schedule import NEVER, Near
from pallas_kernels.pallas_gpu_hopper import WGMMA

Ref = Any  # a reference to memory inside a kernel
LOG2E = 1.4426950408889634


class Setup(NamedTuple):
    """What is known before the program runs."""

    scale: float  # > 0
    window: int | None
    softcap: float | None
    near: tuple[Near, ...]  # of each leaf of the mask
    T: int
    S: int
    interpret: Any = None  # or plgpu.InterpretGPUParams

    @property
    def unit(self) -> float:
        """Logits are held in this unit of their base-2 exponent."""
        return LOG2E * (self.scale if self.softcap is None else self.softcap)


class Mask(NamedTuple):
    """What a kernel knows of the mask, in device memory; None where the mask has no use for it."""

    items: Int[Array, "rows 32"]
    listed: Int[Array, "B H #M E"]
    rows: Int[Array, "B H N 4"] | None  # of `Visits`, for dk and dv
    leaf: Int[Array, "B H M"] | None  # the same
    far: Int[Array, "B H F N"] | None
    bias: Float[Array, "B R N"] | None  # in units of `Setup.unit`
    query_ids: Int[Array, "B T"] | None
    key_ids: Int[Array, "B S"] | None
    query_runs: Int[Array, "B _"] | None  # `runs` of the ids
    key_runs: Int[Array, "B _"] | None


class Part(NamedTuple):
    """Keys start .. start + size - 1; start = S hides them."""

    start: Int[Array, ""]
    far: Int[Array, ""] | None
    bias: Float[Array, ""] | None
    run: Int[Array, ""] | None


class Queries(NamedTuple):
    """Consecutive queries, as scalars."""

    lowest: Int[Array, ""]  # positions
    highest: Int[Array, ""]
    leaf: Int[Array, ""]
    run: Int[Array, ""] | None
    near_lowest: Int[Array, ""]
    near_highest: Int[Array, ""]
    biased: Bool[Array, ""]


def visited_tile(mask: Mask, item: Item, entry, row, tiles: int):
    """The `entry`-th tile that an item visits; some tile where there is none."""
    listed = mask.listed
    place = jnp.minimum(item.start + entry, listed.shape[3] - 1)
    row = row if listed.shape[2] > 1 else 0
    tile = jnp.where(
        entry < item.count,
        listed[item.batch, item.head, row, place],
        item.first + entry - item.count,
    )
    return lax.max(lax.min(tile, jnp.int32(tiles - 1)), jnp.int32(0))


def near_start(setup: Setup, position, leaf):
    """Position of the first near key of the queries at `position`; NEVER without such a rule."""
    start = jnp.full_like(position, NEVER)
    for f, rule in enumerate(setup.near):
        if rule.size:
            own = leaf == f  # a scalar: Mosaic GPU broadcasts nothing by itself
            if position.shape:
                own = lax.broadcast(own, position.shape)
            start = jnp.where(own, rule.start(position), start)
    return start


def queries(setup: Setup, lowest, size: int, leaf, run) -> Queries:
    biased = jnp.zeros((), bool)
    for f, rule in enumerate(setup.near):
        if rule.biased:
            biased |= leaf == f
    highest = lowest + (size - 1)
    near = [near_start(setup, x, leaf) for x in (lowest, highest)]
    return Queries(lowest, highest, leaf, run, *near, biased)


def part_of(setup: Setup, mask: Mask, batch, head, heads: int, leaf, tile, start, size) -> Part:
    """What is known of the keys from `start` on, in key tile `tile`."""
    far = bias = run = None
    if mask.far is not None:
        far = mask.far[batch, head, leaf, tile]
    if mask.bias is not None:
        bias = mask.bias[batch, lax.div(head * mask.bias.shape[1], jnp.int32(heads)), tile]
    if mask.key_runs is not None:
        place = jnp.minimum(lax.div(start, jnp.int32(size)), mask.key_runs.shape[1] - 1)
        run = mask.key_runs[batch, place]
    return Part(start, far, bias, run)


def sees_all(setup: Setup, queries: Queries, part: Part, size: int) -> Bool[Array, ""]:
    """Whether every pair with the part is visible, all biased or none."""
    end = part.start + size
    complete = end - 1 <= jnp.minimum(queries.lowest, setup.S - 1)
    if part.far is not None:
        complete &= part.start >= jnp.minimum(queries.near_highest, part.far)
    if setup.window is not None:
        complete &= part.start > queries.highest - setup.window
    if part.bias is not None:
        complete &= ~queries.biased | (end <= queries.near_lowest)
    if part.run is not None:
        complete &= part.run == queries.run
    return complete


class _Pairs(NamedTuple):
    """Positions of the keys and queries of a tile, and a value for each key by its part."""

    key: Int[Array, "m n"]
    position: Int[Array, "m n"]
    by_part: Callable[[list], Any]


def _pairs(shape: tuple[int, int], key_axis: int, queries: Queries, parts) -> _Pairs:
    key = plgpu.broadcasted_iota(jnp.int32, shape, key_axis, layout=WGMMA)
    position = plgpu.broadcasted_iota(jnp.int32, shape, 1 - key_axis, layout=WGMMA)
    position += queries.lowest
    if len(parts) == 1:
        return _Pairs(key + parts[0].start, position, lambda values: values[0])
    size = shape[key_axis] // 2
    second = key >= size

    def by_part(values):
        return jnp.where(second, values[1], values[0])

    return _Pairs(key + by_part([parts[0].start, parts[1].start - size]), position, by_part)


def carried(setup: Setup, queries: Queries, parts, values, key_axis: int):
    """`values` of the pairs that carry the bias of their chunk, 0 elsewhere."""
    pairs = _pairs(values.shape, key_axis, queries, parts)
    biased = (pairs.key < near_start(setup, pairs.position, queries.leaf)) & queries.biased
    return jnp.where(biased, values, 0.0)


def logits_and_slope(
    setup: Setup,
    scores: Float[Array, "m n"],
    queries: Queries,
    parts: tuple[Part, ...],
    key_axis: int,
    same_document: Callable[[], Bool[Array, "m n"]] | None,
):
    """Logits of q . k in units of `Setup.unit`, -inf where hidden; slope in q . k, None for 1."""
    shape, slope = scores.shape, None
    if setup.softcap is not None:
        scores = _tanh(scores * (setup.scale / setup.softcap))
        slope = 1.0 - scores * scores
    size = shape[key_axis] // len(parts)
    complete = jnp.ones((), bool)
    for part in parts:
        complete &= sees_all(setup, queries, part, size)
    bias = None if parts[0].bias is None else [x.bias for x in parts]

    def whole(scores):
        if bias is None:
            return scores
        given = [jnp.where(queries.biased, x, 0.0) for x in bias]
        if len(parts) == 1:
            return scores + given[0]
        key = plgpu.broadcasted_iota(jnp.int32, shape, key_axis, layout=WGMMA)
        return scores + jnp.where(key >= size, given[1], given[0])

    def partly(scores):
        pairs = _pairs(shape, key_axis, queries, parts)
        visible = pairs.key <= jnp.minimum(pairs.position, setup.S - 1)
        near = None
        if any(rule.size for rule in setup.near):
            near = near_start(setup, pairs.position, queries.leaf)
        if parts[0].far is not None:
            far = pairs.by_part([x.far for x in parts])
            visible &= pairs.key >= (far if near is None else jnp.minimum(near, far))
        if setup.window is not None:
            visible &= pairs.key > pairs.position - setup.window
        if same_document is not None:
            visible &= same_document()
        if bias is not None:
            biased = (pairs.key < near) & queries.biased
            scores += jnp.where(biased, pairs.by_part(bias), 0.0)
        return jnp.where(visible, scores, -jnp.inf)

    return lax.cond(complete, whole, partly, scores), slope


def _tanh(x):
    """The instruction for it is right to 11 bits, too few for the gradient of a bias."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))


def vector(value: float, dtype=jnp.float32):
    """One number for each row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((64,), value, dtype), WGMMA.reduce(1))


def tile(columns: int):
    """Zeros [64, columns] in accumulators."""
    return plgpu.layout_cast(jnp.zeros((64, columns), jnp.float32), WGMMA)


def load_rows(ref: Ref) -> Array:
    """One number for each row of a warpgroup, from device memory."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def registers(workers: int) -> tuple[int, int] | None:
    """(of a computing thread, of a copying one) for three warpgroups; two have enough each."""
    return (232, 40) if workers == 2 else None
