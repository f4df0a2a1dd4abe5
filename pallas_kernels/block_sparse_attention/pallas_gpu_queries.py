"""The Hopper kernels over query tiles: copying warpgroup, rings of key tiles, order of tiles.

A block has one or two computing warpgroups of 64 queries and one that copies. In a lane a tile's
arrays (q; in the backward pass do too) stay in one of `tiles` places in shared memory while its
keys and values come through a ring of `stages` slots. Barriers: `*_loaded` by the copy engine,
`*_free` by the warpgroups that have read. The copying warpgroup runs ahead over the end of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array
from pallas_kernels.block_sparse_attention import pallas_gpu_items as items_of_block
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import ROWS, Item, Plan
from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import (
    Mask,
    Part,
    Queries,
    Ref,
    Setup,
    load_rows,
    part_of,
    queries,
    registers,
    visited_tile,
)
from pallas_kernels.blocks import cdiv
from pallas_kernels.pallas_gpu_hopper import READ_ONLY_SMEM, over_columns, over_rows, swizzled


class Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    items: items_of_block.Ring
    resident: list[Ref]  # [lanes, tiles, tile, width] each
    keys: Ref  # [lanes, stages, step, K]
    values: Ref
    key_ids: Ref | None  # [lanes, stages, step]
    resident_loaded: Ref
    resident_free: Ref
    keys_loaded: Ref
    keys_free: Ref
    values_loaded: Ref
    values_free: Ref
    turn: Ref


class Place(NamedTuple):
    """Where a computing warpgroup stands."""

    item: Item
    queries: Queries
    tokens: Any  # its rows of the arrays of queries
    rows: Any  # the same in shared memory: (lane, place, rows of the tile)
    ids: Array | None  # of its queries


class Step(NamedTuple):
    """A step of keys in shared memory."""

    parts: tuple[Part, ...]
    keys: Ref
    values: Ref
    same_document: Callable[[], Array] | None
    wait_for_keys: Callable[[], None]
    wait_for_values: Callable[[], None]
    release_keys: Callable[[], None]
    release_values: Callable[[], None]


class Kernel(NamedTuple):
    """What a kernel does at a tile. `ahead` are products of a step that are issued one step early.

    begin(place) -> carry; first(place, step) -> ahead; step(place, now, next or None, carry, ahead)
    -> (carry, ahead of next or None).
    """

    begin: Callable[[Place], Any]
    first: Callable[[Place, Step], Any]
    step: Callable[[Place, Step, Step | None, Any, Any], tuple[Any, Any]]
    finish: Callable[[Place, Any], None]


class Turns(NamedTuple):
    """The two warpgroups of a tile issue their products by turns.

    So one multiplies while the other exponentiates (FlashAttention-3, Shah et al., arXiv
    2407.08608, section 3.1). A turn ends when the products are issued.
    """

    barriers: Ref
    half: Any
    taken: bool

    def begin(self) -> None:
        if self.taken:
            pl.when(self.half == 1)(self.end)

    def wait(self) -> None:
        if self.taken:
            plgpu.barrier_wait(self.barriers.at[self.half])

    def end(self) -> None:
        if self.taken:
            plgpu.barrier_arrive(self.barriers.at[1 - self.half])

    def close(self) -> None:
        if self.taken:
            pl.when(self.half == 0)(self.wait)


class Done(NamedTuple):
    """What a lane has behind it: which places and slots come next, and how often they were used."""

    tiles: Any
    steps: Any

    @classmethod
    def nothing(cls) -> "Done":
        return cls(jnp.int32(0), jnp.int32(0))


def scratch(plan: Plan, widths: list[int], K: int, V: int, ids: bool, interpret: bool) -> Shared:
    """Types of `Shared`, for resident arrays of the given widths."""
    lanes, tiles, stages, step = plan.lanes, plan.tiles, plan.stages, plan.step
    parts, rings = _parts(plan), lanes * stages
    readers = plan.tile // ROWS
    free = functools.partial(plgpu.Barrier, num_arrivals=readers)
    return Shared(
        items=items_of_block.scratch(plan, interpret),
        resident=[swizzled(lanes, tiles, plan.tile, width) for width in widths],
        keys=swizzled(lanes, stages, step, K),
        values=swizzled(lanes, stages, step, V),
        key_ids=plgpu.SMEM((lanes, stages, step), jnp.int32) if ids else None,
        resident_loaded=plgpu.Barrier(num_arrivals=len(widths), num_barriers=lanes * tiles),
        resident_free=free(num_barriers=lanes * tiles),
        keys_loaded=plgpu.Barrier(num_arrivals=parts * (1 + ids), num_barriers=rings),
        keys_free=free(num_barriers=rings),
        values_loaded=plgpu.Barrier(num_arrivals=parts, num_barriers=rings),
        values_free=free(num_barriers=rings),
        turn=plgpu.Barrier(num_arrivals=1, num_barriers=2),
    )


def _parts(plan: Plan) -> int:
    """Key tiles, or pieces of one, that are copied for a step."""
    return cdiv(plan.step, plan.tiling.key)


def walk(
    setup: Setup,
    plan: Plan,
    mask: Mask,
    resident: list[Ref],
    k: Ref,
    v: Ref,
    shared: Shared,
    kernel: Callable[[Turns], Kernel],
) -> None:
    """Runs a kernel over this block's items."""
    heads, group = resident[0].shape[2], resident[0].shape[2] // k.shape[2]
    lanes, stages, parts = plan.lanes, plan.stages, _parts(plan)
    size = plan.step // parts
    pieces = plan.tiling.key // size  # of a key tile
    tiles = cdiv(setup.S, plan.tiling.key)
    worker = lax.axis_index("worker")
    limits = registers(plan.workers)

    def steps_of(item: Item):
        return lax.div((item.count + item.length) * pieces + (parts - 1), jnp.int32(parts))

    def start_of(item: Item, entry):
        """(key tile, first key) of a piece."""
        tile = visited_tile(mask, item, lax.div(entry, jnp.int32(pieces)), item.tile, tiles)
        return tile, tile * plan.tiling.key + lax.rem(entry, jnp.int32(pieces)) * size

    def copy_step(lane: int, item: Item, step, at):
        key_head = lax.div(item.head, jnp.int32(group))
        slot = lax.rem(at, jnp.int32(stages))
        ring = lane * stages + slot
        starts = [start_of(item, step * parts + part)[1] for part in range(parts)]

        def copy(ref, to, loaded):
            for part, start in enumerate(starts):
                target = to.at[lane, slot, pl.ds(part * size, size)]
                plgpu.copy_gmem_to_smem(ref(pl.ds(start, size)), target, loaded.at[ring])

        pl.when(at >= stages)(lambda: plgpu.barrier_wait(shared.keys_free.at[ring]))
        copy(lambda keys: k.at[item.batch, keys, key_head], shared.keys, shared.keys_loaded)
        if mask.key_ids is not None:
            ids = mask.key_ids
            copy(lambda keys: ids.at[item.batch, keys], shared.key_ids, shared.keys_loaded)
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(shared.values_free.at[ring]))
        copy(lambda keys: v.at[item.batch, keys, key_head], shared.values, shared.values_loaded)

    @pl.when(worker == plan.workers)
    def _copies():
        if limits is not None:
            plgpu.set_max_registers(limits[1], action="decrease")

        def copy(items: list[Item], done: list[Done]) -> list[Done]:
            steps = [steps_of(item) for item in items]
            for lane, item in enumerate(items):

                @pl.when(item.tile >= 0)
                def _resident(lane=lane, item=item):
                    tiles = done[lane].tiles
                    slot = lax.rem(tiles, jnp.int32(plan.tiles))
                    place = lane * plan.tiles + slot
                    free = shared.resident_free.at[place]
                    pl.when(tiles >= plan.tiles)(functools.partial(plgpu.barrier_wait, free))
                    tokens = pl.ds(item.tile * plan.tile, plan.tile)
                    for ref, to in zip(resident, shared.resident, strict=True):
                        source = ref.at[item.batch, tokens, item.head]
                        loaded = shared.resident_loaded.at[place]
                        plgpu.copy_gmem_to_smem(source, to.at[lane, slot], loaded)

            @pl.loop(0, functools.reduce(jnp.maximum, steps))
            def _(step):
                for lane, item in enumerate(items):
                    pl.when(step < steps[lane])(
                        functools.partial(copy_step, lane, item, step, done[lane].steps + step)
                    )

            return [
                Done(before.tiles + (item.tile >= 0).astype(jnp.int32), before.steps + n)
                for before, item, n in zip(done, items, steps, strict=True)
            ]

        none = [Done.nothing()] * lanes
        done = items_of_block.deal(plan, mask.items, shared.items, copy, none)
        drain(plan, done, shared.resident_free, shared.keys_free, shared.values_free)

    @pl.when(worker < plan.workers)
    def _computes():
        if limits is not None:
            plgpu.set_max_registers(limits[0], action="increase")
        # traced even where they are 0: accumulating products cannot take literal indices
        lane = lax.div(worker, jnp.int32(plan.tile // ROWS))
        half = lax.rem(worker, jnp.int32(plan.tile // ROWS))
        turns = Turns(shared.turn, half, plan.take_turns)
        act = kernel(turns)

        def parts_of(item: Item, step) -> tuple[Part, ...]:
            found = []
            for part in range(parts):
                entry = step * parts + part
                tile, start = start_of(item, entry)
                present = entry < (item.count + item.length) * pieces
                start = jnp.where(present, start, jnp.int32(setup.S))
                where = item.batch, item.head, heads, item.leaf, tile, start, size
                found.append(part_of(setup, mask, *where))
            return tuple(found)

        def compute(item: Item, steps, done: Done):
            first = item.tile * plan.tile + half * ROWS
            tokens, run, ids = pl.ds(first, ROWS), None, None
            if mask.query_ids is not None:
                run = mask.query_runs[item.batch, lax.div(first, jnp.int32(ROWS))]
                ids = load_rows(mask.query_ids.at[item.batch, tokens])
            band = queries(setup, item.position + half * ROWS, ROWS, item.leaf, run)
            slot = lax.rem(done.tiles, jnp.int32(plan.tiles))
            at = lane * plan.tiles + slot
            place = Place(item, band, tokens, (lane, slot, pl.ds(half * ROWS, ROWS)), ids)
            plgpu.barrier_wait(shared.resident_loaded.at[at])

            def step_at(n, parts: tuple[Part, ...]) -> Step:
                slot = lax.rem(done.steps + n, jnp.int32(stages))
                ring = lane * stages + slot

                def same_document():
                    shape = (ROWS, plan.step)
                    return over_rows(ids, shape) == over_columns(
                        shared.key_ids.at[lane, slot], shape
                    )

                at_ring = functools.partial
                return Step(
                    parts,
                    shared.keys.at[lane, slot],
                    shared.values.at[lane, slot],
                    None if ids is None else same_document,
                    at_ring(plgpu.barrier_wait, shared.keys_loaded.at[ring]),
                    at_ring(plgpu.barrier_wait, shared.values_loaded.at[ring]),
                    at_ring(plgpu.barrier_arrive, shared.keys_free.at[ring]),
                    at_ring(plgpu.barrier_arrive, shared.values_free.at[ring]),
                )

            def one(n, state):
                carry, ahead, now = state
                following = parts_of(item, n + 1)
                carry, ahead = act.step(
                    place, step_at(n, now), step_at(n + 1, following), carry, ahead
                )
                return carry, ahead, following

            def all_steps(carry):
                now = parts_of(item, jnp.int32(0))
                state = carry, act.first(place, step_at(jnp.int32(0), now)), now
                carry, ahead, now = lax.fori_loop(0, steps - 1, one, state)
                return act.step(place, step_at(steps - 1, now), None, carry, ahead)[0]

            carry = lax.cond(steps > 0, all_steps, lambda carry: carry, act.begin(place))
            plgpu.barrier_arrive(shared.resident_free.at[at])
            act.finish(place, carry)

        def one_tile(item: Item, done: Done) -> Done:
            steps = steps_of(item)
            pl.when(item.tile >= 0)(functools.partial(compute, item, steps, done))
            return Done(done.tiles + (item.tile >= 0).astype(jnp.int32), done.steps + steps)

        turns.begin()
        items_of_block.take(shared.items, lane, one_tile, Done.nothing())
        turns.close()


def drain(plan: Plan, done: list[Done], resident_free: Ref, *ring_free: Ref) -> None:
    """Waits until all that was loaded is read, so that every barrier is waited for."""
    for lane, (tiles, steps) in enumerate(done):
        used = [(resident_free, plan.tiles, tiles), *((x, plan.stages, steps) for x in ring_free)]
        for free, slots, count in used:
            for slot in range(slots):
                wait = functools.partial(plgpu.barrier_wait, free.at[lane * slots + slot])
                pl.when(slot < count)(wait)


def launch(body, plan: Plan, mask: Mask, *arrays, out_type, shared: Shared, name: str, interpret):
    """body(mask, *arrays, *outputs, shared) on a grid of blocks."""
    present = [field for field in Mask._fields if getattr(mask, field) is not None]
    operands = [getattr(mask, field) for field in present]

    def flat(*refs):
        given = dict.fromkeys(Mask._fields) | dict(zip(present, refs, strict=False))
        body(Mask(**given), *refs[len(present) :])

    return plgpu.kernel(
        flat,
        out_type=out_type,
        scratch_types=[shared],
        grid=(min(plan.blocks, mask.items.shape[0] - 1),),
        grid_names=("block",),
        num_threads=plan.workers + 1,
        thread_name="worker",
        kernel_name=f"block_sparse_attention_{name}",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(*operands, *arrays)
