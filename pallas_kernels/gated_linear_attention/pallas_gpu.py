"""Gated linear attention on Hopper GPUs: which problems it takes, and its stages.

Forward: `pallas_gpu_levels` (all that happens inside tiles, in parallel) and `pallas_gpu_pass`
(states and outputs, rows split into stretches). Backward: the same stage inside tiles again, the
pass again for the states, backwards for their gradients, and `pallas_gpu_gradients` (the rest, all
tiles in parallel). Kept from one to the other: the arguments and the states entering the stretches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import pad_to_multiple
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_delta_rule.decays import reset_counts

JAX_VERSION = "0.11.2"  # Mosaic GPU changes between versions
_CHIPS = ("H100", "H200")
_KEY_WIDTHS = (64, 128)
_VALUE_WIDTHS = (64, 128, 256, 384, 512)


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the Hopper kernels cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _CHIPS):
        return f"needs an NVIDIA {' or '.join(_CHIPS)}, not {target.device_kind!r}"
    if jax.__version__ != JAX_VERSION:
        return f"its kernels are written for JAX {JAX_VERSION}, not {jax.__version__}"
    if problem.beta:
        return "the delta rule's erase term (beta) has no kernel yet"
    if problem.dtype != "bfloat16":
        return f"q, k and v must be bfloat16 (the matrix units round fp32), not {problem.dtype}"
    if problem.K not in _KEY_WIDTHS:
        return f"K must be one of {_KEY_WIDTHS}, not {problem.K}"
    if problem.V not in _VALUE_WIDTHS:
        return f"V must be one of {_VALUE_WIDTHS}, not {problem.V}"
    return None


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
    pieces: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The op's contract (`api.gated_linear_attention`) for what `unsupported` lets through.

    Rows are split into `pieces` stretches (by the cost model when None).
    """
    del precision, chunk_size  # bf16 inputs; tiles of 64 tokens
    assert beta is None
    from pallas_kernels.gated_linear_attention.pallas_gpu_levels import RESET, TILE
    from pallas_kernels.gated_linear_attention.pallas_gpu_pass import stretches

    B, T, H, V = v.shape
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    g = jnp.maximum(g, RESET / 4)
    if segment_ids is not None:
        counts = reset_counts(segment_ids)
        starts = jnp.pad(counts[:, 1:] != counts[:, :-1], ((0, 0), (1, 0)))
        g = jnp.where(starts[..., None, None], RESET, g)
    # The copy engine stops at the end of a row, loads into registers do not.
    q, k, v, g = (pad_to_multiple(x, TILE, 1) for x in (q, k, v, g))
    if pieces is None:
        pieces = stretches(B, H, q.shape[1] // TILE, V)
    o, state = _rule(scale, pieces, interpret, q, k, v, g, bonus, initial_state.swapaxes(2, 3))
    return o[:, :T], state.swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(scale, pieces, interpret, q, k, v, g, bonus, initial):
    return forward(q, k, v, g, bonus, initial, scale=scale, pieces=pieces, interpret=interpret)[:2]


def _rule_forward(scale, pieces, interpret, q, k, v, g, bonus, initial):
    options = {"scale": scale, "pieces": pieces, "interpret": interpret}
    o, final, states = forward(q, k, v, g, bonus, initial, **options)
    return (o, final), (q, k, v, g, bonus, states)


def _rule_backward(scale, pieces, interpret, kept, cotangents):
    return backward(*kept, *cotangents, scale=scale, interpret=interpret)


_rule.defvjp(_rule_forward, _rule_backward)


# Jitted so that the layers of a model, where their calls are alike, lower each kernel only once.
@functools.partial(jax.jit, static_argnames=("scale", "pieces", "interpret"))
def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    bonus: Float[Array, "H K"] | None,
    initial: Float[Array, "B H V K"],
    *,
    scale: float,
    pieces: int,
    interpret=None,
) -> tuple[Array, Float[Array, "B H V K"], Float[Array, "B H P V K"]]:
    """Outputs, final state and the states entering the stretches; T is a multiple of the tile.

    States are transposed.
    """
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from pallas_kernels.gated_linear_attention import pallas_gpu_levels, pallas_gpu_pass

    attention, reading, writing, through = pallas_gpu_levels.tile_factors(
        q, k, g, bonus, scale=scale, interpret=interpret
    )
    states = pallas_gpu_pass.entering(v, writing, through, initial, pieces, interpret=interpret)
    o, left = pallas_gpu_pass.pass_states(
        v, writing, through, states, (reading, attention), interpret=interpret
    )
    return o, left[:, :, -1], states


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def backward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    bonus: Float[Array, "H K"] | None,
    states: Float[Array, "B H P V K"],
    do: Float[Array, "B T H V"],
    dfinal: Float[Array, "B H V K"],
    *,
    scale: float,
    interpret=None,
) -> tuple[Array, Array, Array, Array, Array | None, Array]:
    """Gradients of q, k, v, g, bonus and the initial state; deterministic (no atomics)."""
    from pallas_kernels.gated_linear_attention import pallas_gpu_levels, pallas_gpu_pass
    from pallas_kernels.gated_linear_attention.pallas_gpu_gradients import tile_gradients

    run = {"interpret": interpret}
    attention, reading, writing, through = pallas_gpu_levels.tile_factors(
        q, k, g, bonus, scale=scale, **run
    )
    entering, _ = pallas_gpu_pass.pass_states(v, writing, through, states, keep=True, **run)
    back = {"reverse": True, **run}
    dstates = pallas_gpu_pass.entering(do, reading, through, dfinal, states.shape[2], **back)
    leaving, left = pallas_gpu_pass.pass_states(do, reading, through, dstates, keep=True, **back)
    dq, dk, dv, dg = tile_gradients(
        *(q, k, g, v, do, attention, writing, entering, leaving, through, bonus),
        scale=scale,
        **run,
    )
    dbonus = None
    if bonus is not None:
        f32 = jnp.float32
        own = scale * (do.astype(f32) * v.astype(f32)).sum(-1, keepdims=True)
        dbonus = (own * q.astype(f32) * k.astype(f32)).sum((0, 1))
    return dq, dk, dv, dg, dbonus, left[:, :, -1]
