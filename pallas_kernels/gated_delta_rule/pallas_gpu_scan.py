"""Hopper kernel: the pass over tiles that carries the state and writes the outputs.

Per tile, with the incoming state S, A from `pallas_gpu_inverse` and w = m beta e^(c_last - c)
(equivalent to the WY form, without forming W and U):
  X  = A (V - e^c o (K S))
  O  = s e^c o (Q S) + [s (Q K^T) o D diag(beta)]_tril X
  S <- e^(c_last) S + K^T (w o X)
X are the errors, what the values are beyond those read; the written Vn of the README are beta o X.
With beta out of X, the gradient that goes back through A is dV itself, and dbeta needs no V.

Everything is computed transposed: a warpgroup owns 64 value columns and keeps S^T [64, K] in its
accumulators in fp32, so that S^T, the residual and Vn^T go from one product into the next in
registers, as the left operand. One more warpgroup issues the copies and computes Q K^T o D.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import (
    BETA,
    CARRY_IN,
    CARRY_OUT,
    READ_ONLY_SMEM,
    TILE,
    WGMMA,
    columns,
    decay_tile,
    left_operand,
    product,
    swizzled,
    wide,
)


def errors_of(interpret, read, values, carry_in, a):
    """X^T = (V - e^c o (K S))^T A^T of one tile, [64, C]; `read` is (K S)^T."""
    residual = values - carry_in * read
    return product(interpret, residual.astype(jnp.bfloat16), a.transpose((1, 0)))


def advance(interpret, state, errors, keys, gates):
    """The state leaving a tile, transposed [64, K]."""
    kept = (errors * columns(gates.at[CARRY_OUT])).astype(jnp.bfloat16)
    return product(interpret, kept, keys, state * gates[CARRY_IN, TILE - 1])


def _kernel(
    q_ref, k_ref, v_ref, a_ref, gates_ref, state_ref,  # inputs
    o_ref, final_ref,  # outputs
    kq, v, a, gates, m, o,  # shared memory
    loaded, attended, consumed, used,  # barriers
    *copies,  # of the workers' states, where they are wide
    group, stages, workers, stretch, tiles, scale, segmented, interpret,
):  # fmt: skip
    row, head, pane, piece = (lax.axis_index(name) for name in ("row", "head", "pane", "piece"))
    key_head = lax.div(head, jnp.int32(group))
    worker = lax.axis_index("worker")
    first = piece * stretch
    count = jnp.minimum(stretch, tiles - first)
    only_one = m.shape[0] == 1  # tile M in shared memory, not one a stage

    def attention(step):
        return m.at[lax.rem(step, jnp.int32(m.shape[0]))]

    def load(step, slot):
        tokens = pl.ds((first + step) * TILE, TILE)
        barrier = loaded.at[slot]
        keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], keys, barrier)
        plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, key_head], queries, barrier)
        for w in range(workers):
            panel = pl.ds((pane * workers + w) * TILE, TILE)
            plgpu.copy_gmem_to_smem(v_ref.at[row, tokens, head, panel], v.at[slot, w], barrier)
        plgpu.copy_gmem_to_smem(a_ref.at[row, head, first + step], a.at[slot], barrier)
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, first + step], gates.at[slot], barrier)

    @pl.when(worker == workers)
    def _copies_and_attention():
        if workers == 2:
            plgpu.set_max_registers(88, action="decrease")
        for step in range(stages):
            pl.when(step < count)(functools.partial(load, step, step))

        @pl.loop(0, count)
        def _tile(step):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[slot])
            keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
            scores = product(interpret, queries, keys.transpose((1, 0)))
            scores = scores * decay_tile(gates.at[slot], segmented, strict=False)
            scores = scores * (columns(gates.at[slot, BETA]) * scale)
            if only_one:
                pl.when(step > 0)(lambda: plgpu.barrier_wait(used))
            attention(step)[...] = scores.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(attended.at[slot])

            # Refill the slot of the previous tile, once every worker is done with it.
            @pl.when((step > 0) & (step - 1 + stages < count))
            def _refill():
                free = lax.rem(step - 1, jnp.int32(stages))
                plgpu.barrier_wait(consumed.at[free])
                load(step - 1 + stages, free)

    @pl.when(worker < workers)
    def _states_and_outputs():
        if workers == 2:
            plgpu.set_max_registers(208, action="increase")
        panel = pl.ds((pane * workers + worker) * TILE, TILE)
        state = plgpu.load(state_ref.at[row, head, piece, panel], layout=WGMMA, optimized=False)

        def store(step, out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o.at[worker].transpose((1, 0))[...] = out
            plgpu.commit_smem()
            tokens = pl.ds((first + step) * TILE, TILE)
            plgpu.copy_smem_to_gmem(o.at[worker], o_ref.at[row, tokens, head, panel])

        def tile(step, carry):
            state, previous = carry
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[slot])

            def meanwhile():
                pl.when(step > 0)(functools.partial(store, step - 1, previous))
                carry_in = columns(gates.at[slot, CARRY_IN])
                values = plgpu.load(v.at[slot, worker].transpose((1, 0)), layout=WGMMA)
                return carry_in, values.astype(jnp.float32)

            half = left_operand(state, copies[0].at[worker] if copies else None)
            # Keys and queries side by side: one product reads the state for both.
            operand = kq.at[slot].transpose((1, 0))
            read, (carry_in, values) = product(interpret, half, operand, meanwhile=meanwhile)
            errors = errors_of(interpret, read[:, :TILE], values, carry_in, a.at[slot])
            state = advance(interpret, state, errors, kq.at[slot, pl.ds(0, TILE)], gates.at[slot])
            plgpu.barrier_wait(attended.at[slot])
            out = read[:, TILE:] * (carry_in * scale)
            weights = attention(step).transpose((1, 0))
            out = product(interpret, errors.astype(jnp.bfloat16), weights, out)
            if only_one:
                pl.when(step + 1 < count)(lambda: plgpu.barrier_arrive(used))

            @pl.when(step + stages < count)  # otherwise nobody waits for the slot
            def _release():
                plgpu.barrier_arrive(consumed.at[slot])

            return state, out.astype(jnp.bfloat16)

        nothing = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.bfloat16), WGMMA)
        state, out = lax.fori_loop(0, count, tile, (state, nothing))
        store(count - 1, out)
        final_ref.at[row, head, piece, panel][...] = state
        plgpu.wait_smem_to_gmem(0)


def workers_of(width: int, value_width: int) -> int:
    """Warpgroups of 64 value columns a block: two, where shared memory has room for their tiles."""
    return 2 if value_width % (2 * TILE) == 0 and width <= 192 else 1


def scan_tiles(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    a: Float[Array, "B H N C C"],
    gates: Float[Array, "B H N R C"],
    states: Float[Array, "B H P V K"],
    *,
    scale: float,
    interpret=None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H P V K"]]:
    """Outputs, and the state leaving each of the P stretches of ceil(N / P) tiles.

    `states` are the states entering the stretches; states are transposed, [V, K].
    """
    batch, _, heads, value_width = v.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    pieces = states.shape[2]
    workers = workers_of(width, value_width)
    stages = 3 if width <= 128 else 2
    body = functools.partial(
        _kernel,
        group=heads // k.shape[2],
        stages=stages,
        workers=workers,
        stretch=-(-tiles // pieces),
        tiles=tiles,
        scale=scale,
        segmented=vectors == 5,
        interpret=interpret is not None,
    )
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ),
        scratch_types=[
            swizzled(stages, 2 * TILE, width),
            swizzled(stages, workers, TILE, TILE),
            swizzled(stages, TILE, TILE),
            plgpu.SMEM((stages, vectors, TILE), jnp.float32),
            swizzled(1 if wide(width) else stages, TILE, TILE),
            swizzled(workers, TILE, TILE),
            plgpu.Barrier(num_arrivals=4 + workers, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers),
            *([swizzled(workers, TILE, width)] if wide(width) else []),
        ],
        grid=(value_width // (TILE * workers), pieces, heads, batch),
        grid_names=("pane", "piece", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="delta_rule_scan",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(q, k, v, a, gates, states)
