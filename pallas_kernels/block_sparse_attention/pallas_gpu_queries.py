"""The Hopper kernels over query tiles: copying warpgroup, rings of key tiles, order of tiles.

A block has one or two computing warpgroups of 64 queries and one that copies. In a lane the
tile's arrays (q; in the backward pass do too) lie in shared memory while its keys and values come
through a ring of `stages` slots. Barriers: `*_loaded` by the copy engine, `*_free` by the
warpgroups that have read. The copying warpgroup runs ahead over the end of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array
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
    read_item,
    registers,
    visited_tile,
)
from pallas_kernels.blocks import cdiv
from pallas_kernels.pallas_gpu_hopper import READ_ONLY_SMEM, over_columns, over_rows, swizzled


class Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    resident: list[Ref]  # [lanes, tile, width] each
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
    rows: Any  # the same in shared memory: (lane, rows of the tile)
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
    """What a kernel does at a tile; begin(place) -> carry, step(place, step, carry) -> carry."""

    begin: Callable[[Place], Any]
    step: Callable[[Place, Step, Any], Any]
    finish: Callable[[Place, Any], None]


def scratch(plan: Plan, widths: list[int], K: int, V: int, ids: bool) -> Shared:
    """Types of `Shared`, for resident arrays of the given widths."""
    lanes, stages, step = plan.lanes, plan.stages, plan.step
    parts, rings = _parts(plan), lanes * stages
    readers = plan.tile // ROWS
    free = functools.partial(plgpu.Barrier, num_arrivals=readers)
    return Shared(
        resident=[swizzled(lanes, plan.tile, width) for width in widths],
        keys=swizzled(lanes, stages, step, K),
        values=swizzled(lanes, stages, step, V),
        key_ids=plgpu.SMEM((lanes, stages, step), jnp.int32) if ids else None,
        resident_loaded=plgpu.Barrier(num_arrivals=len(widths), num_barriers=lanes),
        resident_free=free(num_barriers=lanes),
        keys_loaded=plgpu.Barrier(num_arrivals=parts * (1 + ids), num_barriers=rings),
        keys_free=free(num_barriers=rings),
        values_loaded=plgpu.Barrier(num_arrivals=parts, num_barriers=rings),
        values_free=free(num_barriers=rings),
        turn=plgpu.Barrier(num_arrivals=2),
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
    kernel: Kernel,
) -> None:
    """Runs `kernel` over this block's items."""
    heads, group = resident[0].shape[2], resident[0].shape[2] // k.shape[2]
    lanes, stages, parts = plan.lanes, plan.stages, _parts(plan)
    size = plan.step // parts
    pieces = plan.tiling.key // size  # of a key tile
    tiles = cdiv(setup.S, plan.tiling.key)
    rounds = mask.items.shape[0]
    worker = lax.axis_index("worker")
    limits = registers(plan.workers)

    def item_of(round_, lane) -> Item:
        return read_item(mask, jnp.minimum(round_, rounds - 1), lane)

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

        def round_(round_, done):
            items = [item_of(round_, lane) for lane in range(lanes)]
            steps = [steps_of(item) for item in items]
            counted = []
            for lane, item in enumerate(items):
                tiles_done, steps_done = done[lane]

                @pl.when(item.tile >= 0)
                def _resident(lane=lane, item=item, tiles_done=tiles_done):
                    free = shared.resident_free.at[lane]
                    pl.when(tiles_done > 0)(functools.partial(plgpu.barrier_wait, free))
                    tokens = pl.ds(item.tile * plan.tile, plan.tile)
                    for ref, to in zip(resident, shared.resident, strict=True):
                        source = ref.at[item.batch, tokens, item.head]
                        loaded = shared.resident_loaded.at[lane]
                        plgpu.copy_gmem_to_smem(source, to.at[lane], loaded)

                here = (item.tile >= 0).astype(jnp.int32)
                counted.append((tiles_done + here, steps_done + steps[lane]))

            @pl.loop(0, functools.reduce(jnp.maximum, steps))
            def _(step):
                for lane, item in enumerate(items):
                    pl.when(step < steps[lane])(
                        functools.partial(copy_step, lane, item, step, done[lane][1] + step)
                    )

            return tuple(counted)

        none = (jnp.int32(0), jnp.int32(0))
        done = lax.fori_loop(0, rounds, round_, (none,) * lanes)
        for lane, (tiles_done, steps_done) in enumerate(done):
            free = shared.resident_free, shared.keys_free, shared.values_free
            drain(plan, lane, tiles_done, steps_done, *free)

    @pl.when(worker < plan.workers)
    def _computes():
        if limits is not None:
            plgpu.set_max_registers(limits[0], action="increase")
        # traced even where they are 0: accumulating products cannot take literal indices
        lane = lax.div(worker, jnp.int32(plan.tile // ROWS))
        half = lax.rem(worker, jnp.int32(plan.tile // ROWS))

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

        def compute(item: Item, steps, done):
            first = item.tile * plan.tile + half * ROWS
            tokens, run, ids = pl.ds(first, ROWS), None, None
            if mask.query_ids is not None:
                run = mask.query_runs[item.batch, lax.div(first, jnp.int32(ROWS))]
                ids = load_rows(mask.query_ids.at[item.batch, tokens])
            band = queries(setup, item.position + half * ROWS, ROWS, item.leaf, run)
            place = Place(item, band, tokens, (lane, pl.ds(half * ROWS, ROWS)), ids)
            plgpu.barrier_wait(shared.resident_loaded.at[lane])

            def one(step, carry):
                inner, now = carry
                ahead = parts_of(item, step + 1)
                slot = lax.rem(done + step, jnp.int32(stages))
                ring = lane * stages + slot

                def same_document():
                    shape = (ROWS, plan.step)
                    return over_rows(ids, shape) == over_columns(
                        shared.key_ids.at[lane, slot], shape
                    )

                at_ring = functools.partial
                inner = kernel.step(
                    place,
                    Step(
                        now,
                        shared.keys.at[lane, slot],
                        shared.values.at[lane, slot],
                        None if ids is None else same_document,
                        at_ring(plgpu.barrier_wait, shared.keys_loaded.at[ring]),
                        at_ring(plgpu.barrier_wait, shared.values_loaded.at[ring]),
                        at_ring(plgpu.barrier_arrive, shared.keys_free.at[ring]),
                        at_ring(plgpu.barrier_arrive, shared.values_free.at[ring]),
                    ),
                    inner,
                )
                return inner, ahead

            if plan.take_turns:  # the first warpgroup is a turn ahead of the second within a tile
                pl.when(half == 1)(functools.partial(take_turn, plan, shared.turn))
            carry = kernel.begin(place), parts_of(item, jnp.int32(0))
            carry, _ = lax.fori_loop(0, steps, one, carry)
            plgpu.barrier_arrive(shared.resident_free.at[lane])
            if plan.take_turns:
                pl.when(half == 0)(functools.partial(plgpu.barrier_arrive, shared.turn))
            kernel.finish(place, carry)
            if plan.take_turns:
                pl.when(half == 0)(functools.partial(plgpu.barrier_wait, shared.turn))

        def round_(round_, carry):
            item, done = carry
            ahead, steps = item_of(round_ + 1, lane), steps_of(item)
            pl.when(item.tile >= 0)(functools.partial(compute, item, steps, done))
            return ahead, done + steps

        lax.fori_loop(0, rounds, round_, (item_of(0, lane), jnp.int32(0)))


def drain(plan: Plan, lane: int, tiles, steps, resident_free: Ref, *ring_free: Ref) -> None:
    """Waits until what a lane has loaded is read, so that every barrier is waited for."""
    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(resident_free.at[lane]))
    for slot in range(plan.stages):

        @pl.when(slot < steps)
        def _(slot=slot):
            for free in ring_free:
                plgpu.barrier_wait(free.at[lane * plan.stages + slot])


def take_turn(plan: Plan, turn: Ref) -> None:
    """Waits until the other warpgroup comes to its next turn."""
    if plan.take_turns:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)


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
        grid=(mask.items.shape[1],),
        grid_names=("block",),
        num_threads=plan.workers + 1,
        thread_name="worker",
        kernel_name=f"block_sparse_attention_{name}",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(*operands, *arrays)
