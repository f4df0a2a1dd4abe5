"""Hopper kernels: an exact split of a row, so that few heads fill the chip.

A stretch of tiles maps the state affinely, S_out = T S_in + B. `summarise` runs the recurrence of
every stretch but the last from S = 0 with its values (giving B) and from S = I without values
(giving T), `join` chains the maps into the state that enters each stretch, and the pass over
tiles then runs all stretches at once. Nothing is dropped: the result is that of one pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_gpu_scan import advance, errors_of, workers_of
from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import (
    CARRY_IN,
    READ_ONLY_SMEM,
    TILE,
    WGMMA,
    columns,
    left_operand,
    product,
    swizzled,
    wide,
)

Halves = tuple[Array, Array]  # leading and trailing bits, bf16, as [B, H, stretches, V or K, K]

_STAGES = 2
_MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form


def stretches(batch: int, heads: int, tiles: int, key_width: int, value_width: int) -> int:
    """How many stretches to split each row into: the least modelled time, in tile steps.

    A pass takes as many rounds as its blocks need on the multiprocessors, each as long as a
    stretch. Summaries cost 0.7 of a step (no outputs) for V + K columns instead of V; chaining
    costs about two steps a stretch, and a split must repay the launches of its two kernels.
    """

    def cost(pieces: int) -> float:
        length = -(-tiles // pieces)

        def rounds(width: int, count: int, workers: int = 2) -> int:
            panes = -(-width // (workers * TILE))
            return -(-batch * heads * panes * count // _MULTIPROCESSORS)

        whole = rounds(value_width, pieces, workers_of(key_width, value_width)) * length
        if pieces == 1:
            return whole
        summaries = 0.7 * rounds(value_width + key_width, pieces - 1) * length
        return whole + summaries + 2 * pieces + 20

    # Every stretch must own a tile, also when the lengths are rounded up.
    choices = [p for p in range(1, min(tiles, 64) + 1) if (p - 1) * -(-tiles // p) < tiles]
    return min(choices, key=cost)


def _summarise_kernel(
    k_ref, v_ref, a_ref, gates_ref, b_high_ref, b_low_ref, t_high_ref, t_low_ref,
    k, v, a, gates, loaded, consumed, *copies,
    group, workers, stretch, interpret,
):  # fmt: skip
    row, head, pane, piece = (lax.axis_index(name) for name in ("row", "head", "pane", "piece"))
    key_head = lax.div(head, jnp.int32(group))
    worker = lax.axis_index("worker")
    first = piece * stretch

    def load(step, slot):
        tokens = pl.ds((first + step) * TILE, TILE)
        barrier = loaded.at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], k.at[slot], barrier)
        for w in range(workers):
            # Panels past V carry T, not B: any values will do, they are multiplied by zero.
            last = v_ref.shape[-1] // TILE - 1
            panel = pl.ds(jnp.minimum(pane * workers + w, last) * TILE, TILE)
            plgpu.copy_gmem_to_smem(v_ref.at[row, tokens, head, panel], v.at[slot, w], barrier)
        plgpu.copy_gmem_to_smem(a_ref.at[row, head, first + step], a.at[slot], barrier)
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, first + step], gates.at[slot], barrier)

    @pl.when(worker == workers)
    def _copies():
        if workers == 2:
            plgpu.set_max_registers(40, action="decrease")
        for step in range(min(_STAGES, stretch)):
            load(step, step)

        @pl.loop(0, max(stretch - _STAGES, 0))
        def _refill(step):
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(consumed.at[slot])
            load(step + _STAGES, slot)

    @pl.when(worker < workers)
    def _states():
        if workers == 2:
            plgpu.set_max_registers(232, action="increase")
        base = (pane * workers + worker) * TILE
        has_values = (base < v_ref.shape[-1]).astype(jnp.float32)
        shape = (TILE, k.shape[-1])
        i = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        j = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        state = jnp.where(i + (base - v_ref.shape[-1]) == j, 1.0, 0.0)

        def tile(step, state):
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            half = left_operand(state, copies[0].at[worker] if copies else None)
            read = product(interpret, half, k.at[slot].transpose((1, 0)))
            carry_in = columns(gates.at[slot, CARRY_IN])
            values = plgpu.load(v.at[slot, worker].transpose((1, 0)), layout=WGMMA)
            values = values.astype(jnp.float32) * has_values
            errors = errors_of(interpret, read, values, carry_in, a.at[slot])
            state = advance(interpret, state, errors, k.at[slot], gates.at[slot])

            @pl.when(step + _STAGES < stretch)  # otherwise nobody waits for the slot
            def _release():
                plgpu.barrier_arrive(consumed.at[slot])

            return state

        state = lax.fori_loop(0, stretch, tile, state)
        maps = (b_high_ref, b_low_ref), (t_high_ref, t_low_ref)
        store_map(*maps, (row, head, piece), base, state)


def summarise(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B H N C C"],
    gates: Float[Array, "B H N R C"],
    pieces: int,
    *,
    interpret=None,
) -> tuple[Halves, Halves]:
    """B^T and T^T of every stretch but the last of `pieces` stretches of ceil(N / P) tiles.

    Each as two bf16 arrays, of which the first holds the leading and the second the trailing bits.
    """
    batch, _, heads, value_width = v.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    panels = (value_width + width) // TILE
    workers = 2 if panels % 2 == 0 else 1
    body = functools.partial(
        _summarise_kernel,
        group=heads // k.shape[2],
        workers=workers,
        stretch=-(-tiles // pieces),
        interpret=interpret is not None,
    )
    b_high, b_low, t_high, t_low = plgpu.kernel(
        body,
        out_type=map_shapes(batch, heads, pieces - 1, value_width, width),
        scratch_types=[
            swizzled(_STAGES, TILE, width),
            swizzled(_STAGES, workers, TILE, TILE),
            swizzled(_STAGES, TILE, TILE),
            plgpu.SMEM((_STAGES, vectors, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=3 + workers, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=workers, num_barriers=_STAGES),
            *([swizzled(workers, TILE, width)] if wide(width) else []),
        ],
        grid=(panels // workers, pieces - 1, heads, batch),
        grid_names=("pane", "piece", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="delta_rule_summarise",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(k, v, a, gates)
    return (b_high, b_low), (t_high, t_low)


def high_and_low(x):
    """x as the sum of two bf16 parts, 16 bits of mantissa."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def map_shapes(batch: int, heads: int, stretches: int, value_width: int, width: int):
    """Of both halves of the increments, then of the transitions."""
    lead = (batch, heads, stretches)
    shapes = ((*lead, value_width, width),) * 2 + ((*lead, width, width),) * 2
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def store_map(increment, transition, stretch, panel, state):
    """64 rows of a map's halves: rows of the transition come after the V of the increment."""
    value_width = increment[0].shape[3]
    halves = high_and_low(state)

    @pl.when(panel < value_width)
    def _increment():
        for ref, half in zip(increment, halves, strict=True):
            ref.at[(*stretch, pl.ds(panel, TILE))][...] = half

    @pl.when(panel >= value_width)
    def _transition():
        for ref, half in zip(transition, halves, strict=True):
            ref.at[(*stretch, pl.ds(panel - value_width, TILE))][...] = half


def _join_kernel(
    initial_ref, b_high_ref, b_low_ref, t_high_ref, t_low_ref, states_ref, high, low, loaded,
    *copies, blocks, interpret,
):  # fmt: skip
    row, head, pane = (lax.axis_index(name) for name in ("row", "head", "pane"))
    slots = high.shape[0]
    pieces = b_high_ref.shape[2]
    panel = pl.ds(pane * TILE, TILE)
    parts = 1 + blocks  # of a map: this panel of B, then T by blocks of 64 rows

    def load(piece, part):  # counted from the stretch's first part, which may be beyond its last
        piece, part = piece + part // parts, part % parts
        refs = (t_high_ref, t_low_ref) if part else (b_high_ref, b_low_ref)
        here = (row, head, piece, pl.ds((part - 1) * TILE, TILE) if part else panel)
        slot = lax.rem(piece * parts + part, jnp.int32(slots))
        for ref, to in zip(refs, (high, low), strict=True):
            plgpu.copy_gmem_to_smem(ref.at[here], to.at[slot], loaded.at[slot])

    for part in range(min(slots, pieces * parts)):
        load(jnp.int32(0), part)

    def stretch(piece, state):
        states_ref.at[row, head, piece, panel][...] = state
        parts_of = high_and_low(state)
        if copies:
            for copy, half in zip(copies, parts_of, strict=True):
                copy[...] = half
            plgpu.commit_smem()
        for part in range(parts):
            step = piece * parts + part
            slot = lax.rem(step, jnp.int32(slots))
            plgpu.barrier_wait(loaded.at[slot])
            if part == 0:
                halves = (plgpu.load(x.at[slot], layout=WGMMA) for x in (high, low))
                state = sum(x.astype(jnp.float32) for x in halves)
            else:
                start = (part - 1) * TILE
                if copies:
                    a_high, a_low = (copy.at[:, pl.ds(start, TILE)] for copy in copies)
                else:
                    a_high, a_low = (half[:, start : start + TILE] for half in parts_of)
                for a, b in ((a_high, high), (a_low, high), (a_high, low)):
                    state = product(interpret, a, b.at[slot], state)
            plgpu.commit_smem()  # every warp is done with the slot
            more = step + slots < pieces * parts
            pl.when(more)(functools.partial(load, piece, part + slots))
        return state

    state = plgpu.load(initial_ref.at[row, head, panel], layout=WGMMA, optimized=False)
    state = lax.fori_loop(0, pieces, stretch, state)
    states_ref.at[row, head, pieces, panel][...] = state


def join(
    initial: Float[Array, "B H V K"],
    increments: Halves,
    transitions: Halves,
    *,
    interpret=None,
) -> Float[Array, "B H P V K"]:
    """The state (transposed) entering each stretch: S_0, then S_p+1 = T_p S_p + B_p."""
    batch, heads, value_width, width = initial.shape
    shape = (batch, heads, increments[0].shape[2] + 1, value_width, width)
    slots = 4 if width <= 128 else 2
    return plgpu.kernel(
        functools.partial(_join_kernel, blocks=width // TILE, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[
            swizzled(slots, TILE, width),
            swizzled(slots, TILE, width),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            *([swizzled(TILE, width)] * 2 if wide(width) else []),
        ],
        grid=(value_width // TILE, heads, batch),
        grid_names=("pane", "head", "row"),
        kernel_name="delta_rule_join",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(initial, *increments, *transitions)
