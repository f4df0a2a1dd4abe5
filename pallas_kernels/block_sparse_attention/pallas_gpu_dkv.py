"""Hopper kernel: the gradients of keys, values and bias, one tile of keys after the other.

It walks the transposed visits and adds in their order, one query head of the group after the
other, in registers: nothing is accumulated in device memory. Logits are held [keys, queries], so
that their gradients are left operands from registers. Registers of a thread, K = V = 128, steps of
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
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import ROWS, Item, Plan
from pallas_kernels.block_sparse_attention.pallas_gpu_queries import drain, launch
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
    read_item,
    registers,
    tile,
    vector,
    visited_tile,
)
from pallas_kernels.blocks import cdiv
from pallas_kernels.pallas_gpu_hopper import over_columns, over_rows, products, swizzled


class _Shared(NamedTuple):
    """Shared memory and barriers of a block; `pallas_gpu_queries.Shared` says how they work."""

    keys: Ref  # [lanes, slices, tile, K / slices]
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


class _Visit(NamedTuple):
    """What is known of a step of queries before it is loaded."""

    position: Int[Array, ""]
    leaf: Int[Array, ""]
    far: Int[Array, ""] | None
    run: Int[Array, ""] | None


def _scratch(plan: Plan, K: int, V: int, ids: bool) -> _Shared:
    lanes, stages, slices, step = plan.lanes, plan.stages, plan.slices, plan.step
    rings = lanes * stages
    free = functools.partial(plgpu.Barrier, num_arrivals=plan.workers // lanes)
    return _Shared(
        keys=swizzled(lanes, slices, plan.tile, K // slices),
        values=swizzled(lanes, slices, plan.tile, V // slices),
        q=swizzled(lanes, stages, slices, step, K // slices),
        do=swizzled(lanes, stages, slices, step, V // slices),
        stats=plgpu.SMEM((lanes, stages, 2, step), jnp.float32),
        query_ids=plgpu.SMEM((lanes, stages, step), jnp.int32) if ids else None,
        resident_loaded=plgpu.Barrier(num_arrivals=2 * slices, num_barriers=lanes),
        resident_free=free(num_barriers=lanes),
        q_loaded=plgpu.Barrier(num_arrivals=slices + 1 + ids, num_barriers=rings),
        q_free=free(num_barriers=rings),
        do_loaded=plgpu.Barrier(num_arrivals=slices, num_barriers=rings),
        do_free=free(num_barriers=rings),
    )


def _kernel(setup: Setup, plan: Plan, mask: Mask, q_ref, do_ref, stats_ref, k_ref, v_ref, *outputs):
    dk_ref, dv_ref, *dbias_ref, shared = outputs
    interpret = setup.interpret is not None
    heads, G = q_ref.shape[2], k_ref.shape[2]
    group, M = heads // G, mask.leaf.shape[2]
    lanes, stages, slices = plan.lanes, plan.stages, plan.slices
    K, V = k_ref.shape[3] // slices, v_ref.shape[3] // slices  # columns of a slice
    pieces = plan.tiling.query // plan.step  # of a query tile
    rounds = mask.items.shape[0]
    worker = lax.axis_index("worker")
    limits = registers(plan.workers)

    def item_of(round_, lane) -> Item:
        return read_item(mask, jnp.minimum(round_, rounds - 1), lane)

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

        def round_(round_, done):
            items = [item_of(round_, lane) for lane in range(lanes)]
            tiles_done, steps_done = zip(*done, strict=True)
            for lane, item in enumerate(items):

                @pl.when(item.tile >= 0)
                def _resident(lane=lane, item=item):
                    free = shared.resident_free.at[lane]
                    pl.when(tiles_done[lane] > 0)(functools.partial(plgpu.barrier_wait, free))
                    tokens = pl.ds(item.tile * plan.tile, plan.tile)
                    for ref, to, width in ((k_ref, shared.keys, K), (v_ref, shared.values, V)):
                        for s in range(slices):
                            source = ref.at[item.batch, tokens, item.head, columns(s, width)]
                            loaded = shared.resident_loaded.at[lane]
                            plgpu.copy_gmem_to_smem(source, to.at[lane, s], loaded)

            def of_member(j, done):
                here = [member(item, j) for item in items]
                steps = [steps_of(item) for item in here]

                @pl.loop(0, functools.reduce(jnp.maximum, steps))
                def _(step):
                    for lane, item in enumerate(here):
                        pl.when(step < steps[lane])(
                            functools.partial(copy_step, lane, item, step, done[lane] + step)
                        )

                return tuple(x + y for x, y in zip(done, steps, strict=True))

            steps_done = lax.fori_loop(0, group, of_member, steps_done)
            here = [(item.tile >= 0).astype(jnp.int32) for item in items]
            tiles_done = [x + y for x, y in zip(tiles_done, here, strict=True)]
            return tuple(zip(tiles_done, steps_done, strict=True))

        none = (jnp.int32(0), jnp.int32(0))
        done = lax.fori_loop(0, rounds, round_, (none,) * lanes)
        for lane, (tiles_done, steps_done) in enumerate(done):
            free = shared.resident_free, shared.q_free, shared.do_free
            drain(plan, lane, tiles_done, steps_done, *free)

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
        keys = [shared.keys.at[lane, s, rows] for s in panels]
        values = [shared.values.at[lane, s, rows] for s in panels]
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

        def add(part: Part, ids, visit: _Visit, slot, carry):
            dk, dv, dbias = carry
            ring = lane * stages + slot
            q = [shared.q.at[lane, slot, s] for s in panels]
            do = [shared.do.at[lane, slot, s] for s in panels]
            band = queries(setup, visit.position, plan.step, visit.leaf, visit.run)
            part = part._replace(far=visit.far)

            def same_document():
                return over_rows(ids, shape) == over_columns(shared.query_ids.at[lane, slot], shape)

            plgpu.barrier_wait(shared.q_loaded.at[ring])
            pairs = [(x, y.transpose((1, 0))) for x, y in zip(keys, q, strict=True)]
            (scores,), _ = products(interpret, (pairs, None))
            same = None if ids is None else same_document
            logits, slope = logits_and_slope(setup, scores, band, (part,), 0, same)
            lse = over_columns(shared.stats.at[lane, slot, 0], shape)
            p = jnp.exp2(logits * setup.unit - lse)
            plgpu.barrier_wait(shared.do_loaded.at[ring])
            pairs = [(x, y.transpose((1, 0))) for x, y in zip(values, do, strict=True)]
            mine = shared.do.at[lane, slot, slice_]
            (dv, dp), _ = products(interpret, ([(p.astype(jnp.bfloat16), mine)], dv), (pairs, None))
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
            mine = shared.q.at[lane, slot, slice_]
            (dk,), _ = products(interpret, ([(dx, mine)], dk))
            plgpu.barrier_arrive(shared.q_free.at[ring])
            return dk, dv, dbias

        def compute(item: Item, done):
            first = item.tile * plan.tile + half * ROWS
            tokens, ids = pl.ds(first, ROWS), None
            if mask.key_ids is not None:
                ids = load_rows(mask.key_ids.at[item.batch, tokens])
            plgpu.barrier_wait(shared.resident_loaded.at[lane])

            def of_member(j, carry):
                dk, dv, done = carry
                here = member(item, j)
                steps = steps_of(here)
                where = here.batch, here.head, heads, jnp.int32(0), item.tile, first, ROWS
                part = part_of(setup, mask, *where)

                def one(step, carry):
                    inner, visit = carry
                    ahead = visit_of(here, step + 1)
                    slot = lax.rem(done + step, jnp.int32(stages))
                    return add(part, ids, visit, slot, inner), ahead

                carry = (dk, dv, vector(0.0)), visit_of(here, jnp.int32(0))
                (dk, dv, dbias), _ = lax.fori_loop(0, steps, one, carry)
                if dbias_ref:

                    @pl.when(slice_ == 0)
                    def _():
                        dbias_ref[0].at[here.batch, here.head, tokens][...] = dbias

                return dk, dv, done + steps

            dk, dv, _ = lax.fori_loop(0, group, of_member, (tile(K), tile(V), done))
            plgpu.barrier_arrive(shared.resident_free.at[lane])
            b, g = item.batch, item.head
            dk = (dk * setup.scale).astype(jnp.bfloat16)
            dk_ref.at[b, tokens, g, columns(slice_, K)][...] = dk
            dv_ref.at[b, tokens, g, columns(slice_, V)][...] = dv.astype(jnp.bfloat16)

        def round_(round_, carry):
            item, done = carry
            ahead = item_of(round_ + 1, lane)
            pl.when(item.tile >= 0)(functools.partial(compute, item, done))

            def further(j, done):
                return done + steps_of(member(item, j))

            return ahead, lax.fori_loop(0, group, further, done)

        lax.fori_loop(0, rounds, round_, (item_of(0, lane), jnp.int32(0)))


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
        shared=_scratch(plan, K, V, mask.query_ids is not None),
        name="dkv",
        interpret=setup.interpret,
    )
    return dk, dv, dbias[0] if dbias else None
