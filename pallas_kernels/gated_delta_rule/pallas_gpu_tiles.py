"""What the Hopper kernels share: the tile, shared-memory layouts, and the per-token gates.

Notation is the package's: C tokens of a tile, K and V head widths, N tiles of a row.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.pallas_gpu_hopper import READ_ONLY_SMEM as READ_ONLY_SMEM
from pallas_kernels.pallas_gpu_hopper import WGMMA, over_columns, over_rows
from pallas_kernels.pallas_gpu_hopper import product as product
from pallas_kernels.pallas_gpu_hopper import swizzled as swizzled

TILE = 64  # tokens of a kernel tile: the M of one wgmma instruction
LOG2E = 1.4426950408889634

# Rows of the packed gates, one fp32 vector over the tokens of a tile each.
DECAY, BETA, CARRY_IN, CARRY_OUT, SEGMENT = range(5)


def rows(vector):
    """A shared-memory vector over the rows of a [C, C] tile: out_ij = vector_i."""
    loaded = plgpu.load(vector, layout=WGMMA.reduce(1))
    return over_rows(loaded, (TILE, TILE))


def columns(vector):
    """A shared-memory vector over the columns of a [C, C] tile: out_ij = vector_j."""
    return over_columns(vector, (TILE, TILE))


def left_operand(state, copy=None):
    """S^T, rounded to bf16, as the left operand of a product: in registers, or in `copy`.

    Where K is `wide` it must be in `copy`, shared memory [64, K], where it stays.
    """
    half = state.astype(jnp.bfloat16)
    if copy is None:
        return half
    plgpu.commit_smem()  # every warp's products have read what was there
    copy[...] = half
    plgpu.commit_smem()
    return copy


def wide(width: int) -> bool:
    """Whether registers hold the state of 64 value columns in fp32 only, not in bf16 as well."""
    return width > 128


def decay_tile(gates, segmented: bool, strict: bool):
    """D_ij = exp(c_i - c_j) for i >= j (i > j when strict) of one document, else 0; [C, C]."""
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=WGMMA)
    seen = row > column if strict else row >= column
    if segmented:
        seen = seen & (rows(gates.at[SEGMENT]) == columns(gates.at[SEGMENT]))
    # The unseen half is masked in the exponent: its differences are positive and may overflow.
    exponent = jnp.where(seen, rows(gates.at[DECAY]) - columns(gates.at[DECAY]), -jnp.inf)
    return jnp.exp2(exponent)


def pack_gates(
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B H N R C"]:
    """Per-token factors of the chunkwise rule, one row each (R = 4, or 5 with segments).

    DECAY: c log2(e), the inclusive cumulative sum of g inside the tile. BETA: beta.
    CARRY_IN: e^c where the incoming state still reaches the token, else 0.
    CARRY_OUT: m beta e^(c_last - c) where the token's write survives the tile, else 0.
    """
    batch, length, heads = g.shape
    tiles = -(-length // TILE)
    pad = tiles * TILE - length

    def by_tile(x):
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), (0, 0)))
        return x.reshape(batch, tiles, TILE, heads).transpose(0, 3, 1, 2)

    upper = jnp.triu(jnp.ones((TILE, TILE), jnp.float32)) * LOG2E
    decay = jnp.einsum("bhnc,cd->bhnd", by_tile(g), upper, precision=jax.lax.Precision.HIGHEST)
    carry_in = jnp.exp2(decay)
    strength = by_tile(beta)
    carry_out = strength * jnp.exp2(decay[..., -1:] - decay)
    if write_mask is not None:
        carry_out = carry_out * write_mask.astype(jnp.float32).transpose(0, 2, 1)[..., None]
    vectors = [decay, strength, carry_in, carry_out]
    if segment_ids is not None:
        ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
        starts = jnp.cumsum(ids != jnp.pad(ids, ((0, 0), (1, 0)), mode="edge")[:, :-1], axis=1)
        document = starts.reshape(batch, 1, tiles, TILE)
        incoming = jnp.pad(document[..., -1], ((0, 0), (0, 0), (1, 0)))[..., :-1, None]
        vectors[CARRY_IN] = jnp.where(document == incoming, carry_in, 0.0)
        vectors[CARRY_OUT] = jnp.where(document == document[..., -1:], carry_out, 0.0)
        # Documents are numbered from the tile's first, so that fp32 counts them exactly.
        local = (document - document[..., :1]).astype(jnp.float32)
        vectors.append(jnp.broadcast_to(local, decay.shape))
    return jnp.stack(vectors, axis=3)
