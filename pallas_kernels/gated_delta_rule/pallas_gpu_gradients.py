"""Hopper kernel: the parallel half of the backward pass, one block per tile, head and row.

With S entering, dS leaving the tile, Vn and Y (`pallas_gpu_reverse`), e = CARRY_IN, w = CARRY_OUT:
  dP = s tril(dO Vn^T) o D ;  E = -stril(Y Vn^T) o D          (E / D is the gradient of L)
  dQ = s e o (dO S^T) + dP K
  dK = w o (Vn dS^T) - beta e o (Y S^T) + dP^T Q + beta o (E K) + (beta o E)^T K
  dV = beta o Y
Gates get gradients as the rows they are packed in, so that `pack_gates` differentiates itself.
A warpgroup owns 64 key columns; terms linear in them are summed over warpgroups by the caller.
"""

import functools
import math

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
    DECAY,
    TILE,
    WGMMA,
    decay_tile,
    product,
    rows,
    swizzled,
)

_FROM_STATES = 4  # the row of the partial sums after the four gates'
_PARTS = 5


def _kernel(
    q_ref, k_ref, v_ref, do_ref, written_ref, y_ref, states_ref, dstates_ref, gates_ref,
    dq_ref, dk_ref, dv_ref, parts_ref,
    q, k, gates, v, do, written, y, states, dstates, attention, erased, parts,
    ready, loaded, consumed,
    *, group, stages, slices, panels, scale, segmented, interpret,
):  # fmt: skip
    tile, head, row = (lax.axis_index(name) for name in ("tile", "head", "row"))
    key_head = lax.div(head, jnp.int32(group))
    mine = lax.axis_index("slice")
    tokens = pl.ds(tile * TILE, TILE)

    def load(panel, slot):
        columns = pl.ds(panel * TILE, TILE)
        for ref, to in ((v_ref, v), (do_ref, do), (written_ref, written), (y_ref, y)):
            source = ref.at[row, tokens, head, columns]
            plgpu.copy_gmem_to_smem(source, to.at[slot], loaded.at[slot])
        for ref, to in ((states_ref, states), (dstates_ref, dstates)):
            for s in range(slices):
                source = ref.at[row, head, tile, columns, pl.ds(s * TILE, TILE)]
                plgpu.copy_gmem_to_smem(source, to.at[slot, s], loaded.at[slot])

    @pl.when(mine == 0)
    def _first_loads():
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates, ready)
        for s in range(slices):
            columns = pl.ds(s * TILE, TILE)
            plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, key_head, columns], q.at[s], ready)
            plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head, columns], k.at[s], ready)
        for panel in range(min(stages, panels)):
            load(panel, panel)

    plgpu.barrier_wait(ready)
    beta = rows(gates.at[BETA])
    is_first = (mine == 0).astype(jnp.float32)

    def read(ref):
        return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

    def step(panel, carry):
        dq, dk_out, dk_in, dp, e, from_values, from_states = carry
        slot = lax.rem(panel, jnp.int32(stages))
        plgpu.barrier_wait(loaded.at[slot])
        state, dstate = states.at[slot, mine], dstates.at[slot, mine]
        written_here = written.at[slot].transpose((1, 0))
        dq = product(interpret, do.at[slot], state, dq)
        dk_out = product(interpret, written.at[slot], dstate, dk_out)
        dk_in = product(interpret, y.at[slot], state, dk_in)
        dp = product(interpret, do.at[slot], written_here, dp)
        e = product(interpret, y.at[slot], written_here, e)
        y_here = read(y.at[slot])
        from_values += jnp.sum(y_here * read(v.at[slot]), axis=1) * is_first
        from_states += jnp.sum(read(state) * read(dstate), axis=1)

        @pl.when(mine == 0)
        def _dv():
            target = dv_ref.at[row, tokens, head, pl.ds(panel * TILE, TILE)]
            target[...] = (beta * y_here).astype(jnp.bfloat16)

        @pl.when(panel + stages < panels)
        def _release():
            plgpu.barrier_arrive(consumed.at[slot])

            @pl.when(mine == 0)
            def _refill():
                plgpu.barrier_wait(consumed.at[slot])
                load(panel + stages, slot)

        return dq, dk_out, dk_in, dp, e, from_values, from_states

    zero = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), WGMMA)
    nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    carry = (zero,) * 5 + (nothing,) * 2
    dq, dk_out, dk_in, dp, e, from_values, from_states = lax.fori_loop(0, panels, step, carry)

    dp = dp * decay_tile(gates, segmented, strict=False) * scale
    e = -e * decay_tile(gates, segmented, strict=True)
    my_q, my_k = q.at[mine], k.at[mine]
    dp_half, e_half, weighted = (x.astype(jnp.bfloat16) for x in (dp, e, beta * e))
    attention[mine] = dp_half
    erased[mine] = weighted
    plgpu.commit_smem()
    carry_in, carry_out = rows(gates.at[CARRY_IN]), rows(gates.at[CARRY_OUT])
    row_of = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1))
    keys, queries = read(my_k), read(my_q)
    read_by_keys = jnp.sum(dk_in * keys, axis=1)
    beta_vector = row_of(gates.at[BETA])
    parts[mine, CARRY_IN] = jnp.sum(dq * queries, axis=1) * scale - beta_vector * read_by_keys
    parts[mine, CARRY_OUT] = jnp.sum(dk_out * keys, axis=1)
    parts[mine, _FROM_STATES] = from_states
    dq = dq * (carry_in * scale)
    dk = carry_out * dk_out - beta * carry_in * dk_in

    # Z = beta_i E_ij k_i.k_j + dP_ij q_i.k_j is never formed: its sums over columns and over rows
    # are products with keys and queries of what dq and dk need anyhow.
    ek = product(interpret, e_half, my_k)
    erased_from_keys = jnp.sum(ek * keys, axis=1)
    dk += beta * ek
    dq_tile = product(interpret, dp_half, my_k)
    from_columns = jnp.sum(dq_tile * queries, axis=1) + beta_vector * erased_from_keys
    dq += dq_tile
    dk_tile = product(interpret, attention.at[mine].transpose((1, 0)), my_q)
    dk_tile = product(interpret, erased.at[mine].transpose((1, 0)), my_k, dk_tile)
    parts[mine, DECAY] = math.log(2) * (from_columns - jnp.sum(dk_tile * keys, axis=1))
    parts[mine, BETA] = from_values - row_of(gates.at[CARRY_IN]) * read_by_keys + erased_from_keys
    dk += dk_tile

    # The products that read them are done: these tiles now carry the results out.
    attention[mine] = dq.astype(jnp.bfloat16)
    erased[mine] = dk.astype(jnp.bfloat16)
    plgpu.commit_smem()
    columns = pl.ds(mine * TILE, TILE)
    plgpu.copy_smem_to_gmem(attention.at[mine], dq_ref.at[row, tokens, head, columns])
    plgpu.copy_smem_to_gmem(erased.at[mine], dk_ref.at[row, tokens, head, columns])
    plgpu.copy_smem_to_gmem(parts.at[mine], parts_ref.at[row, head, tile, mine])
    plgpu.wait_smem_to_gmem(0)


def tile_gradients(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    do: Float[Array, "B T H V"],
    written: Float[Array, "B T H V"],
    y: Float[Array, "B T H V"],
    states: Float[Array, "B H N V K"],
    dstates: Float[Array, "B H N V K"],
    gates: Float[Array, "B H N R C"],
    *,
    scale: float,
    interpret=None,
) -> tuple[Array, Array, Array, Array]:
    """dq, dk [B, N C, H, K] per value head, dv [B, N C, H, V], and the gates' gradient."""
    batch, _, heads, value_width = v.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    slices = width // TILE
    stages = 2 if width <= 128 else 1
    padded = (batch, tiles * TILE, heads)
    *gradients, parts = plgpu.kernel(
        functools.partial(
            _kernel,
            group=heads // k.shape[2],
            stages=stages,
            slices=slices,
            panels=value_width // TILE,
            scale=scale,
            segmented=vectors == 5,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((*padded, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((*padded, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((*padded, value_width), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads, tiles, slices, _PARTS, TILE), jnp.float32),
        ),
        scratch_types=[
            swizzled(slices, TILE, TILE),
            swizzled(slices, TILE, TILE),
            plgpu.SMEM((vectors, TILE), jnp.float32),
            *[swizzled(stages, TILE, TILE)] * 4,
            *[swizzled(stages, slices, TILE, TILE)] * 2,
            *[swizzled(slices, TILE, TILE)] * 2,
            plgpu.SMEM((slices, _PARTS, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + 2 * slices),
            plgpu.Barrier(num_arrivals=4 + 2 * slices, num_barriers=stages),
            plgpu.Barrier(num_arrivals=slices, num_barriers=stages),
        ],
        grid=(tiles, heads, batch),
        grid_names=("tile", "head", "row"),
        num_threads=slices,
        thread_name="slice",
        kernel_name="delta_rule_gradients",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, k, v, do, written, y, states, dstates, gates)
    parts = parts.sum(axis=3)
    dgates = parts[:, :, :, :4]
    whole = parts[:, :, :, _FROM_STATES].sum(axis=-1)  # CARRY_IN of the last token decays the state
    dgates = dgates.at[:, :, :, CARRY_IN, -1].add(whole)
    if vectors == 5:
        dgates = jnp.concatenate([dgates, jnp.zeros_like(dgates[:, :, :, :1])], axis=3)
    return *gradients, dgates
