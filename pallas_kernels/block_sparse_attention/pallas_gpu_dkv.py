"""Hopper kernel: the gradients of keys, values and bias, one tile of keys after the other.

It walks the transposed visits and adds in their order, one query head of the group after the
other, in registers: nothing is accumulated in device memory. Logits are held [keys, queries], so
that their gradients are left operands from registers. The logits of a step are multiplied beside
dk of the step before. Registers of a thread, K = V = 128, steps of
64 queries: 128 dk and dv, 64 logits and dp, 16 of either in bf16, of 232. Where dk and dv need
more (K or V of 256) two warpgroups share 64 keys, repeat the logits and split the columns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention import pallas_gpu_items as items_of_block
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import ROWS, Item, Plan
from pallas_kernels.block_sparse_attention.pallas_gpu_queries import (
    Done,
    Turns,
    drain,
    launch,
)
from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import (
    Mask,
    Part,
    Ref,
    Setup,
    carried,
    load_rows,
    logits_and_slope,
    part_of,
    queries,
    registers,
    tile,
    vector,
    visited_tile,
)
from pallas_kernels.blocks import cdiv
from pallas_kernels.pallas_gpu_hopper import over_columns, over_rows, products, swizzled


class _Shared(NamedTuple):
    """Shared memory and barriers of a block; `pallas_gpu_queries.Shared` says how they work."""

    items: items_of_block.Ring
    keys: Ref  # [lanes, tiles, slices, tile, K / slices]
    values: Ref
    q: Ref  # [lanes, stages, slices, step, K / slices]
    do: Ref
    stats: Ref  # [lanes, stages, 2, step]
    query_ids: Ref | None  # [lanes, stages, step]
    resident_loaded: Ref
    resident_free: Ref
    q_loaded: Ref
    q_free: Ref
    do_loaded: Ref
    do_free: Ref
    turn: Ref


class _Visit(NamedTuple):
    """What is known of a step of queries before it is loaded."""

    position: Int[Array, ""]
    leaf: Int[Array, ""]
    far: Int[Array, ""] | None
    run: Int[Array, ""] | None


def _scratch(plan: Plan, K: int, V: int, ids: bool, interpret: bool) -> _Shared:
    lanes, stages, slices, step = plan.lanes, plan.stages, plan.slices, plan.step
    rings, places = lanes * stages, lanes * plan.tiles
    free = functools.partial(plgpu.Barrier, num_arrivals=plan.workers // lanes)
    return _Shared(
        items=items_of_block.scratch(plan, interpret),
        keys=swizzled(lanes, plan.tiles, slices, plan.tile, K // slices),
        values=swizzled(lanes, plan.tiles, slices, plan.tile, V // slices),
        q=swizzled(lanes, stages, slices, step, K // slices),
        do=swizzled(lanes, stages, slices, step, V // slices),
        stats=plgpu.SMEM((lanes, stages, 2, step), jnp.float32),
        query_ids=plgpu.SMEM((lanes, stages, step), jnp.int32) if ids else None,
        resident_loaded=plgpu.Barrier(num_arrivals=2 * slices, num_barriers=places),
        resident_free=free(num_barriers=places),
        q_loaded=plgpu.Barrier(num_arrivals=slices + 1 + ids, num_barriers=rings),
        q_free=free(num_barriers=rings),
        do_loaded=plgpu.Barrier(num_arrivals=slices, num_barriers=rings),
        do_free=free(num_barriers=rings),
        turn=plgpu.Barrier(num_arrivals=1, num_barriers=2),
    )


def _kernel(setup: Setup, plan: Plan, mask: Mask, q_ref, do_ref, stats_ref, k_ref, v_ref, *outputs):
    dk_ref, dv_ref, *dbias_ref, shared = outputs
    interpret = setup.interpret is not None
    heads, G = q_ref.shape[2], k_ref.shape[2]
    group, M = heads // G, mask.leaf.shape[2]
    lanes, stages, slices = plan.lanes, plan.stages, plan.slices
    K, V = k_ref.shape[3] // slices, v_ref.shape[3] // slices  # columns of a slice
    pieces = plan.tiling.query // plan.step  # of a query tile
    worker = lax.axis_index("worker")
    limits = registers(plan.workers)

    def member(item: Item, j) -> Item:
        """The visits of a key tile by query head j of its group."""
        head, tile = item.head * group + j, jnp.maximum(item.tile, jnp.int32(0))
        rows = [mask.rows[item.batch, head, tile, n] for n in range(4)]
        item = item._replace(head=head, start=rows[0], count=rows[1], first=rows[2], length=rows[3])
        nothing = item.tile < 0
        count, length = (jnp.where(nothing, jnp.int32(0), x) for x in (item.count, item.length))
        return item._replace(count=count, length=length)

    def steps_of(item: Item):
        return (item.count + item.length) * pieces

    def start_of(item: Item, step):
        """(query tile, first query) of a step."""
        row = jnp.maximum(item.tile, jnp.int32(0))
        found = visited_tile(mask, item, lax.div(step, jnp.int32(pieces)), row, M)
        piece = lax.rem(step, jnp.int32(pieces))
        return found, found * plan.tiling.query + piece * plan.step

    def columns(slice_, width: int):
        return pl.ds(slice_ * width, width)

    def copy_step(lane: int, item: Item, step, at):
        slot = lax.rem(at, jnp.int32(stages))
        ring = lane * stages + slot
        b, h = item.batch, item.head
        tokens = pl.ds(start_of(item, step)[1], plan.step)

        pl.when(at >= stages)(lambda: plgpu.barrier_wait(shared.q_free.at[ring]))
        loaded = shared.q_loaded.at[ring]
        for s in range(slices):
            target = shared.q.at[lane, slot, s]
            plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h, columns(s, K)], target, loaded)
        target = shared.stats.at[lane, slot]
        plgpu.copy_gmem_to_smem(stats_ref.at[b, h, pl.ds(0, 2), tokens], target, loaded)
        if mask.query_ids is not None:
            target = shared.query_ids.at[lane, slot]
            plgpu.copy_gmem_to_smem(mask.query_ids.at[b, tokens], target, loaded)
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(shared.do_free.at[ring]))
        for s in range(slices):
            source, target = do_ref.at[b, tokens, h, columns(s, V)], shared.do.at[lane, slot, s]
            plgpu.copy_gmem_to_smem(source, target, shared.do_loaded.at[ring])

    @pl.when(worker == plan.workers)
    def _copies():
        if limits is not None:
            plgpu.set_max_registers(limits[1], action="decrease")

        def copy(items: list[Item], done: list[Done]) -> list[Done]:
            for lane, item in enumerate(items):

                @pl.when(item.tile >= 0)
                def _resident(lane=lane, item=item):
                    tiles = done[lane].tiles
                    slot = lax.rem(tiles, jnp.int32(plan.tiles))
                    place = lane * plan.tiles + slot
                    free = shared.resident_free.at[place]
                    pl.when(tiles >= plan.tiles)(functools.partial(plgpu.barrier_wait, free))
                    tokens = pl.ds(item.tile * plan.tile, plan.tile)
                    for ref, to, width in ((k_ref, shared.keys, K), (v_ref, shared.values, V)):
                        for s in range(slices):
                            source = ref.at[item.batch, tokens, item.head, columns(s, width)]
                            loaded = shared.resident_loaded.at[place]
                            plgpu.copy_gmem_to_smem(source, to.at[lane, slot, s], loaded)

            def of_member(j, done):
                here = [member(item, j) for item in items]
                steps = [steps_of(item) for item in here]

                @pl.loop(0, functools.reduce(jnp.maximum, steps))
                def _(step):
                    for lane, item in enumerate(here):
                        pl.when(step < steps[lane])(
                            functools.partial(copy_step, lane, item, step, done[lane] + step)
                        )

                return [x + y for x, y in zip(done, steps, strict=True)]

            steps_done = lax.fori_loop(0, group, of_member, [x.steps for x in done])
            return [
                Done(before.tiles + (item.tile >= 0).astype(jnp.int32), steps)
                for before, item, steps in zip(done, items, steps_done, strict=True)
            ]

        none = [Done.nothing()] * lanes
        done = items_of_block.deal(plan, mask.items, shared.items, copy, none)
        drain(plan, done, shared.resident_free, shared.q_free, shared.do_free)

    @pl.when(worker < plan.workers)
    def _computes():
        if limits is not None:
            plgpu.set_max_registers(limits[0], action="increase")
        # traced even where they are 0: accumulating products cannot take literal indices
        slice_ = lax.rem(worker, jnp.int32(slices))
        half = lax.rem(lax.div(worker, jnp.int32(slices)), jnp.int32(plan.tile // ROWS))
        lane = lax.div(worker, jnp.int32(slices * plan.tile // ROWS))
        panels = [lax.rem(worker, jnp.int32(1)) + s for s in range(slices)]
        rows = pl.ds(half * ROWS, ROWS)
        turns = Turns(shared.turn, half, plan.take_turns)
        shape = (ROWS, plan.step)

        def visit_of(item: Item, step) -> _Visit:
            found, start = start_of(item, step)
            leaf, far, run = mask.leaf[item.batch, item.head, found], None, None
            if mask.far is not None:
                far = mask.far[item.batch, item.head, leaf, item.tile]
            if mask.query_runs is not None:
                place = lax.div(start, jnp.int32(plan.step))
                place = jnp.minimum(place, mask.query_runs.shape[1] - 1)
                run = mask.query_runs[item.batch, place]
            return _Visit(item.position + start, leaf, far, run)

        def queries_at(slot, ref: Ref) -> list[Ref]:
            return [ref.at[lane, slot, s] for s in panels]

        def scores_of(place, slot):
            keys = [shared.keys.at[lane, place, s, rows] for s in panels]
            q = queries_at(slot, shared.q)
            return [(x, y.transpose((1, 0))) for x, y in zip(keys, q, strict=True)], None

        def first_scores(place, slot):
            plgpu.barrier_wait(shared.q_loaded.at[lane * stages + slot])
            turns.wait()
            (scores,), _ = products(interpret, scores_of(place, slot), meanwhile=turns.end)
            return scores

        def add(place, part: Part, ids, visit: _Visit, slot, following, carry, scores):
            dk, dv, dbias = carry
            values = [shared.values.at[lane, place, s, rows] for s in panels]
            ring = lane * stages + slot
            band = queries(setup, visit.position, plan.step, visit.leaf, visit.run)
            part = part._replace(far=visit.far)

            def same_document():
                return over_rows(ids, shape) == over_columns(shared.query_ids.at[lane, slot], shape)

            same = None if ids is None else same_document
            logits, slope = logits_and_slope(setup, scores, band, (part,), 0, same)
            lse = over_columns(shared.stats.at[lane, slot, 0], shape)
            p = jnp.exp2(logits * setup.unit - lse)
            plgpu.barrier_wait(shared.do_loaded.at[ring])
            do = queries_at(slot, shared.do)
            pairs = [(x, y.transpose((1, 0))) for x, y in zip(values, do, strict=True)]
            mine = shared.do.at[lane, slot, slice_]
            terms = ([(p.astype(jnp.bfloat16), mine)], dv), (pairs, None)
            turns.wait()
            (dv, dp), _ = products(interpret, *terms, meanwhile=turns.end)
            plgpu.barrier_arrive(shared.do_free.at[ring])
            da = p * (dp + over_columns(shared.stats.at[lane, slot, 1], shape))
            if part.bias is not None:
                end = part.start + ROWS
                biased = lax.cond(
                    band.biased & (end <= band.near_lowest),
                    lambda da: da,
                    lambda da: carried(setup, band, (part,), da, 0),
                    da,
                )
                dbias += biased.sum(axis=1)
            dx = (da if slope is None else da * slope).astype(jnp.bfloat16)
            terms = [([(dx, shared.q.at[lane, slot, slice_])], dk)]
            if following is not None:
                plgpu.barrier_wait(shared.q_loaded.at[lane * stages + following])
                terms.append(scores_of(place, following))
            turns.wait()
            (dk, *ahead), _ = products(interpret, *terms, meanwhile=turns.end)
            plgpu.barrier_arrive(shared.q_free.at[ring])
            return (dk, dv, dbias), ahead[0] if ahead else None

        def compute(item: Item, done: Done):
            first = item.tile * plan.tile + half * ROWS
            slot = lax.rem(done.tiles, jnp.int32(plan.tiles))
            place = lane * plan.tiles + slot
            tokens, ids = pl.ds(first, ROWS), None
            if mask.key_ids is not None:
                ids = load_rows(mask.key_ids.at[item.batch, tokens])
            plgpu.barrier_wait(shared.resident_loaded.at[place])

            def of_member(j, carry):
                dk, dv, done = carry
                here = member(item, j)
                steps = steps_of(here)
                where = here.batch, here.head, heads, jnp.int32(0), item.tile, first, ROWS
                part = part_of(setup, mask, *where)

                def slot_of(step):
                    return lax.rem(done + step, jnp.int32(stages))

                def step_of(step, following, carry, visit, scores):
                    return add(slot, part, ids, visit, slot_of(step), following, carry, scores)

                def one(step, state):
                    carry, visit, scores = state
                    ahead = visit_of(here, step + 1)
                    carry, scores = step_of(step, slot_of(step + 1), carry, visit, scores)
                    return carry, ahead, scores

                def all_steps(carry):
                    zero = jnp.int32(0)
                    state = carry, visit_of(here, zero), first_scores(slot, slot_of(zero))
                    carry, visit, scores = lax.fori_loop(0, steps - 1, one, state)
                    return step_of(steps - 1, None, carry, visit, scores)[0]

                carry = dk, dv, vector(0.0)
                dk, dv, dbias = lax.cond(steps > 0, all_steps, lambda carry: carry, carry)
                if dbias_ref:

                    @pl.when(slice_ == 0)
                    def _():
                        dbias_ref[0].at[here.batch, here.head, tokens][...] = dbias

                return dk, dv, done + steps

            dk, dv, _ = lax.fori_loop(0, group, of_member, (tile(K), tile(V), done.steps))
            plgpu.barrier_arrive(shared.resident_free.at[place])
            b, g = item.batch, item.head
            dk = (dk * setup.scale).astype(jnp.bfloat16)
            dk_ref.at[b, tokens, g, columns(slice_, K)][...] = dk
            dv_ref.at[b, tokens, g, columns(slice_, V)][...] = dv.astype(jnp.bfloat16)

        def one_tile(item: Item, done: Done) -> Done:
            pl.when(item.tile >= 0)(functools.partial(compute, item, done))

            def further(j, steps):
                return steps + steps_of(member(item, j))

            steps = lax.fori_loop(0, group, further, done.steps)
            return Done(done.tiles + (item.tile >= 0).astype(jnp.int32), steps)

        turns.begin()
        items_of_block.take(shared.items, lane, one_tile, Done.nothing())
        turns.close()


def key_gradients(
    setup: Setup,
    plan: Plan,
    mask: Mask,
    q: Float[Array, "B T H K"],
    do: Float[Array, "B T H V"],
    stats: Float[Array, "B H 2 Tq"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
) -> tuple[Array, Array, Float[Array, "B H Sp"] | None]:
    """dk, dv [B, Sp, G, _], and for each key the sum of da over its biased pairs.

    Sp >= S is whole tiles; `stats` are those of `pallas_gpu_dq.query_gradient`.
    """
    (B, S, G, K), V, H = k.shape, v.shape[3], q.shape[2]
    Sp = cdiv(S, plan.tile) * plan.tile
    out_type = [
        jax.ShapeDtypeStruct((B, Sp, G, K), k.dtype),
        jax.ShapeDtypeStruct((B, Sp, G, V), v.dtype),
    ]
    if mask.bias is not None:
        out_type.append(jax.ShapeDtypeStruct((B, H, Sp), jnp.float32))
    dk, dv, *dbias = launch(
        functools.partial(_kernel, setup, plan),
        plan,
        mask,
        q,
        do,
        stats,
        k,
        v,
        out_type=tuple(out_type),
        shared=_scratch(plan, K, V, mask.query_ids is not None, setup.interpret is not None),
        name="dkv",
        interpret=setup.interpret,
    )
    return dk, dv, dbias[0] if dbias else None
