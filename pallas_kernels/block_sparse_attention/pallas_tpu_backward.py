"""Backward kernels on TPU: dq by query tile; dk, dv and the bias gradient by key tile.

Both recompute p from lse (the formulas are in README.md). The second walks the transposed visits
and adds up in their order, one query head of the group after the other: the result is
deterministic, and no gradient is accumulated in HBM.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention.pallas_tpu_forward import (
    ByQuery,
    attend_over_keys,
    key_buffers,
    specs,
)
from pallas_kernels.block_sparse_attention.pallas_tpu_tiles import (
    IN_HBM,
    VMEM,
    Ref,
    Setup,
    block,
    carries_bias,
    column,
    dot,
    fold_batch,
    logits_and_slope,
    masked,
    queries,
    scalars,
    stream,
    visited,
)


class ByKey(NamedTuple):
    """What the kernel over key tiles knows of the mask; see `ByQuery`."""

    offset: Int[Array, "B 1 1"]
    rows: Int[Array, "B H N 1 4"]  # of `Visits`
    listed: Int[Array, "B H #N 1 E"]
    leaf: Int[Array, "B H 1 M"]
    far: Int[Array, "B H F N"]
    bias: Float[Array, "B R 1 N"] | None
    query_ids: Int[Array, "B M 1 q"] | None  # copied with their queries
    key_ids: Int[Array, "B N 1 s"] | None


class Rows(NamedTuple):
    """What the backward pass knows of each query."""

    q: Float[Array, "B H Tp K"]
    do: Float[Array, "B H Tp V"]
    stats: Float[Array, "B H M 2 q"]  # lse, inf where nothing is seen; dlse - do . o


def _dq_kernel(setup: Setup, mask: ByQuery, rows: Rows, k: Ref, v: Ref, dq: Ref, total: Ref, *rest):
    total[...] = jnp.zeros(total.shape, total.dtype)
    do = rows.do[0, 0]
    lse, shift = rows.stats[0, 0, 0, 0:1], rows.stats[0, 0, 0, 1:2]

    def add(logits, slope, keys, values, carry):
        da = jnp.exp(logits - lse) * (dot(values, do, (1, 1)) + shift)
        dx = setup.scale * (da if slope is None else da * slope)
        total[...] += dot(keys, dx.astype(keys.dtype), (0, 0))
        return carry

    attend_over_keys(setup, mask, rows.q[0, 0], k, v, rest, add, 0)
    dq[0, 0] = total[...].T.astype(dq.dtype)


def query_gradient(setup: Setup, mask: ByQuery, rows: Rows, k: Array, v: Array) -> Array:
    """dq [B, H, Tp, K]."""
    (H, Tp, K), V, tile = rows.q.shape[1:], v.shape[3], setup.tiling.query

    def call(mask, rows, k, v):
        by_query = Rows(
            q=block((1, 1, tile, K), lambda b, h, i: (b, h, i, 0)),
            do=block((1, 1, tile, V), lambda b, h, i: (b, h, i, 0)),
            stats=block((1, 1, 1, 2, tile), lambda b, h, i: (b, h, i, 0, 0)),
        )
        return pl.pallas_call(
            functools.partial(_dq_kernel, setup),
            grid=(rows.q.shape[0], H, Tp // tile),
            in_specs=[
                specs(mask),
                by_query,
                IN_HBM,
                IN_HBM,
            ],
            out_specs=by_query.q,
            out_shape=jax.ShapeDtypeStruct(rows.q.shape, rows.q.dtype),
            scratch_shapes=[VMEM((K, tile), jnp.float32), *key_buffers(setup, mask, k, v)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel")
            ),
            name="block_sparse_attention_dq",
        )(mask, rows, k, v)

    return fold_batch(call)(mask, rows, k, v)


def _dkv_kernel(
    setup: Setup, mask: ByKey, rows: Rows, k: Ref, v: Ref, dk: Ref, dv: Ref, dbias: Ref, *scratch
):
    dk_sum, dv_sum, dbias_sum, semaphores, q_buffer, do_buffer, stats_buffer, *ids = scratch
    b, g, n, member = (pl.program_id(axis) for axis in range(4))
    h = g * pl.num_programs(3) + member
    keys, values, tile = k[0, 0], v[0, 0], setup.tiling.query
    start, M = n * setup.tiling.key, mask.leaf.shape[3]
    per_step = q_buffer.shape[1]
    key_ids = mask.key_ids if mask.key_ids is None else column(mask.key_ids[0, 0])
    bias = None if mask.bias is None else mask.bias[0, 0, 0, n]
    count = visited(mask.rows, mask.listed, 0, M)[0]

    @pl.when(member == 0)
    def _():
        dk_sum[...] = jnp.zeros(dk_sum.shape, jnp.float32)
        dv_sum[...] = jnp.zeros(dv_sum.shape, jnp.float32)

    dbias_sum[...] = jnp.zeros(dbias_sum.shape, jnp.float32)

    def copies(entry, slot, t):
        _, i = visited(mask.rows, mask.listed, entry, M)
        tokens = pl.ds(pl.multiple_of(i * tile, tile), tile)
        yield rows.q.at[b, h, tokens], q_buffer.at[slot, t]
        yield rows.do.at[b, h, tokens], do_buffer.at[slot, t]
        yield rows.stats.at[b, h, i], stats_buffer.at[slot, t]
        if mask.query_ids is not None:
            yield mask.query_ids.at[b, i], ids[0].at[slot, t]

    def add(t, slot, i):
        q, do, query_ids = q_buffer[slot, t], do_buffer[slot, t], ids[0][slot, t] if ids else None
        lse, shift = stats_buffer[slot, t, 0:1], stats_buffer[slot, t, 1:2]
        leaf = mask.leaf[0, 0, 0, i]
        place = queries(setup, mask.offset[0, 0, 0], i, leaf, query_ids)
        far = mask.far[0, 0, leaf, n]
        logits, slope = logits_and_slope(setup, keys, q)
        p = jnp.exp(masked(place, logits, start, far, bias, key_ids) - lse)
        dv_sum[...] += dot(p.astype(do.dtype), do, (1, 0))
        da = p * (dot(values, do, (1, 1)) + shift)
        if bias is not None:
            carried = jnp.where(carries_bias(place, start, da.shape), da, 0)
            dbias_sum[...] += carried.sum(0, keepdims=True)
        dx = setup.scale * (da if slope is None else da * slope)
        dk_sum[...] += dot(dx.astype(q.dtype), q, (1, 0))

    def step(step, slot, carry):
        for t in range(per_step):
            entry = step * per_step + t

            @pl.when(entry < count)
            def _(t=t, entry=entry):
                add(t, slot, visited(mask.rows, mask.listed, entry, M)[1])

        return carry

    buffers = [q_buffer, do_buffer, stats_buffer, *ids]
    stream(count, per_step, copies, buffers, semaphores, step, 0)
    dbias[0, 0, 0] = dbias_sum[...]

    @pl.when(member == pl.num_programs(3) - 1)
    def _():
        dk[0, 0] = dk_sum[...].astype(dk.dtype)
        dv[0, 0] = dv_sum[...].astype(dv.dtype)


def key_gradients(
    setup: Setup, mask: ByKey, rows: Rows, k: Array, v: Array
) -> tuple[Array, Array, Float[Array, "B H N"]]:
    """(dk [B, G, Sp, K], dv [B, G, Sp, V], sum of da over the biased pairs of each key tile)."""
    (H, Tp, K), (G, Sp, V) = rows.q.shape[1:], v.shape[1:]
    query, key = setup.tiling
    r, N = H // G, Sp // key
    per_step = setup.per_step(query, Tp // query)

    def call(mask, rows, k, v):
        B, R = k.shape[0], 0 if mask.bias is None else mask.bias.shape[1]
        per_tile = mask.listed.shape[2] > 1
        by_head = lambda b, g, n, j: (b, g * r + j, 0, 0)  # noqa: E731
        mask_specs = ByKey(
            offset=scalars(mask.offset, lambda b, g, n, j: (b, 0, 0)),
            rows=scalars(mask.rows, lambda b, g, n, j: (b, g * r + j, n, 0, 0)),
            listed=scalars(
                mask.listed, lambda b, g, n, j: (b, g * r + j, n if per_tile else 0, 0, 0)
            ),
            leaf=scalars(mask.leaf, by_head),
            far=scalars(mask.far, by_head),
            bias=None
            if mask.bias is None
            else scalars(mask.bias, lambda b, g, n, j: (b, (g * r + j) * R // H, 0, 0)),
            query_ids=None if mask.query_ids is None else IN_HBM,
            key_ids=None
            if mask.key_ids is None
            else block((1, 1, 1, key), lambda b, g, n, j: (b, n, 0, 0)),
        )
        by_key = [block((1, 1, key, width), lambda b, g, n, j: (b, g, n, 0)) for width in (K, V)]
        return pl.pallas_call(
            functools.partial(_dkv_kernel, setup),
            grid=(B, G, N, r),
            in_specs=[mask_specs, Rows(IN_HBM, IN_HBM, IN_HBM), *by_key],
            out_specs=[
                *by_key,
                block((1, 1, 1, 1, query), lambda b, g, n, j: (b, g * r + j, n, 0, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct(k.shape, k.dtype),
                jax.ShapeDtypeStruct(v.shape, v.dtype),
                jax.ShapeDtypeStruct((B, H, N, 1, query), jnp.float32),
            ],
            scratch_shapes=[
                *(VMEM(x, jnp.float32) for x in ((key, K), (key, V), (1, query))),
                pltpu.SemaphoreType.DMA((2,)),
                VMEM((2, per_step, query, K), rows.q.dtype),
                VMEM((2, per_step, query, V), rows.do.dtype),
                VMEM((2, per_step, 2, query), jnp.float32),
                *([] if mask.query_ids is None else [VMEM((2, per_step, 1, query), jnp.int32)]),
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            name="block_sparse_attention_dkv",
        )(mask, rows, k, v)

    dk, dv, dbias = fold_batch(call)(mask, rows, k, v)
    return dk, dv, dbias.sum((3, 4))
