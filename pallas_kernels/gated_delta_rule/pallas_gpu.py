"""The gated delta rule on Hopper GPUs: which problems it takes, and its three stages.

Forward: `pallas_gpu_inverse` (every tile's triangular inverse, in parallel), `pallas_gpu_split`
(for few heads: the state entering each stretch of a row, exactly) and `pallas_gpu_scan` (states
and outputs). There is no backward kernel yet: gradients come from the `xla` implementation, which
recomputes its own forward from the same inputs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_delta_rule import xla

JAX_VERSION = "0.11.2"  # Mosaic GPU changes between versions; these kernels ran on this one
_CHIPS = ("H100", "H200")
_KEY_WIDTHS = (64, 128, 192)
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
    return _rule(scale, chunk_size, q, k, v, g, beta, initial_state, write_mask, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(scale, chunk_size, q, k, v, g, beta, initial_state, write_mask, segment_ids):
    del chunk_size
    return forward(q, k, v, g, beta, initial_state, write_mask, segment_ids, scale=scale)


def _rule_forward(scale, chunk_size, *arrays):
    return _rule(scale, chunk_size, *arrays), arrays


def _rule_backward(scale, chunk_size, arrays, cotangents):
    *floating, segment_ids = arrays

    def rule(q, k, v, g, beta, initial_state, write_mask):
        return xla.gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state,
            write_mask=write_mask,
            segment_ids=segment_ids,
            scale=scale,
            chunk_size=chunk_size,
            precision=None,
        )

    _, pull_back = jax.vjp(rule, *floating)
    return *pull_back(cotangents), None


_rule.defvjp(_rule_forward, _rule_backward)


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
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Outputs and final state; rows are split into `pieces` (by the cost model when None)."""
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from pallas_kernels.gated_delta_rule import pallas_gpu_split as split
    from pallas_kernels.gated_delta_rule.pallas_gpu_inverse import tile_inverses
    from pallas_kernels.gated_delta_rule.pallas_gpu_scan import scan_tiles
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    length = q.shape[1]
    batch, _, heads, value_width = v.shape
    pad = -length % _ROW_ALIGNMENT
    if pad:  # tokens with g = 0 and beta = 0 change nothing
        q, k, v, g, beta = (
            jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, g, beta)
        )
        if segment_ids is not None:
            segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    gates = pack_gates(g, beta, write_mask, segment_ids)
    a = tile_inverses(k, gates, interpret=interpret)
    states = initial_state.astype(jnp.float32).swapaxes(2, 3)
    if pieces is None:
        pieces = split.stretches(batch, heads, gates.shape[2], k.shape[-1], value_width)
    if pieces == 1:
        states = states[:, :, None]
    else:
        maps = split.summarise(k, v, a, gates, pieces, interpret=interpret)
        states = split.join(states, *maps, interpret=interpret)
    o, states = scan_tiles(q, k, v, a, gates, states, scale=scale, interpret=interpret)
    return o[:, :length], states[:, :, -1].swapaxes(2, 3)
