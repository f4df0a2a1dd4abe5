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
in the key columns are summed over warpgroups by the caller.
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
_STAGES = 2


def _kernel(*refs, buffers, outputs, group, slices, panels, scale, segmented, interpret):
    q_ref, k_ref, do_ref, dv_ref, states_ref, dstates_ref, gates_ref, *refs = refs
    error_refs, refs = refs[:buffers], refs[buffers:]
    dq_ref, dk_ref = refs[:2] if outputs else error_refs[:2]
    parts_ref, of_tile_ref, *refs = refs[outputs:]
    q, k, gates, do, errors, dv, states, dstates, parts, ready, loaded, used, paired = refs
    tile, head, row, block = (lax.axis_index(name) for name in ("tile", "head", "row", "block"))
    key_head = lax.div(head, jnp.int32(group))
    mine = lax.axis_index("slice")
    # Once all panels are through, G diag(beta) and F diag(beta) take their place.
    first = 0 * mine  # `run_state`, which accumulates products, captures no constant index
    g, f = do.at[first], dv.at[first]
    tokens = pl.ds(tile * TILE, TILE)

    def key_columns(s):
        return pl.ds((block * slices + s) * TILE, TILE)

    def load(panel, slot):
        value_columns = pl.ds(panel * TILE, TILE)
        for ref, to in ((do_ref, do), (dv_ref, dv)):
            source = ref.at[row, tokens, head, value_columns]
            plgpu.copy_gmem_to_smem(source, to.at[slot], loaded.at[slot])
        which, columns_of = buffer_of(jnp.int32(panel * TILE), dq_ref.shape[-1])
        for buffer, ref in enumerate(error_refs):

            @pl.when(which == buffer)
            def _errors(ref=ref):
                source = ref.at[row, tokens, head, columns_of]
                plgpu.copy_gmem_to_smem(source, errors.at[slot], loaded.at[slot])

        for ref, to in ((states_ref, states), (dstates_ref, dstates)):
            for s in range(slices):
                source = ref.at[row, head, tile, value_columns, key_columns(s)]
                plgpu.copy_gmem_to_smem(source, to.at[slot, s], loaded.at[slot])

    def read(ref):
        return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

    zero = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), WGMMA)

    @pl.when(mine == slices)
    def _copies_and_pairs():
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates, ready)
        for s in range(slices):
            for ref, to in ((q_ref, q), (k_ref, k)):
                source = ref.at[row, tokens, key_head, key_columns(s)]
                plgpu.copy_gmem_to_smem(source, to.at[s], ready)
        for panel in range(min(_STAGES, panels)):
            load(panel, panel)

        def step(panel, carry):
            of_outputs, of_errors, whole = carry
            slot = lax.rem(panel, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            across = errors.at[slot].transpose((1, 0))
            (of_outputs, of_errors), _ = products(
                interpret,
                ([(do.at[slot], across)], of_outputs),
                ([(dv.at[slot], across)], of_errors),
            )
            for s in range(slices):
                whole += jnp.sum(read(states.at[slot, s]) * read(dstates.at[slot, s]), axis=1)

            @pl.when(panel + _STAGES < panels)
            def _refill():
                plgpu.barrier_wait(used.at[slot])
                load(panel + _STAGES, slot)

            return of_outputs, of_errors, whole

        nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), WGMMA.reduce(1))
        carry = lax.fori_loop(0, panels, step, (zero, zero, nothing))
        of_outputs, of_errors, whole = carry
        plgpu.barrier_wait(ready)
        for slot in range(min(_STAGES, panels)):
            plgpu.barrier_wait(used.at[slot])
        beta = columns(gates.at[BETA])
        of_outputs = of_outputs * decay_tile(gates, segmented, strict=False) * scale
        of_errors = -of_errors * decay_tile(gates, segmented, strict=True)
        g[...] = (of_outputs * beta).astype(jnp.bfloat16)
        f[...] = (of_errors * beta).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(paired)

        def similarity(of):
            pairs = [(of.at[s], k.at[s].transpose((1, 0))) for s in range(slices)]
            return products(interpret, (pairs, None))[0][0]

        # Both decays of a pair and the later token's beta are factors of the same terms.
        terms = of_outputs * similarity(q)
        terms += of_errors * similarity(k)
        here = of_tile_ref.at[row, head, tile, block]
        here[_ROWS] = jnp.sum(terms * beta, axis=1)
        here[_COLUMNS] = jnp.sum(terms, axis=0)
        here[_WHOLE] = whole

    @pl.when(mine < slices)
    def _key_columns():
        def step(panel, carry):
            slot = lax.rem(panel, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            state, dstate = states.at[slot, mine], dstates.at[slot, mine]
            pairs = ((do, state), (errors, dstate), (dv, state))
            terms = [([(a.at[slot], b)], acc) for (a, b), acc in zip(pairs, carry, strict=True)]
            carry, _ = products(interpret, *terms)
            plgpu.barrier_arrive(used.at[slot])
            return tuple(carry)

        dq, dk_out, dk_in = lax.fori_loop(0, panels, step, (zero,) * 3)
        plgpu.barrier_wait(ready)
        my_q, my_k = q.at[mine], k.at[mine]
        from_queries = jnp.sum(dq * read(my_q), axis=1) * scale
        parts[mine, 0] = from_queries - jnp.sum(dk_in * read(my_k), axis=1)
        parts[mine, 1] = jnp.sum(dk_out * read(my_k), axis=1)
        carry_in = rows(gates.at[CARRY_IN])
        dq = dq * (carry_in * scale)
        dk = rows(gates.at[CARRY_OUT]) * dk_out - carry_in * dk_in
        plgpu.barrier_wait(paired)
        g_t, f_t = g.transpose((1, 0)), f.transpose((1, 0))
        of_keys = [(f, my_k), (g_t, my_q), (f_t, my_k)]
        (dq, dk), _ = products(interpret, ([(g, my_k)], dq), (of_keys, dk))
        # Nobody but this warpgroup read these states, and it is done: they carry the results out.
        dq_out, dk_out = states.at[0, mine], dstates.at[0, mine]
        dq_out[...] = dq.astype(jnp.bfloat16)
        dk_out[...] = dk.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for out, ref in ((dq_out, dq_ref), (dk_out, dk_ref)):
            plgpu.copy_smem_to_gmem(out, ref.at[row, tokens, head, key_columns(mine)])
        target = parts_ref.at[row, head, tile, block * slices + mine]
        plgpu.copy_smem_to_gmem(parts.at[mine], target)
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
    interpret=None,
) -> tuple[Array, Array, Array]:
    """dq and dk [B, M, H, K] per value head (M = N C tokens), and the gates' gradient.

    dq and dk take the memory of the first two of the `errors`, as `pallas_gpu_replay` has them,
    unless K takes two blocks: the second may read what the first has written over.
    """
    batch, _, heads, value_width = do.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    slices = 2 if width == 256 else width // TILE  # of which registers hold three, with G and F
    blocks = width // TILE // slices
    outputs = 2 if blocks > 1 else 0
    run = plgpu.kernel(
        functools.partial(
            _kernel,
            buffers=len(errors),
            outputs=outputs,
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
            *[swizzled(_STAGES, TILE, TILE)] * 3,
            *[swizzled(_STAGES, slices, TILE, TILE)] * 2,
            plgpu.SMEM((slices, 2, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + 2 * slices),
            plgpu.Barrier(num_arrivals=3 + 2 * slices, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=slices, num_barriers=_STAGES),
            plgpu.Barrier(),
        ],
        grid=(tiles, heads, batch, blocks),
        grid_names=("tile", "head", "row", "block"),
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
