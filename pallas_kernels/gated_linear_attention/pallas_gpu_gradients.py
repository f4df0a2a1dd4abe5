"""Hopper kernel: the parallel half of the backward pass, one block per tile, head and row.

With S entering and dS leaving the tile, P = scale dO V^T and X the operand of a level, which is
into o q in right halves and out o k in left halves (`pallas_gpu_levels`):

    dX = (P + P^T where the level's pairs are) X
    dq += into o dX in right halves ;   dk += out o dX in left halves
    dg_t += sum over tokens i of t's half, on whose way t is decayed, of (X o dX)_i

and for the tile as a whole scale dO S^T and V dS^T are the gradients of into o q and out o k, and
all tokens get the decay through it times the sum over value columns of S o dS. The diagonal, which
nothing decays, adds to dq and dk only. A warpgroup owns 64 key columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_linear_attention.pallas_gpu_levels import (
    LEVELS,
    LOG2E,
    TILE,
    before,
    decayed_for,
    into_tile,
    level_factor,
    meeting,
    ones_where,
    out_of_tile,
    parts,
    positions,
    sums,
)
from pallas_kernels.pallas_gpu_hopper import (
    WGMMA,
    over_columns,
    over_rows,
    product,
    products,
    swizzled,
)


def _kernel(
    q_ref, k_ref, g_ref, v_ref, do_ref, attention_ref, writing_ref, states_ref, dstates_ref,
    through_ref, *refs,
    slices, panels, bonus, exclusive, scale, interpret,
):  # fmt: skip
    weight_ref, refs = (refs[0], refs[1:]) if bonus else (None, refs)
    dq_ref, dk_ref, dv_ref, dg_ref, *refs = refs
    v, do, a, w, states, dstates, x, pairs, *refs = refs
    halves, sums_of, (ready, loaded, consumed) = refs[:2], refs[2:4], refs[4:]
    tile, head, row = (lax.axis_index(name) for name in ("tile", "head", "row"))
    mine = lax.axis_index("slice")
    tokens, own_columns = pl.ds(tile * TILE, TILE), pl.ds(mine * TILE, TILE)

    def load(panel):
        columns = pl.ds(panel * TILE, TILE)
        plgpu.copy_gmem_to_smem(v_ref.at[row, tokens, head, columns], v, loaded)
        plgpu.copy_gmem_to_smem(do_ref.at[row, tokens, head, columns], do, loaded)
        for ref, to in ((states_ref, states), (dstates_ref, dstates)):
            for s in range(slices):
                source = ref.at[row, head, tile, columns, pl.ds(s * TILE, TILE)]
                plgpu.copy_gmem_to_smem(source, to.at[s], loaded)

    @pl.when(mine == 0)
    def _first_loads():
        plgpu.copy_gmem_to_smem(attention_ref.at[row, head, tile], a, ready)
        for s in range(slices):
            source = writing_ref.at[row, tokens, head, pl.ds(s * TILE, TILE)]
            plgpu.copy_gmem_to_smem(source, w.at[s], ready)
        load(0)

    def read(ref):
        here = ref.at[row, tokens, head, own_columns]
        return plgpu.load(here, layout=WGMMA, optimized=False).astype(jnp.float32)

    plgpu.barrier_wait(ready)

    def step(panel, carry):
        dpairs, dreading, dwriting, passed = carry
        plgpu.barrier_wait(loaded)
        dpairs = product(interpret, do, v.transpose((1, 0)), dpairs)
        dreading = product(interpret, do, states.at[mine], dreading)
        dwriting = product(interpret, v, dstates.at[mine], dwriting)
        state, dstate = (
            plgpu.load(y.at[mine], layout=WGMMA).astype(jnp.float32) for y in (states, dstates)
        )
        passed += state * dstate

        @pl.when(lax.rem(panel, jnp.int32(slices)) == mine)
        def _dv():
            attention = plgpu.load(a.transpose((1, 0)), layout=WGMMA)
            terms = [(attention, do)]
            terms += [(w.at[s], dstates.at[s].transpose((1, 0))) for s in range(slices)]
            (dv,), _ = products(interpret, (terms, None))
            target = dv_ref.at[row, tokens, head, pl.ds(panel * TILE, TILE)]
            target[...] = dv.astype(jnp.bfloat16)

        @pl.when(panel + 1 < panels)
        def _release():
            plgpu.barrier_arrive(consumed)

            @pl.when(mine == 0)
            def _refill():
                plgpu.barrier_wait(consumed)
                load(panel + 1)

        return dpairs, dreading, dwriting, passed

    zero = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), WGMMA)
    dpairs, dreading, dwriting, passed = lax.fori_loop(0, panels, step, (zero,) * 4)
    dreading *= scale

    i, j = positions()
    shape = (TILE, TILE)
    dpairs *= scale
    down = over_rows(jnp.sum(jnp.where(i == j, dpairs, 0.0), axis=1), shape)
    dpairs = dpairs.astype(jnp.bfloat16)
    pairs[mine] = dpairs
    plgpu.commit_smem()
    mirrored = plgpu.load(pairs.at[mine].transpose((1, 0)), layout=WGMMA)
    dpairs = jnp.where(i > j, dpairs, mirrored)

    my_halves, my_terms = ([ref.at[mine] for ref in pair] for pair in (halves, sums_of))
    g = read(g_ref) * LOG2E
    for ref, half in zip(my_halves, parts(g), strict=True):
        ref[...] = half
    plgpu.commit_smem()

    def add_sums(dg, ones, terms):
        """dg + ones @ terms."""
        for ref, half in zip(my_terms, parts(terms), strict=True):
            ref[...] = half
        plgpu.commit_smem()
        return sums(interpret, ones, my_terms, dg)

    # The tile as a whole comes first: its products are then free for the levels.
    decay = over_columns(through_ref.at[row, head, tile, own_columns], shape)
    dg = add_sums(zero, ones_where(i >= 0), decay * passed)
    dq = into_tile(interpret, exclusive, my_halves) * dreading
    dg = add_sums(dg, ones_where(before(exclusive, j, i)), read(q_ref) * dq)
    dk = out_of_tile(interpret, my_halves) * dwriting
    dg = add_sums(dg, ones_where(j < i), read(k_ref) * dk)
    if weight_ref is not None:
        down *= over_columns(weight_ref.at[head, own_columns], shape)
    dq += down * read(k_ref)
    dk += down * read(q_ref)

    def of_level(level, carry):
        dq, dk, dg = carry
        right, factor = level_factor(interpret, level, exclusive, my_halves)
        chosen = jnp.where(right, read(q_ref), read(k_ref))
        x[mine] = (chosen * factor).astype(jnp.bfloat16)
        plgpu.commit_smem()
        seen = jnp.where(meeting(level), dpairs, jnp.zeros_like(dpairs))
        back = factor * product(interpret, seen, x.at[mine])
        dq += jnp.where(right, back, 0.0)
        dk += jnp.where(right, 0.0, back)
        return dq, dk, add_sums(dg, decayed_for(level, exclusive), chosen * back)

    dq, dk, dg = lax.fori_loop(0, LEVELS, of_level, (dq, dk, dg))
    dg_ref.at[row, tokens, head, own_columns][...] = dg
    x[mine] = dq.astype(jnp.bfloat16)
    pairs[mine] = dk.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x.at[mine], dq_ref.at[row, tokens, head, own_columns])
    plgpu.copy_smem_to_gmem(pairs.at[mine], dk_ref.at[row, tokens, head, own_columns])
    plgpu.wait_smem_to_gmem(0)


def tile_gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    g: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    do: Float[Array, "B T H V"],
    attention: Float[Array, "B H N C C"],
    writing: Float[Array, "B T H K"],
    states: Float[Array, "B H N V K"],
    dstates: Float[Array, "B H N V K"],
    through: Float[Array, "B H N K"],
    bonus: Float[Array, "H K"] | None,
    *,
    scale: float,
    interpret=None,
) -> tuple[Array, Array, Array, Array]:
    """dq, dk, dv in bf16 and dg in fp32; T is a multiple of the tile."""
    batch, _, heads, value_width = v.shape
    tiles, width = through.shape[2:]
    slices = width // TILE
    given = (q, k, g, v, do, attention, writing, states, dstates, through)
    return plgpu.kernel(
        functools.partial(
            _kernel,
            slices=slices,
            panels=value_width // TILE,
            bonus=bonus is not None,
            exclusive=bonus is not None,
            scale=scale,
            interpret=interpret is not None,
        ),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, g)),
        scratch_types=[
            swizzled(TILE, TILE),
            swizzled(TILE, TILE),
            swizzled(TILE, TILE),
            swizzled(slices, TILE, TILE),
            swizzled(slices, TILE, TILE),
            swizzled(slices, TILE, TILE),
            *[swizzled(slices, TILE, TILE)] * 6,
            plgpu.Barrier(num_arrivals=1 + slices),
            plgpu.Barrier(num_arrivals=2 + 2 * slices),
            plgpu.Barrier(num_arrivals=slices),
        ],
        grid=(tiles, heads, batch),
        grid_names=("tile", "head", "row"),
        num_threads=slices,
        thread_name="slice",
        kernel_name="linear_attention_gradients",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*given, *(() if bonus is None else (bonus,)))
