"""What the passes over tiles have beside the warpgroups that hold states: copies in, and M.

M = [s (Q K^T) o D diag(beta)]_tril of every tile [C, C], for `pallas_gpu_scan` and
`pallas_gpu_reverse`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import (
    BETA,
    TILE,
    columns,
    decay_tile,
    product,
)


def copy_tile(sources, targets, slot, barrier, *, row, head, tile, panels):
    """Starts the copies of one tile into a slot of shared memory.

    `sources` are queries [B, T, G, K] or None, keys, values (or dO) [B, T, H, V], A [B, H, N, C, C]
    and gates [B, H, N, R, C]; `targets` the slots for keys (queries below them), for 64 columns of
    values each of the `panels`, given by their first, for A and gates.
    """
    q_ref, k_ref, v_ref, a_ref, gates_ref = sources
    k, v, a, gates = (target.at[slot] for target in targets)
    key_head = lax.div(head, jnp.int32(gates_ref.shape[1] // k_ref.shape[2]))
    tokens = pl.ds(tile * TILE, TILE)
    keys = k if q_ref is None else k.at[pl.ds(0, TILE)]
    plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], keys, barrier)
    if q_ref is not None:
        queries = k.at[pl.ds(TILE, TILE)]
        plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, key_head], queries, barrier)
    for w, panel in enumerate(panels):
        source = v_ref.at[row, tokens, head, pl.ds(panel, TILE)]
        plgpu.copy_gmem_to_smem(source, v.at[w], barrier)
    plgpu.copy_gmem_to_smem(a_ref.at[row, head, tile], a, barrier)
    plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates, barrier)


def buffer(m, step):
    """Where M of a step is: there is one for every stage, or only one."""
    return m.at[lax.rem(step, jnp.int32(m.shape[0]))]


def copies_and_attention(
    load, count, kq, gates, m, loaded, attended, consumed, used, *, scale, segmented, interpret
):
    """All of a warpgroup's `count` steps: `load(step, slot)`, then M into its `buffer`."""
    stages = kq.shape[0]
    for step in range(stages):
        pl.when(step < count)(functools.partial(load, step, step))

    @pl.loop(0, count)
    def _tile(step):
        slot = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(loaded.at[slot])
        keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
        scores = product(interpret, queries, keys.transpose((1, 0)))
        scores = scores * decay_tile(gates.at[slot], segmented, strict=False)
        scores = scores * (columns(gates.at[slot, BETA]) * scale)
        if m.shape[0] == 1:
            pl.when(step > 0)(lambda: plgpu.barrier_wait(used))
        buffer(m, step)[...] = scores.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(attended.at[slot])

        # Refill the slot of the previous tile, once every worker is done with it.
        @pl.when((step > 0) & (step - 1 + stages < count))
        def _refill():
            free = lax.rem(step - 1, jnp.int32(stages))
            plgpu.barrier_wait(consumed.at[free])
            load(step - 1 + stages, free)
