"""The gated delta rule on Hopper GPUs: which problems it takes, and its stages.

Forward: `pallas_gpu_inverse` (every tile's triangular inverse, in parallel), `pallas_gpu_split`
(for few heads: the state entering each stretch of a row, exactly) and `pallas_gpu_scan` (states
and outputs). Backward: `pallas_gpu_replay` (states again), `pallas_gpu_reverse` (their gradients,
from the last tile to the first) and `pallas_gpu_gradients` (the rest, all tiles in parallel). Kept
from one to the other: the inputs, the inverses and the states entering the stretches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.dispatch import KEPT, Target

JAX_VERSION = "0.11.2"  # Mosaic GPU changes between versions; these kernels ran on this one
_CHIPS = ("H100", "H200")
_KEY_WIDTHS = (64, 128, 192, 256)
_VALUE_WIDTHS = (64, 128, 256, 384, 512)
_ROW_ALIGNMENT = 8  # tokens: the copy engine moves whole swizzle tiles of 8 rows


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the Hopper kernels cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _CHIPS):
        return f"needs an NVIDIA {' or '.join(_CHIPS)}, not {target.device_kind!r}"
    if jax.__version__ != JAX_VERSION:
        return f"its kernels are written for JAX {JAX_VERSION}, not {jax.__version__}"
    if problem.dtype != "bfloat16":
        return f"q, k and v must be bfloat16 (the matrix units round fp32), not {problem.dtype}"
    if problem.K not in _KEY_WIDTHS:
        return f"K must be one of {_KEY_WIDTHS}, not {problem.K}"
    if problem.V not in _VALUE_WIDTHS:
        return f"V must be one of {_VALUE_WIDTHS}, not {problem.V}"
    if problem.write_mask and problem.chunk_size != 64:
        return f"a write_mask needs chunk_size 64, not {problem.chunk_size}"
    return None


def gated_delta_rule(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The op's contract (`api.gated_delta_rule`) for problems that `unsupported` lets through."""
    del precision  # of fp32 inputs, which this implementation declines
    del chunk_size  # 64 where there is a mask, and nothing but the mask depends on it
    return _rule(scale, q, k, v, g, beta, initial_state, write_mask, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(scale, q, k, v, g, beta, initial_state, write_mask, segment_ids):
    arrays = (q, k, v, g, beta, initial_state, write_mask, segment_ids)
    return forward(*arrays, scale=scale)[:2]


def _rule_forward(scale, *arrays):
    o, final_state, *kept = checkpoint_name(forward(*arrays, scale=scale), KEPT)
    return (o, final_state), (arrays, kept)


def _rule_backward(scale, kept, cotangents):
    arrays, kept = kept
    return *backward(*arrays, *kept, *cotangents, scale=scale), None


_rule.defvjp(_rule_forward, _rule_backward)


def _padded(segment_ids, *arrays):
    """Arrays [B, T, ...] with T rounded up by tokens that change nothing: g = 0, beta = 0."""
    pad = -arrays[0].shape[1] % _ROW_ALIGNMENT
    if not pad:
        return segment_ids, *arrays
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    return segment_ids, *(jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) for x in arrays)


# Jitted so that the layers of a model, where their calls are alike, lower each kernel only once.
@functools.partial(jax.jit, static_argnames=("scale", "pieces", "interpret"))
def forward(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    *,
    scale: float,
    pieces: int | None = None,
    interpret=None,
) -> tuple[Array, Array, Float[Array, "B H N C C"], Float[Array, "B H P V K"], Any]:
    """Outputs, final state; for the backward pass every tile's inverse, the stretches' states and,
    where there are several, their transitions.

    Rows are split into `pieces` stretches (by the cost model when None).
    """
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from pallas_kernels.gated_delta_rule import pallas_gpu_split as split
    from pallas_kernels.gated_delta_rule.pallas_gpu_inverse import tile_inverses
    from pallas_kernels.gated_delta_rule.pallas_gpu_scan import scan_tiles
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    length = q.shape[1]
    batch, _, heads, value_width = v.shape
    segment_ids, q, k, v, g, beta = _padded(segment_ids, q, k, v, g, beta)
    gates = pack_gates(g, beta, write_mask, segment_ids)
    a = tile_inverses(k, gates, interpret=interpret)
    states = initial_state.astype(jnp.float32).swapaxes(2, 3)
    if pieces is None:
        pieces = split.stretches(batch, heads, gates.shape[2], k.shape[-1], value_width)
    transitions = None
    if pieces == 1:
        states = states[:, :, None]
    else:
        increments, transitions = split.summarise(k, v, a, gates, pieces, interpret=interpret)
        states = split.join(states, increments, transitions, interpret=interpret)
    o, left = scan_tiles(q, k, v, a, gates, states, scale=scale, interpret=interpret)
    return o[:, :length], left[:, :, -1].swapaxes(2, 3), a, states, transitions


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def backward(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    inverses: Float[Array, "B H N C C"],
    states: Float[Array, "B H P V K"],
    transitions: Any,
    do: Float[Array, "B T H V"],
    dfinal: Float[Array, "B H K V"],
    *,
    scale: float,
    interpret=None,
) -> tuple[Array, Array, Array, Array, Array, Array, Array | None]:
    """Gradients of q, k, v, g, beta, initial_state and write_mask; deterministic (no atomics).

    `inverses`, `states` and `transitions` are what `forward` returned beside its results.
    """
    from pallas_kernels.gated_delta_rule import pallas_gpu_split as split
    from pallas_kernels.gated_delta_rule.pallas_gpu_gradients import tile_gradients
    from pallas_kernels.gated_delta_rule.pallas_gpu_replay import replay
    from pallas_kernels.gated_delta_rule.pallas_gpu_reverse import reverse, summarise_reversed
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    batch, length, key_heads, width = q.shape

    def packed(g, beta, write_mask):
        ids, g, beta = _padded(segment_ids, g, beta)
        return pack_gates(g, beta, write_mask, ids)

    gates, pull_back = jax.vjp(packed, g, beta, write_mask)
    _, q_, k_, v_, do_ = _padded(None, q, k, v, do)
    passes = (q_, k_, do_, inverses, gates)
    options = {"scale": scale, "interpret": interpret}
    dstates = dfinal.swapaxes(2, 3)
    if transitions is None:
        dstates = dstates[:, :, None]
    else:
        maps = summarise_reversed(*passes, transitions, **options)
        dstates = split.join(dstates, *maps, interpret=interpret)
    states, errors = replay(k_, v_, inverses, gates, states, interpret=interpret)
    dstates, dv, dentering = reverse(*passes, dstates, **options)
    dq, dk, dgates = tile_gradients(q_, k_, do_, dv, errors, states, dstates, gates, **options)
    dq, dk = dq[:, :length], dk[:, :length]
    if dq.shape[2] != key_heads:  # rounded to bf16 once per value head, summed in fp32
        grouped = (batch, length, key_heads, -1, width)
        dq, dk = (x.reshape(grouped).sum(3, dtype=jnp.float32).astype(q.dtype) for x in (dq, dk))
    dinitial = dentering[:, :, -1].swapaxes(2, 3)
    dg, dbeta, dwrite_mask = pull_back(dgates)
    return dq, dk, dv[:, :length], dg, dbeta, dinitial, dwrite_mask
