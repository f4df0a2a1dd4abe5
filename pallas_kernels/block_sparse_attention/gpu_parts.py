"""The Hopper kernels one by one, in every shape worth timing, for the benchmark's `--parts`."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import pallas_gpu
from pallas_kernels.block_sparse_attention import pallas_gpu_plan as planning
from pallas_kernels.block_sparse_attention.block_mask import Causal
from pallas_kernels.block_sparse_attention.cases import Case
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import Plan
from pallas_kernels.block_sparse_attention.reference import scene
from pallas_kernels.block_sparse_attention.schedule import near_rules
from pallas_kernels.block_sparse_attention.xattention import xattention_select

_FORWARD: tuple[dict, ...] = (
    {},
    {"tiles": 1},
    {"take_turns": False},
    {"step": 64, "stages": 4},
)
_DQ: tuple[dict, ...] = ({}, {"take_turns": True}, {"stages": 3}, {"stages": 2, "tiles": 2})
_DKV: tuple[dict, ...] = ({}, {"take_turns": True}, {"stages": 3}, {"stages": 2, "tiles": 2})


def variants(plan: Plan, changes: tuple[dict, ...]) -> Iterator[tuple[str, Plan]]:
    """("what differs from the default", plan); no change to what the plan already is."""
    for change in changes:
        if plan.workers == 1 and "take_turns" in change:
            continue
        changed = plan._replace(**change)
        if not change or changed != plan:
            label = " ".join(f"{name}={value}" for name, value in change.items())
            yield label or "default", changed


def parts(case: Case, dtype: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(label, a compiled call) of each schedule and of each kernel by itself, and of XAttention's
    choice of blocks beside a causal row."""
    from pallas_kernels.block_sparse_attention.pallas_gpu_dkv import key_gradients
    from pallas_kernels.block_sparse_attention.pallas_gpu_dq import query_gradient
    from pallas_kernels.block_sparse_attention.pallas_gpu_forward import forward
    from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import Setup

    arguments, fixed, (do, _) = case.draw(jax.random.key(0), dtype)
    q, k, v = (arguments[x] for x in "qkv")
    bias, mask = arguments.get("block_bias"), fixed["mask"]
    given = (fixed.get(x) for x in ("q_offset", "segment_ids", "kv_segment_ids"))
    everything = scene(mask, case.T, case.S, *given)
    setup = Setup(case.K**-0.5, case.window, case.softcap, near_rules(mask), case.T, case.S)
    plans = planning.plans(mask, case.K, case.V, bool(case.documents))
    shape = q.shape[0], q.shape[2], 2, math.ceil(case.T / 128) * 128
    stats = jnp.zeros(shape, jnp.float32).at[:, :, 0].set(10.0)

    def timed(kernel, build, name, plan, changes, *arrays):
        schedule = jax.jit(lambda: build(setup, plan, q, k, v, bias, everything))
        yield f"{name}: schedule", schedule
        for label, changed in variants(plan, changes):
            known = jax.jit(
                lambda changed=changed: build(setup, changed, q, k, v, bias, everything)
            )()
            call = jax.jit(lambda known, *x, changed=changed: kernel(setup, changed, known, *x))
            yield f"{name}: {label}", lambda call=call, known=known: call(known, *arrays)

    gradients = (q, do, stats, k, v)
    yield from timed(forward, pallas_gpu.by_query, "forward", plans.forward, _FORWARD, q, k, v)
    yield from timed(query_gradient, pallas_gpu.by_query, "dq", plans.dq, _DQ, *gradients)
    yield from timed(key_gradients, pallas_gpu.by_key, "dkv", plans.dkv, _DKV, *gradients)
    if isinstance(mask, Causal):
        select = jax.jit(xattention_select)
        yield "xattention_select", lambda: select(q, k)
