"""Forward kernel on TPU: one tile of queries of one head a grid step, its key tiles streamed."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention.pallas_tpu_tiles import (
    IN_HBM,
    VMEM,
    Ref,
    Setup,
    block,
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


class ByQuery(NamedTuple):
    """What a kernel over query tiles knows of the mask: arrays, their blocks, or references.

    All but the ids lie in scalar memory, brought in for one grid step at a time.
    """

    offset: Int[Array, "B 1 1"]
    rows: Int[Array, "B H M 1 5"]  # of `Visits`, and the leaf
    listed: Int[Array, "B H #M 1 E"]
    far: Int[Array, "B H F N"]
    bias: Float[Array, "B R 1 N"] | None
    query_ids: Int[Array, "B M 1 q"] | None
    key_ids: Int[Array, "B N 1 s"] | None  # copied with their keys


def specs(mask: ByQuery) -> ByQuery:
    """Blocks of one query tile, for the grid (B, H, M)."""

    heads = mask.rows.shape[1]
    per_tile = mask.listed.shape[2] > 1
    return ByQuery(
        offset=scalars(mask.offset, lambda b, h, i: (b, 0, 0)),
        rows=scalars(mask.rows, lambda b, h, i: (b, h, i, 0, 0)),
        listed=scalars(mask.listed, lambda b, h, i: (b, h, i if per_tile else 0, 0, 0)),
        far=scalars(mask.far, lambda b, h, i: (b, h, 0, 0)),
        bias=None
        if mask.bias is None
        else scalars(mask.bias, lambda b, h, i, R=mask.bias.shape[1]: (b, h * R // heads, 0, 0)),
        query_ids=None
        if mask.query_ids is None
        else block((1, 1, 1, mask.query_ids.shape[3]), lambda b, h, i: (b, i, 0, 0)),
        key_ids=None if mask.key_ids is None else IN_HBM,
    )


def key_buffers(setup: Setup, mask: ByQuery, k: Array, v: Array) -> list:
    """Semaphores, and two slots of key tiles, of values and of ids."""
    tile, N = setup.tiling.key, mask.far.shape[3]
    per_step = setup.per_step(tile, N)
    ids = [] if mask.key_ids is None else [VMEM((2, per_step, 1, tile), jnp.int32)]
    return [
        pltpu.SemaphoreType.DMA((2,)),
        VMEM((2, per_step * tile, k.shape[3]), k.dtype),
        VMEM((2, per_step * tile, v.shape[3]), v.dtype),
        *ids,
    ]


def attend_over_keys(
    setup: Setup, mask: ByQuery, q: Array, k: Ref, v: Ref, buffers, compute, carry
):
    """compute(logits [s, q], slope, keys, values, carry) over the key tiles of this query tile.

    The logits are -inf where a pair is hidden.
    """
    semaphores, keys, values, *ids = buffers
    b, h, i = (pl.program_id(axis) for axis in range(3))
    g = h * k.shape[1] // pl.num_programs(1)
    tile, N = setup.tiling.key, mask.far.shape[3]
    per_step = keys.shape[1] // tile
    leaf = mask.rows[0, 0, 0, 0, 4]
    query_ids = None if mask.query_ids is None else mask.query_ids[0, 0]
    place = queries(setup, mask.offset[0, 0, 0], i, leaf, query_ids)
    count = visited(mask.rows, mask.listed, 0, N)[0]

    def copies(entry, slot, t):
        _, n = visited(mask.rows, mask.listed, entry, N)
        rows = pl.ds(pl.multiple_of(n * tile, tile), tile)
        yield k.at[b, g, rows], keys.at[slot, pl.ds(t * tile, tile)]
        yield v.at[b, g, rows], values.at[slot, pl.ds(t * tile, tile)]
        if mask.key_ids is not None:
            yield mask.key_ids.at[b, n], ids[0].at[slot, t]

    def step(step, slot, carry):
        logits, slope = logits_and_slope(setup, keys[slot], q)
        parts = []
        for t in range(per_step):
            entry = step * per_step + t
            _, n = visited(mask.rows, mask.listed, entry, N)
            # a tile that is not there hides all its keys
            start = jnp.where(entry < count, n * tile, setup.S)
            bias = None if mask.bias is None else mask.bias[0, 0, 0, n]
            key_ids = column(ids[0][slot, t]) if ids else None
            part = logits[t * tile : (t + 1) * tile]
            parts.append(masked(place, part, start, mask.far[0, 0, leaf, n], bias, key_ids))
        return compute(jnp.concatenate(parts), slope, keys[slot], values[slot], carry)

    return stream(count, per_step, copies, [keys, values, *ids], semaphores, step, carry)


def _kernel(
    setup: Setup, mask: ByQuery, q: Ref, k: Ref, v: Ref, o: Ref, lse: Ref, total: Ref, *buffers
):
    total[...] = jnp.zeros(total.shape, total.dtype)

    def online_softmax(logits, slope, keys, values, carry):
        del slope, keys
        largest, weight = carry
        raised = jnp.maximum(largest, logits.max(0, keepdims=True))
        # a query that has seen nothing yet has no largest logit; 0 keeps the exponents numbers
        base = jnp.where(raised == -jnp.inf, 0, raised)
        p, shrink = jnp.exp(logits - base), jnp.exp(largest - base)
        total[...] = total[...] * shrink + dot(values, p.astype(values.dtype), (0, 0))
        return raised, weight * shrink + p.sum(0, keepdims=True)

    shape = (1, setup.tiling.query)
    empty = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    largest, weight = attend_over_keys(setup, mask, q[0, 0], k, v, buffers, online_softmax, empty)
    o[0, 0] = (total[...] / jnp.where(weight == 0, 1, weight)).T.astype(o.dtype)
    lse[0, 0, 0] = largest + jnp.log(weight)


def forward(
    setup: Setup,
    mask: ByQuery,
    q: Float[Array, "B H Tp K"],
    k: Float[Array, "B G Sp K"],
    v: Float[Array, "B G Sp V"],
) -> tuple[Float[Array, "B H Tp V"], Float[Array, "B H M 1 q"]]:
    """(o, lse), for lengths Tp and Sp that are whole tiles."""
    (H, Tp, K), V, tile = q.shape[1:], v.shape[3], setup.tiling.query

    def call(mask, q, k, v):
        B, M = q.shape[0], Tp // tile
        return pl.pallas_call(
            functools.partial(_kernel, setup),
            grid=(B, H, M),
            in_specs=[
                specs(mask),
                block((1, 1, tile, K), lambda b, h, i: (b, h, i, 0)),
                IN_HBM,
                IN_HBM,
            ],
            out_specs=[
                block((1, 1, tile, V), lambda b, h, i: (b, h, i, 0)),
                block((1, 1, 1, 1, tile), lambda b, h, i: (b, h, i, 0, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((B, H, Tp, V), v.dtype),
                jax.ShapeDtypeStruct((B, H, M, 1, tile), jnp.float32),
            ],
            scratch_shapes=[VMEM((V, tile), jnp.float32), *key_buffers(setup, mask, k, v)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel")
            ),
            name="block_sparse_attention_forward",
        )(mask, q, k, v)

    return fold_batch(call)(mask, q, k, v)
