"""Hopper kernel: the gradient of the queries, one tile of queries after the other.

p is recomputed from lse. Registers of a thread, K = 128, steps of 64 keys: 64 dq, 32 logits, 32
gradients of them, 16 of those in bf16, of 232.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import Plan
from pallas_kernels.block_sparse_attention.pallas_gpu_queries import (
    Kernel,
    Place,
    Shared,
    Step,
    launch,
    scratch,
    walk,
)
from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import (
    Mask,
    Setup,
    load_rows,
    logits_and_slope,
    tile,
)
from pallas_kernels.pallas_gpu_hopper import over_rows, product, products


def _kernel(setup: Setup, plan: Plan, mask: Mask, q, do, stats, k, v, dq, shared: Shared):
    interpret = setup.interpret is not None

    def begin(place: Place):
        b, h = place.item.batch, place.item.head
        lse, shift = (load_rows(stats.at[b, h, n, place.tokens]) for n in range(2))
        return tile(k.shape[3]), lse, shift

    def add(place: Place, step: Step, carry):
        total, lse, shift = carry
        mine, dmine = (x.at[*place.rows] for x in shared.resident)
        step.wait_for_keys()
        step.wait_for_values()
        scores = ([(mine, step.keys.transpose((1, 0)))], None)
        (scores, dp), _ = products(
            interpret, scores, ([(dmine, step.values.transpose((1, 0)))], None)
        )
        step.release_values()
        logits, slope = logits_and_slope(
            setup, scores, place.queries, step.parts, 1, step.same_document
        )
        p = jnp.exp2(logits * setup.unit - over_rows(lse, logits.shape))
        da = p * (dp + over_rows(shift, dp.shape))
        dx = (da if slope is None else da * slope).astype(jnp.bfloat16)
        total = product(interpret, dx, step.keys, total)
        step.release_keys()
        return total, lse, shift

    def finish(place: Place, carry):
        result = (carry[0] * setup.scale).astype(jnp.bfloat16)
        dq.at[place.item.batch, place.tokens, place.item.head][...] = result

    walk(setup, plan, mask, [q, do], k, v, shared, Kernel(begin, add, finish))


def query_gradient(
    setup: Setup,
    plan: Plan,
    mask: Mask,
    q: Float[Array, "B T H K"],
    do: Float[Array, "B T H V"],
    stats: Float[Array, "B H 2 Tq"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
) -> Float[Array, "B Tp H K"]:
    """dq, for Tp >= T that is whole tiles.

    `stats`: lse in base 2, inf where nothing is seen and after T; and dlse - do . o.
    """
    (B, T, H, K), V = q.shape, v.shape[3]
    return launch(
        functools.partial(_kernel, setup, plan),
        plan,
        mask,
        q,
        do,
        stats,
        k,
        v,
        out_type=jax.ShapeDtypeStruct((B, -(-T // plan.tile) * plan.tile, H, K), q.dtype),
        shared=scratch(plan, [K, V], K, V, mask.key_ids is not None),
        name="dq",
        interpret=setup.interpret,
    )
