"""Hopper kernel: the gradient of the queries, one tile of queries after the other.

p is recomputed from lse; the logits of a step are multiplied beside the gradient of the step
before. Registers of a thread, K = 128, steps of 64 keys: 64 dq, 32 logits, 32
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
    Turns,
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
from pallas_kernels.pallas_gpu_hopper import over_rows, products


def _kernel(setup: Setup, plan: Plan, mask: Mask, q, do, stats, k, v, dq, shared: Shared):
    interpret = setup.interpret is not None

    def begin(place: Place):
        b, h = place.item.batch, place.item.head
        lse, shift = (load_rows(stats.at[b, h, n, place.tokens]) for n in range(2))
        return tile(k.shape[3]), lse, shift

    def logits_of(place: Place, step: Step):
        mine, dmine = (x.at[*place.rows] for x in shared.resident)
        pairs = (mine, step.keys.transpose((1, 0))), (dmine, step.values.transpose((1, 0)))
        return [([pair], None) for pair in pairs]

    def first(turns: Turns, place: Place, step: Step):
        step.wait_for_keys()
        step.wait_for_values()
        turns.wait()
        ahead, _ = products(interpret, *logits_of(place, step), meanwhile=turns.end)
        step.release_values()
        return ahead

    def add(turns: Turns, place: Place, now: Step, following: Step | None, carry, ahead):
        total, lse, shift = carry
        scores, dp = ahead
        logits, slope = logits_and_slope(
            setup, scores, place.queries, now.parts, 1, now.same_document
        )
        p = jnp.exp2(logits * setup.unit - over_rows(lse, logits.shape))
        da = p * (dp + over_rows(shift, dp.shape))
        dx = (da if slope is None else da * slope).astype(jnp.bfloat16)
        terms = [([(dx, now.keys)], total)]
        if following is not None:
            following.wait_for_keys()
            following.wait_for_values()
            terms += logits_of(place, following)
        turns.wait()
        (total, *ahead), _ = products(interpret, *terms, meanwhile=turns.end)
        now.release_keys()
        if following is not None:
            following.release_values()
        return (total, lse, shift), ahead

    def finish(place: Place, carry):
        result = (carry[0] * setup.scale).astype(jnp.bfloat16)
        dq.at[place.item.batch, place.tokens, place.item.head][...] = result

    def kernel(turns: Turns) -> Kernel:
        step = functools.partial(add, turns)
        return Kernel(begin, functools.partial(first, turns), step, finish)

    walk(setup, plan, mask, [q, do], k, v, shared, kernel)


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
        shared=scratch(plan, [K, V], K, V, mask.key_ids is not None, setup.interpret is not None),
        name="dq",
        interpret=setup.interpret,
    )
