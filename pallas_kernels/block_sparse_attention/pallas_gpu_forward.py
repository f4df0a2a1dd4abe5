"""Hopper kernel: the forward pass, one tile of queries after the other.

Of two warpgroups one multiplies while the other exponentiates (FlashAttention-3, Shah et al.,
arXiv 2407.08608, section 3.1). Registers of a thread, V = 128, steps of 128 keys: 64 output,
64 logits, 32 probabilities (bf16 pairs), of 232.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import Plan
from pallas_kernels.block_sparse_attention.pallas_gpu_queries import (
    Kernel,
    Place,
    Shared,
    Step,
    launch,
    scratch,
    take_turn,
    walk,
)
from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import (
    Mask,
    Setup,
    logits_and_slope,
    tile,
    vector,
)
from pallas_kernels.pallas_gpu_hopper import over_rows, product, products


def _kernel(setup: Setup, plan: Plan, mask: Mask, q, k, v, o, lse, shared: Shared):
    interpret = setup.interpret is not None
    turn = functools.partial(take_turn, plan, shared.turn)
    V = v.shape[3]

    def begin(place: Place):
        return tile(V), vector(-jnp.inf), vector(0.0)

    def online_softmax(place: Place, step: Step, carry):
        total, largest, weight = carry
        step.wait_for_keys()
        mine = shared.resident[0].at[*place.rows]
        pair = (mine, step.keys.transpose((1, 0)))
        (scores,), _ = products(interpret, ([pair], None), meanwhile=turn)
        if step.same_document is None:
            step.release_keys()
        logits, _ = logits_and_slope(
            setup, scores, place.queries, step.parts, 1, step.same_document
        )
        if step.same_document is not None:
            step.release_keys()  # the ids lie beside the keys
        raised = jnp.maximum(largest, logits.max(axis=1) * setup.unit)
        # a query that has seen nothing yet has no largest logit; 0 keeps the exponents numbers
        base = jnp.where(raised == -jnp.inf, 0.0, raised)
        shrink = jnp.exp2(largest - base)
        p = jnp.exp2(logits * setup.unit - over_rows(base, logits.shape))
        total *= over_rows(shrink, total.shape)
        weight = weight * shrink + p.sum(axis=1)
        p = p.astype(jnp.bfloat16)
        total, raised, weight, p = lax.optimization_barrier((total, raised, weight, p))
        if plan.take_turns:
            plgpu.barrier_arrive(shared.turn)
        step.wait_for_values()
        if plan.take_turns:
            plgpu.barrier_wait(shared.turn)
        total = product(interpret, p, step.values, total)
        step.release_values()
        return total, raised, weight

    def finish(place: Place, carry):
        total, largest, weight = carry
        some = weight > 0
        inverse = 1.0 / jnp.where(some, weight, 1.0)
        b, h = place.item.batch, place.item.head
        result = (total * over_rows(inverse, total.shape)).astype(jnp.bfloat16)
        o.at[b, place.tokens, h][...] = result
        natural = (largest + jnp.log2(jnp.where(some, weight, 1.0))) * math.log(2)
        lse.at[b, h, place.tokens][...] = natural

    walk(setup, plan, mask, [q], k, v, shared, Kernel(begin, online_softmax, finish))


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
        shared=scratch(plan, [K], K, V, mask.key_ids is not None),
        name="forward",
        interpret=setup.interpret,
    )
