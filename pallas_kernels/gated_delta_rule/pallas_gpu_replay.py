"""Hopper kernel: the states again, for the backward pass.

The forward pass keeps the state entering each stretch of a row. This one runs all stretches at once
from there and writes, of every tile, the state entering it and the errors X (`pallas_gpu_scan`).

X is written where the gradients of queries and keys will be (`error_buffers`):
`pallas_gpu_gradients` reads a tile of it before it writes that tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_gpu_scan import advance, errors_of
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
from pallas_kernels.pallas_gpu_hopper import copy_ahead

_STAGES = 2


def error_buffers(width: int, value_width: int) -> int:
    """How many arrays of K columns a head hold the V columns of X; at least two."""
    return max(2, -(-value_width // width))


def buffer_of(panel, width: int):
    """(which buffer, its columns) of the panel that starts at value column `panel`."""
    return lax.div(panel, jnp.int32(width)), pl.ds(lax.rem(panel, jnp.int32(width)), TILE)


def _replay_kernel(*refs, buffers, group, workers, stretch, tiles, interpret):
    k_ref, v_ref, a_ref, gates_ref, state_ref, states_ref, *refs = refs
    error_refs, (k, v, a, gates, kept, out, loaded, consumed) = refs[:buffers], refs[buffers:]
    row, head, pane, piece = (lax.axis_index(name) for name in ("row", "head", "pane", "piece"))
    key_head = lax.div(head, jnp.int32(group))
    worker = lax.axis_index("worker")
    first = piece * stretch
    count = jnp.minimum(stretch, tiles - first)

    def load(step, slot):
        tile = first + step
        tokens = pl.ds(tile * TILE, TILE)
        barrier = loaded.at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], k.at[slot], barrier)
        for w in range(workers):
            panel = pl.ds((pane * workers + w) * TILE, TILE)
            plgpu.copy_gmem_to_smem(v_ref.at[row, tokens, head, panel], v.at[slot, w], barrier)
        plgpu.copy_gmem_to_smem(a_ref.at[row, head, tile], a.at[slot], barrier)
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates.at[slot], barrier)

    @pl.when(worker == workers)
    def _copies():
        if workers == 2:
            plgpu.set_max_registers(40, action="decrease")
        copy_ahead(load, count, _STAGES, consumed)

    @pl.when(worker < workers)
    def _states():
        if workers == 2:
            plgpu.set_max_registers(232, action="increase")
        start = (pane * workers + worker) * TILE
        panel = pl.ds(start, TILE)
        # A wide state goes to the product by the shared memory it leaves the kernel from.
        early = wide(k.shape[-1])

        def step_through(step, state):
            slot = lax.rem(step, jnp.int32(_STAGES))
            tile = first + step
            tokens = pl.ds(tile * TILE, TILE)
            keep_at = states_ref.at[row, head, tile, panel]
            plgpu.barrier_wait(loaded.at[slot])
            keys = k.at[slot].transpose((1, 0))
            if early:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the errors may be under way yet
                half = left_operand(state, kept.at[worker])
                plgpu.copy_smem_to_gmem(kept.at[worker], keep_at)
            else:
                half = left_operand(state)
            read = product(interpret, half, keys)
            carry_in = columns(gates.at[slot, CARRY_IN])
            values = plgpu.load(v.at[slot, worker].transpose((1, 0)), layout=WGMMA)
            values = values.astype(jnp.float32)
            errors = errors_of(interpret, read, values, carry_in, a.at[slot])
            state = advance(interpret, state, errors, k.at[slot], gates.at[slot])

            @pl.when(step + _STAGES < count)  # otherwise nobody waits for the slot
            def _release():
                plgpu.barrier_arrive(consumed.at[slot])

            plgpu.wait_smem_to_gmem(int(early), wait_read_only=True)
            if not early:
                kept[worker] = half
            out.at[worker].transpose((1, 0))[...] = errors.astype(jnp.bfloat16)
            plgpu.commit_smem()
            if not early:
                plgpu.copy_smem_to_gmem(kept.at[worker], keep_at)
            which, columns_of = buffer_of(start, k.shape[-1])
            for buffer, ref in enumerate(error_refs):

                @pl.when(which == buffer)
                def _errors(ref=ref):
                    target = ref.at[row, tokens, head, columns_of]
                    plgpu.copy_smem_to_gmem(out.at[worker], target)

            return state

        state = plgpu.load(state_ref.at[row, head, piece, panel], layout=WGMMA, optimized=False)
        lax.fori_loop(0, count, step_through, state)
        plgpu.wait_smem_to_gmem(0)


def replay(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B H N C C"],
    gates: Float[Array, "B H N R C"],
    states: Float[Array, "B H P V K"],
    *,
    interpret=None,
) -> tuple[Float[Array, "B H N V K"], list[Float[Array, "B M H K"]]]:
    """The state (transposed, bf16) entering every tile, and X in its buffers (M = N C tokens), from
    the states entering P stretches."""
    batch, _, heads, value_width = v.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    pieces = states.shape[2]
    workers = 2 if value_width % (2 * TILE) == 0 else 1
    buffers = error_buffers(width, value_width)
    states, *errors = plgpu.kernel(
        functools.partial(
            _replay_kernel,
            buffers=buffers,
            group=heads // k.shape[2],
            workers=workers,
            stretch=-(-tiles // pieces),
            tiles=tiles,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, tiles, value_width, width), jnp.bfloat16),
            *[jax.ShapeDtypeStruct((batch, tiles * TILE, heads, width), v.dtype)] * buffers,
        ),
        scratch_types=[
            swizzled(_STAGES, TILE, width),
            swizzled(_STAGES, workers, TILE, TILE),
            swizzled(_STAGES, TILE, TILE),
            plgpu.SMEM((_STAGES, vectors, TILE), jnp.float32),
            swizzled(workers, TILE, width),
            swizzled(workers, TILE, TILE),
            plgpu.Barrier(num_arrivals=3 + workers, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=workers, num_barriers=_STAGES),
        ],
        grid=(value_width // (TILE * workers), pieces, heads, batch),
        grid_names=("pane", "piece", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="delta_rule_replay",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(k, v, a, gates, states)
    return states, errors
