"""Hopper kernel: the unit-triangular inverse of every tile of the delta rule, all in parallel.

A = (I + stril((K K^T o D) diag(beta)))^-1, D_ij = exp(c_i - c_j) (Yang et al. 2024, the WY form of
gated delta networks, with beta on the columns: `pallas_gpu_scan`). Blockwise doubling: with X the
inverse of the diagonal blocks of size b and L the strictly lower part, X <- X - (X L o coupling) X
inverts the blocks of size 2b. Every intermediate is an inverse of a diagonal block, so nothing
grows beyond the answer itself, which powers of L would. The products run in fp16 with fp32
accumulation (11 bits of mantissa, as TF32; entries are bounded by beta for keys of unit norm), X
stays in fp32.
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
    READ_ONLY_SMEM,
    TILE,
    WGMMA,
    columns,
    decay_tile,
    product,
    swizzled,
)


def _kernel(
    k_ref, gates_ref, a_ref, k, gates, lower, even, odd, a, loaded, *, group, segmented, interpret
):
    tile, head, row = (lax.axis_index(name) for name in ("tile", "head", "row"))
    key_head = lax.div(head, jnp.int32(group))
    tokens = pl.ds(tile * TILE, TILE)
    plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], k, loaded)
    plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates, loaded)
    plgpu.barrier_wait(loaded)

    similarity = product(interpret, k, k.transpose((1, 0))) * columns(gates.at[BETA])
    l = similarity * decay_tile(gates, segmented, strict=True)
    lower[...] = l.astype(jnp.float16)
    i = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA)
    j = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=WGMMA)
    differing = i ^ j  # its highest bit is the level at which rows i and j meet
    x = jnp.where(differing == 0, 1.0, jnp.where(differing == 1, -l, 0.0))
    for level in range(1, 6):
        half = x.astype(jnp.float16)
        right = odd if level % 2 else even  # two buffers: slower warps may still read the last one
        right[...] = half
        plgpu.commit_smem()
        coupling = jnp.where((differing >> level) == 1, -product(interpret, half, lower), 0.0)
        x = product(interpret, coupling.astype(jnp.float16), right, x)
    a[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(a, a_ref.at[row, head, tile])
    plgpu.wait_smem_to_gmem(0)


def tile_inverses(
    k: Float[Array, "B T G K"],
    gates: Float[Array, "B H N R C"],
    *,
    interpret=None,
) -> Float[Array, "B H N C C"]:
    """A of every tile, head and row; G key heads serve H value heads in groups."""
    batch, heads, tiles, vectors, _ = gates.shape
    width = k.shape[-1]
    return plgpu.kernel(
        functools.partial(
            _kernel,
            group=heads // k.shape[2],
            segmented=vectors == 5,
            interpret=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((batch, heads, tiles, TILE, TILE), jnp.bfloat16),
        scratch_types=[
            swizzled(TILE, width),
            plgpu.SMEM((vectors, TILE), jnp.float32),
            swizzled(TILE, TILE, dtype=jnp.float16),
            swizzled(TILE, TILE, dtype=jnp.float16),
            swizzled(TILE, TILE, dtype=jnp.float16),
            swizzled(TILE, TILE),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(tiles, heads, batch),
        grid_names=("tile", "head", "row"),
        kernel_name="delta_rule_tile_inverses",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(k, gates)
