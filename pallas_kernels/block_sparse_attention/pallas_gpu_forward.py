"""Hopper kernel: the forward pass, one tile of queries after the other.

The logits of a step are multiplied beside the output of the step before, and the exponentials of
one warpgroup are taken while the other multiplies (`Turns`). Registers of a thread, V = 128, steps
of 128 keys: 64 output, 64 logits, 32 probabilities (bf16 pairs), of 232.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

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
    logits_and_slope,
    tile,
    vector,
)
from pallas_kernels.pallas_gpu_hopper import over_rows, products


def _kernel(setup: Setup, plan: Plan, mask: Mask, q, k, v, o, lse, shared: Shared):
    interpret = setup.interpret is not None
    V = v.shape[3]

    def begin(place: Place):
        return tile(V), vector(-jnp.inf), vector(0.0)

    def scores_of(place: Place, step: Step):
        return [(shared.resident[0].at[*place.rows], step.keys.transpose((1, 0)))], None

    def release_keys(step: Step):
        if step.same_document is None:  # the ids lie beside the keys
            step.release_keys()

    def first(turns: Turns, place: Place, step: Step):
        step.wait_for_keys()
        turns.wait()
        (scores,), _ = products(interpret, scores_of(place, step), meanwhile=turns.end)
        release_keys(step)
        return scores

    def online_softmax(
        turns: Turns, place: Place, now: Step, following: Step | None, carry, scores
    ):
        total, largest, weight = carry
        logits, _ = logits_and_slope(setup, scores, place.queries, now.parts, 1, now.same_document)
        if now.same_document is not None:
            now.release_keys()
        raised = jnp.maximum(largest, logits.max(axis=1) * setup.unit)
        # a query that has seen nothing yet has no largest logit; 0 keeps the exponents numbers
        base = jnp.where(raised == -jnp.inf, 0.0, raised)
        shrink = jnp.exp2(largest - base)
        p = jnp.exp2(logits * setup.unit - over_rows(base, logits.shape))
        total *= over_rows(shrink, total.shape)
        weight = weight * shrink + p.sum(axis=1)
        p = p.astype(jnp.bfloat16)
        total, raised, weight, p = lax.optimization_barrier((total, raised, weight, p))
        now.wait_for_values()
        terms = [([(p, now.values)], total)]
        if following is not None:
            following.wait_for_keys()
            terms.append(scores_of(place, following))
        turns.wait()
        (total, *ahead), _ = products(interpret, *terms, meanwhile=turns.end)
        now.release_values()
        if following is not None:
            release_keys(following)
        return (total, raised, weight), ahead[0] if ahead else None

    def finish(place: Place, carry):
        total, largest, weight = carry
        some = weight > 0
        inverse = 1.0 / jnp.where(some, weight, 1.0)
        b, h = place.item.batch, place.item.head
        result = (total * over_rows(inverse, total.shape)).astype(jnp.bfloat16)
        o.at[b, place.tokens, h][...] = result
        natural = (largest + jnp.log2(jnp.where(some, weight, 1.0))) * math.log(2)
        lse.at[b, h, place.tokens][...] = natural

    def kernel(turns: Turns) -> Kernel:
        step = functools.partial(online_softmax, turns)
        return Kernel(begin, functools.partial(first, turns), step, finish)

    walk(setup, plan, mask, [q], k, v, shared, kernel)


def forward(
    setup: Setup,
    plan: Plan,
    mask: Mask,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
) -> tuple[Float[Array, "B Tp H V"], Float[Array, "B H Tp"]]:
    """(o, lse), for Tp >= T that is whole tiles."""
    (B, T, H, K), V = q.shape, v.shape[3]
    Tp = -(-T // plan.tile) * plan.tile
    return launch(
        functools.partial(_kernel, setup, plan),
        plan,
        mask,
        q,
        k,
        v,
        out_type=(
            jax.ShapeDtypeStruct((B, Tp, H, V), v.dtype),
            jax.ShapeDtypeStruct((B, H, Tp), jnp.float32),
        ),
        shared=scratch(plan, [K], K, V, mask.key_ids is not None, setup.interpret is not None),
        name="forward",
        interpret=setup.interpret,
    )
