"""Gated linear attention on TPUs: which problems it takes, and how they become the kernels' arrays.

`pallas_tpu_forward` and `pallas_tpu_backward` are one kernel each and all that touches the arrays;
`pallas_tpu_levels` is what they share. README.md says how it works.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv, pad_to_multiple
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_delta_rule import pallas_tpu as delta_rule
from pallas_kernels.gated_delta_rule.decays import reset_counts
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import TILE
from pallas_kernels.gated_linear_attention.pallas_tpu_backward import backward
from pallas_kernels.gated_linear_attention.pallas_tpu_forward import forward
from pallas_kernels.gated_linear_attention.pallas_tpu_levels import Layout


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the TPU kernels cannot take `problem` on `target`, or None."""
    if problem.beta:
        return "the delta rule's erase term (beta) has no kernel yet"
    # Grouped heads are repeated, and no width of theirs depends on chunk_size.
    return delta_rule.unsupported(dataclasses.replace(problem, Hk=problem.H), target)


def gated_linear_attention(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    *,
    beta: Float[Array, "B T H"] | None,
    bonus: Float[Array, "H K"] | None,
    initial_state: Float[Array, "B H K V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The op's contract (`api.gated_linear_attention`) for what `unsupported` lets through."""
    del precision, chunk_size  # fp32 inputs: always the highest; tiles of 128 tokens
    assert beta is None
    B, T, H, V = v.shape
    K = q.shape[-1]
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        starts = jnp.pad(counts[:, 1:] != counts[:, :-1], ((0, 0), (1, 0)))
        g = jnp.where(starts[..., None, None], -jnp.inf, g)
    sizes = delta_rule.with_dead_heads(H, H, K, V)
    layout = Layout(
        B,
        cdiv(T, TILE),
        *sizes,
        heads=delta_rule.heads_per_step(*sizes),
        dtype=q.dtype,
        scale=scale,
        segments=segment_ids is not None,
        unit=None,
        exclusive=bonus is not None,
    )

    def more_heads(x, axis):  # dead ones: zeros
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, layout.H - H)
        return jnp.pad(x, widths)

    def lanes(x):  # [B, T, H, width] -> [B, N * C, H * width]
        return pad_to_multiple(more_heads(x, 2), TILE, 1).reshape(B, layout.N * TILE, -1)

    if bonus is not None:
        bonus = more_heads(bonus, 0)[:, None]
    o, state = _rule(
        layout, *map(lanes, (q, k, v, g)), bonus, more_heads(initial_state, 1).swapaxes(2, 3)
    )
    o = o.reshape(B, -1, layout.H, V)[:, :T, :H]
    return o, state[:, :H].swapaxes(2, 3)


def _outputs(layout, q, k, v, g, bonus, initial) -> tuple[Array, Array]:
    o, final = forward(layout, q, k, v, g, bonus, initial, keep=False)
    return o, final


_rule = jax.custom_vjp(_outputs, nondiff_argnums=(0,))


def _rule_forward(layout, q, k, v, g, bonus, initial):
    o, final, states = forward(layout, q, k, v, g, bonus, initial, keep=True)
    return (o, final), (q, k, v, g, bonus, states)


def _rule_backward(layout, residuals, cotangents):
    q, k, v, g, bonus, states = residuals
    do, dfinal = cotangents
    reverse = dataclasses.replace(layout, reverse=True)
    *gradients, dbonus, dinitial = backward(reverse, q, k, v, g, do, bonus, states, dfinal)
    return *gradients, None if dbonus is None else dbonus.sum(0), dinitial


_rule.defvjp(_rule_forward, _rule_backward)
