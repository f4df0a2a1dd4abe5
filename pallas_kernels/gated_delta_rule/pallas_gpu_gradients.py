"""Hopper kernel: the parallel half of the backward pass, tile by tile.

With S entering, dS leaving the tile, the errors X (`pallas_gpu_scan`), dV (`pallas_gpu_reverse`),
e = CARRY_IN, w = CARRY_OUT:
  G = s tril(dO X^T) o D ;  F = -stril(dV X^T) o D
  dQ = s e o (dO S^T) + G diag(beta) K
  dK = w o (X dS^T) - e o (dV S^T) + F diag(beta) K + diag(beta) (G^T Q + F^T K)
  Z  = G o (Q K^T) + F o (K K^T)
Gates get gradients as the rows they are packed in, so that `pack_gates` differentiates itself; sums
over the rows and the columns of Z are those of the decay and of beta.
A warpgroup owns 64 key columns, and one more issues the copies and computes G and F. Terms linear
in the key columns are summed over warpgroups by the caller. A block takes one tile after another:
the panels of the next are on their way while the pairs of one are worked on and its results stored.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_gpu_replay import buffer_of
from pallas_kernels.gated_delta_rule.pallas_gpu_split import MULTIPROCESSORS
from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import (
    BETA,
    CARRY_IN,
    CARRY_OUT,
    TILE,
    WGMMA,
    columns,
    decay_tile,
    rows,
    swizzled,
)
from pallas_kernels.pallas_gpu_hopper import products

_ROWS, _COLUMNS, _WHOLE = range(3)  # sums of Z diag(beta) over rows, of Z over columns; of S o dS


def _kernel(*refs, buffers, outputs, programs, group, slices, panels, scale, segmented, interpret):
    q_ref, k_ref, do_ref, dv_ref, states_ref, dstates_ref, gates_ref, *refs = refs
    error_refs, refs = refs[:buffers], refs[buffers:]
    dq_ref, dk_ref = refs[:2] if outputs else error_refs[:2]
    parts_ref, of_tile_ref, *refs = refs[outputs:]
    q, k, gates, do, errors, dv, states, dstates, parts, *barriers = refs
    ready, loaded, used, through, paired, freed = barriers
    batch, heads, tiles = states_ref.shape[:3]
    blocks, stages = of_tile_ref.shape[3], do.shape[0]
    program, mine = lax.axis_index("program"), lax.axis_index("slice")
    count = lax.div(tiles * heads * batch * blocks - 1 - program, jnp.int32(programs)) + 1

    def place(i):
        """(tile, head, row, block) of this block's i-th: side by side, blocks read what is so."""
        index, found = program + i * programs, []
        for size in (blocks, batch, heads):
            found.insert(0, lax.rem(index, jnp.int32(size)))
            index = lax.div(index, jnp.int32(size))
        return index, *found

    def tokens_of(tile):
        return pl.ds(tile * TILE, TILE)

    def key_columns(block, s):
        return pl.ds((block * slices + s) * TILE, TILE)

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def load(step):
        """Starts the copies of a panel; `step` counts them over all tiles of this block."""
        i, panel, slot = (
            lax.div(step, jnp.int32(panels)),
            lax.rem(step, jnp.int32(panels)),
            slot_of(step),
        )
        tile, head, row, block = place(i)
        value_columns = pl.ds(panel * TILE, TILE)
        for ref, to in ((do_ref, do), (dv_ref, dv)):
            source = ref.at[row, tokens_of(tile), head, value_columns]
            plgpu.copy_gmem_to_smem(source, to.at[slot], loaded.at[slot])
        which, columns_of = buffer_of(panel * TILE, dq_ref.shape[-1])
        for buffer, ref in enumerate(error_refs):

            @pl.when(which == buffer)
            def _errors(ref=ref):
                source = ref.at[row, tokens_of(tile), head, columns_of]
                plgpu.copy_gmem_to_smem(source, errors.at[slot], loaded.at[slot])

        for ref, to in ((states_ref, states), (dstates_ref, dstates)):
            for s in range(slices):
                source = ref.at[row, head, tile, value_columns, key_columns(block, s)]
                plgpu.copy_gmem_to_smem(source, to.at[slot, s], loaded.at[slot])

    def load_keys(i):
        tile, head, row, block = place(i)
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates, ready)
        for s in range(slices):
            for ref, to in ((q_ref, q), (k_ref, k)):
                key_head = lax.div(head, jnp.int32(group))
                source = ref.at[row, tokens_of(tile), key_head, key_columns(block, s)]
                plgpu.copy_gmem_to_smem(source, to.at[s], ready)

    def read(ref):
        return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

    zero = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), WGMMA)

    @pl.when(mine == slices)
    def _copies_and_pairs():
        for step in range(stages):
            pl.when(step < count * panels)(functools.partial(load, jnp.int32(step)))

        @pl.loop(0, count)
        def _tile(i):
            def step_through(panel, carry):
                of_outputs, of_errors, whole = carry
                step = i * panels + panel
                slot = slot_of(step)
                plgpu.barrier_wait(loaded.at[slot])
                across = errors.at[slot].transpose((1, 0))
                (of_outputs, of_errors), _ = products(
                    interpret,
                    ([(do.at[slot], across)], of_outputs),
                    ([(dv.at[slot], across)], of_errors),
                )
                for s in range(slices):
                    whole += jnp.sum(read(states.at[slot, s]) * read(dstates.at[slot, s]), axis=1)

                @pl.when(panel == 0)
                def _keys():
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(freed))
                    load_keys(i)

                # The slot of the panel before, which the others are likely to be done with.
                @pl.when((step > 0) & (step - 1 + stages < count * panels))
                def _refill():
                    plgpu.barrier_wait(used.at[slot_of(step - 1)])
                    load(step - 1 + stages)

                return of_outputs, of_errors, whole

            nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), WGMMA.reduce(1))
            carry = lax.fori_loop(0, panels, step_through, (zero, zero, nothing))
            of_outputs, of_errors, whole = carry
            last = slot_of(i * panels + (panels - 1))
            plgpu.barrier_wait(ready)
            beta = columns(gates.at[BETA])
            of_outputs = of_outputs * decay_tile(gates, segmented, strict=False) * scale
            of_errors = -of_errors * decay_tile(gates, segmented, strict=True)
            plgpu.barrier_wait(through)
            do[last] = (of_outputs * beta).astype(jnp.bfloat16)
            dv[last] = (of_errors * beta).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(paired)

            def similarity(of):
                pairs = [(of.at[s], k.at[s].transpose((1, 0))) for s in range(slices)]
                return products(interpret, (pairs, None))[0][0]

            # Both decays of a pair and the later token's beta are factors of the same terms.
            terms = of_outputs * similarity(q)
            terms += of_errors * similarity(k)
            tile, head, row, block = place(i)
            here = of_tile_ref.at[row, head, tile, block]
            here[_ROWS] = jnp.sum(terms * beta, axis=1)
            here[_COLUMNS] = jnp.sum(terms, axis=0)
            here[_WHOLE] = whole

    @pl.when(mine < slices)
    def _key_columns():
        @pl.loop(0, count)
        def _tile(i):
            def step_through(panel, carry):
                step = i * panels + panel
                slot = slot_of(step)
                plgpu.barrier_wait(loaded.at[slot])
                state, dstate = states.at[slot, mine], dstates.at[slot, mine]
                pairs = ((do, state), (errors, dstate), (dv, state))
                terms = [([(a.at[slot], b)], acc) for (a, b), acc in zip(pairs, carry, strict=True)]
                carry, _ = products(interpret, *terms)

                @pl.when((panel < panels - 1) & (step + stages < count * panels))
                def _release():
                    plgpu.barrier_arrive(used.at[slot])

                return tuple(carry)

            dq, dk_out, dk_in = lax.fori_loop(0, panels, step_through, (zero,) * 3)
            plgpu.barrier_arrive(through)
            last_step = i * panels + (panels - 1)
            last = slot_of(last_step)
            plgpu.barrier_wait(ready)
            my_q, my_k = q.at[mine], k.at[mine]
            from_queries = jnp.sum(dq * read(my_q), axis=1) * scale
            parts[mine, 0] = from_queries - jnp.sum(dk_in * read(my_k), axis=1)
            parts[mine, 1] = jnp.sum(dk_out * read(my_k), axis=1)
            carry_in = rows(gates.at[CARRY_IN])
            dq = dq * (carry_in * scale)
            dk = rows(gates.at[CARRY_OUT]) * dk_out - carry_in * dk_in
            plgpu.barrier_wait(paired)
            # G diag(beta) and F diag(beta) are where the last panels were.
            g, f = do.at[last], dv.at[last]
            g_t, f_t = g.transpose((1, 0)), f.transpose((1, 0))
            of_keys = [(f, my_k), (g_t, my_q), (f_t, my_k)]
            (dq, dk), _ = products(interpret, ([(g, my_k)], dq), (of_keys, dk))
            pl.when(i + 1 < count)(lambda: plgpu.barrier_arrive(freed))
            # Nobody but this warpgroup read these states, and it is done: they carry the results.
            dq_out, dk_out = states.at[last, mine], dstates.at[last, mine]
            dq_out[...] = dq.astype(jnp.bfloat16)
            dk_out[...] = dk.astype(jnp.bfloat16)
            plgpu.commit_smem()
            tile, head, row, block = place(i)
            for out, ref in ((dq_out, dq_ref), (dk_out, dk_ref)):
                target = ref.at[row, tokens_of(tile), head, key_columns(block, mine)]
                plgpu.copy_smem_to_gmem(out, target)
            target = parts_ref.at[row, head, tile, block * slices + mine]
            plgpu.copy_smem_to_gmem(parts.at[mine], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(last_step + stages < count * panels)
            def _release():
                plgpu.barrier_arrive(used.at[last])

        plgpu.wait_smem_to_gmem(0)


def tile_gradients(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    do: Float[Array, "B T H V"],
    dv: Float[Array, "B T H V"],
    errors: list[Float[Array, "B M H K"]],
    states: Float[Array, "B H N V K"],
    dstates: Float[Array, "B H N V K"],
    gates: Float[Array, "B H N R C"],
    *,
    scale: float,
    programs: int = MULTIPROCESSORS,
    interpret=None,
) -> tuple[Array, Array, Array]:
    """dq and dk [B, M, H, K] per value head (M = N C tokens), and the gates' gradient.

    dq and dk take the memory of the first two of the `errors`, as `pallas_gpu_replay` has them,
    unless K takes two blocks: the second may read what the first has written over. `programs`
    blocks take the tiles in turn.
    """
    batch, _, heads, value_width = do.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    slices = 2 if width == 256 else width // TILE  # of which registers hold three, with G and F
    blocks = width // TILE // slices
    outputs = 2 if blocks > 1 else 0
    stages = 3 if slices <= 2 else 2  # as shared memory allows
    programs = min(programs, tiles * heads * batch * blocks)
    run = plgpu.kernel(
        functools.partial(
            _kernel,
            buffers=len(errors),
            outputs=outputs,
            programs=programs,
            group=heads // k.shape[2],
            slices=slices,
            panels=value_width // TILE,
            scale=scale,
            segmented=vectors == 5,
            interpret=interpret is not None,
        ),
        out_type=(
            *[jax.ShapeDtypeStruct(errors[0].shape, errors[0].dtype)] * outputs,
            jax.ShapeDtypeStruct((batch, heads, tiles, width // TILE, 2, TILE), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, tiles, blocks, 3, TILE), jnp.float32),
        ),
        scratch_types=[
            swizzled(slices, TILE, TILE),
            swizzled(slices, TILE, TILE),
            plgpu.SMEM((vectors, TILE), jnp.float32),
            *[swizzled(stages, TILE, TILE)] * 3,
            *[swizzled(stages, slices, TILE, TILE)] * 2,
            plgpu.SMEM((slices, 2, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + 2 * slices),
            plgpu.Barrier(num_arrivals=3 + 2 * slices, num_barriers=stages),
            plgpu.Barrier(num_arrivals=slices, num_barriers=stages),
            plgpu.Barrier(num_arrivals=slices),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=slices),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=slices + 1,
        thread_name="slice",
        kernel_name="delta_rule_gradients",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    given = (q, k, do, dv, states, dstates, gates)
    if outputs:
        dq, dk, parts, of_tile = run(*given, *errors)
    else:
        written_over = [jax.new_ref(x) for x in errors[:2]]
        parts, of_tile = run(*given, *written_over, *errors[2:])
        dq, dk = map(jax.freeze, written_over)
    dcarry_in, dcarry_out = jnp.moveaxis(parts.sum(axis=3), 3, 0)
    over_rows, dbeta, whole = jnp.moveaxis(of_tile.sum(axis=3), 3, 0)
    ddecay = math.log(2) * (over_rows - gates[..., BETA, :] * dbeta)
    dcarry_in = dcarry_in.at[..., -1].add(whole.sum(-1))  # of the last token: it decays the state
    dgates = [ddecay, dbeta, dcarry_in, dcarry_out]
    if vectors == 5:
        dgates.append(jnp.zeros_like(ddecay))
    return dq, dk, jnp.stack(dgates, axis=3)
