"""Hopper kernels: the decays of a 64-token tile by levels, and what all tiles need of them.

Levels are those of `pallas_tpu_levels`: tokens i > j meet at the highest bit in which they differ,
in the two halves of a block, and the decay between them is into_i out_j. Here the logarithms of the
factors are sums: products of a matrix of ones and zeros with g, which is two bf16 parts, exact to
16 bits and, as all terms have one sign, never the small difference of large numbers.

`tile_factors` runs on all tiles at once and leaves what the passes over tiles need of q, k and g.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.pallas_gpu_hopper import (
    WGMMA,
    over_columns,
    over_rows,
    product,
    products,
    swizzled,
)

TILE = 64  # tokens of a tile, and key or value columns of a warpgroup: the M of a wgmma instruction
LEVELS = 6
LOG2E = 1.4426950408889634
# A document starts where g is at most this; all other decays are kept above it. A power of two,
# so that its second part is 0.
RESET = -(2.0**40)


def positions():
    """i and j of a [C, C] tile."""
    shape = (TILE, TILE)
    return tuple(plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1))


def meeting(level: int):
    """The pairs of a level, in either order, [C, C]."""
    i, j = positions()
    return ((i ^ j) >> level) == 1


def right_half(level: int):
    """Whether row i is in the right half of its block of the level, [C, any 64 columns]."""
    i, _ = positions()
    return ((i >> level) & 1) == 1


def decaying(level: int, exclusive: bool):
    """Of row i the tokens t that are decayed on the way to i from the start of its half (right
    halves), or from i to the end of it (left halves): a matrix of zeros and ones, [C, C]."""
    i, t = positions()
    seen = jnp.where(((i >> level) & 1) == 1, before(exclusive, i, t), t > i)
    return ones_where(seen & (((i ^ t) >> level) == 0))


def decayed_for(level: int, exclusive: bool):
    """`decaying` transposed: of row t the tokens i on whose way it is decayed."""
    t, i = positions()
    seen = jnp.where(((i >> level) & 1) == 1, before(exclusive, i, t), t > i)
    return ones_where(seen & (((i ^ t) >> level) == 0))


def before(exclusive: bool, i, t):
    """Whether t is decayed before i is read."""
    return t < i if exclusive else t <= i


def ones_where(seen):
    return jnp.where(seen, 1.0, 0.0).astype(jnp.bfloat16)


def parts(x):
    """An fp32 tile as two bf16 ones that sum to 16 bits of it."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def sums(interpret, ones, halves, acc=None):
    """acc + ones @ x, with the two parts of x in shared memory."""
    (found,), _ = products(interpret, ([(ones, half) for half in halves], acc))
    return found


def reset_free(exclusive: bool, reads, halves, factor):
    """`factor` of a tile's 64 columns; a document's first token reads nothing from before it,
    which where its own decay is no part of the factor must be said."""
    if not exclusive:
        return factor
    g = plgpu.load(halves[0], layout=WGMMA).astype(jnp.float32)
    return jnp.where(reads & (g <= RESET), 0.0, factor)


def level_factor(interpret, level, exclusive: bool, halves):
    """Whether rows are in right halves, and `into` of those, `out` of the others."""
    right = right_half(level)
    factor = jnp.exp2(sums(interpret, decaying(level, exclusive), halves))
    return right, reset_free(exclusive, right, halves, factor)


def into_tile(interpret, exclusive: bool, halves):
    """From the state that enters the tile to each of its tokens."""
    i, t = positions()
    factor = jnp.exp2(sums(interpret, ones_where(before(exclusive, i, t)), halves))
    return reset_free(exclusive, i >= 0, halves, factor)


def out_of_tile(interpret, halves):
    """From each token to the state that leaves the tile."""
    i, t = positions()
    return jnp.exp2(sums(interpret, ones_where(t > i), halves))


def _kernel(
    q_ref, k_ref, g_ref, *refs, slices, bonus, exclusive, scale, interpret,
):  # fmt: skip
    weight_ref, refs = (refs[0], refs[1:]) if bonus else (None, refs)
    attention_ref, reading_ref, writing_ref, through_ref, q, k, *halves, x, a, loaded = refs
    tile, head, row = (lax.axis_index(name) for name in ("tile", "head", "row"))
    tokens = pl.ds(tile * TILE, TILE)
    for s in range(slices):
        columns = pl.ds(s * TILE, TILE)
        plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, head, columns], q.at[s], loaded)
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, head, columns], k.at[s], loaded)
    plgpu.barrier_wait(loaded)

    def read(ref):
        return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

    i, j = positions()
    attention = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), WGMMA)
    own = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), WGMMA.reduce(1))
    for s in range(slices):
        columns = pl.ds(s * TILE, TILE)
        g = plgpu.load(g_ref.at[row, tokens, head, columns], layout=WGMMA, optimized=False) * LOG2E
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the slice before, from x
        for ref, half in zip(halves, parts(g), strict=True):
            ref[...] = half
        through_ref.at[row, head, tile, columns][...] = jnp.exp2(jnp.sum(g, axis=0))
        plgpu.commit_smem()

        # A loop, so that the matrices of ones are made in each level and not kept from slice to
        # slice, for which there are no registers.
        def of_level(level, attention, s=s):
            right, factor = level_factor(interpret, level, exclusive, halves)
            operand = jnp.where(right, read(q.at[s]), read(k.at[s])) * factor
            x[0] = operand.astype(jnp.bfloat16)
            plgpu.commit_smem()
            scores = product(interpret, x.at[0], x.at[0].transpose((1, 0)))
            return attention + jnp.where(meeting(level) & (i > j), scores, 0.0)

        attention = lax.fori_loop(0, LEVELS, of_level, attention)
        queries, keys = read(q.at[s]), read(k.at[s])
        weighted = queries * keys
        if weight_ref is not None:
            weighted *= over_columns(weight_ref.at[head, columns], (TILE, TILE))
        own += jnp.sum(weighted, axis=1)
        into = into_tile(interpret, exclusive, halves)
        x[0] = (scale * queries * into).astype(jnp.bfloat16)
        x[1] = (keys * out_of_tile(interpret, halves)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x.at[0], reading_ref.at[row, tokens, head, columns])
        plgpu.copy_smem_to_gmem(x.at[1], writing_ref.at[row, tokens, head, columns])
    attention = jnp.where(i == j, over_rows(own, (TILE, TILE)), attention)
    a[...] = (scale * attention).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(a, attention_ref.at[row, head, tile])
    plgpu.wait_smem_to_gmem(0)


def tile_factors(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    g: Float[Array, "B T H K"],
    bonus: Float[Array, "H K"] | None,
    *,
    scale: float,
    interpret=None,
) -> tuple[Array, Array, Array, Array]:
    """Of every tile the attention inside it [B, H, N, C, C] and what passes its ends: queries that
    read the state entering it, keys that write the state leaving it, both [B, T, H, K] and bf16,
    and the decay through it [B, H, N, K] fp32. The scale is in the first two."""
    batch, length, heads, width = q.shape
    tiles, slices = length // TILE, width // TILE
    arrays = (q, k, g) if bonus is None else (q, k, g, bonus)
    return plgpu.kernel(
        functools.partial(
            _kernel,
            slices=slices,
            bonus=bonus is not None,
            exclusive=bonus is not None,
            scale=scale,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, tiles, TILE, TILE), jnp.bfloat16),
            jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(k.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads, tiles, width), jnp.float32),
        ),
        scratch_types=[
            swizzled(slices, TILE, TILE),
            swizzled(slices, TILE, TILE),
            swizzled(TILE, TILE),
            swizzled(TILE, TILE),
            swizzled(2, TILE, TILE),
            swizzled(TILE, TILE),
            plgpu.Barrier(num_arrivals=2 * slices),
        ],
        grid=(tiles, heads, batch),
        grid_names=("tile", "head", "row"),
        kernel_name="linear_attention_factors",
        # Not READ_ONLY_SMEM: products read x and the halves of g, which are written again.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*arrays)
