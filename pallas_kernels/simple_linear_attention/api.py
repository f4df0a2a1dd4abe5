"""The public op: its contract and its implementations."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.checks import check_recurrence, zeros
from pallas_kernels.simple_linear_attention import reference, xla

SHAPES = {
    "q": "B T Hk K",
    "k": "B T Hk K",
    "v": "B T H V",
    "g": "B T H",
    "initial_state": "B H K V",
    "write_mask": "B N H",
    "segment_ids": "B T",
}


def simple_linear_attention(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    write_mask: Float[Array, "B N H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Linear attention whose state decays by exp(g), one scalar per head and token.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    A constant g per head is RetNet (arXiv 2307.08621) and Lightning attention (arXiv 2401.04658);
    q = C, k = B, v = dt x and g = dt A is Mamba-2 (arXiv 2405.21060). Value head j reads and writes
    with query/key head j // (H / Hk). A token with g = 0 and k = 0 changes nothing, which makes
    it padding.

    Every argument and both results follow `gated_delta_rule`, whose contract this shares but for
    beta: `write_mask` weights a chunk's writes in what later chunks see, the decay is kept;
    `segment_ids` reset the state wherever they change; the state is fp32 (float64 for float64
    inputs); both results are differentiable in every floating input.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state}
    arguments |= {"write_mask": write_mask, "segment_ids": segment_ids}
    problem = check_recurrence(arguments, SHAPES, scale=scale, chunk_size=chunk_size)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if initial_state is None:
        shape = (problem.B, problem.H, problem.K, problem.V)
        initial_state = zeros(shape, dtype, like=(q, k, v, g))
    candidate = dispatch.resolve(
        "simple_linear_attention", IMPLEMENTATIONS, implementation, problem
    )
    return candidate.run(
        q,
        k,
        v,
        g.astype(dtype),
        initial_state=initial_state.astype(dtype),
        write_mask=None if write_mask is None else write_mask.astype(dtype),
        segment_ids=segment_ids,
        scale=problem.K**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        precision=precision,
    )


IMPLEMENTATIONS: dispatch.Table = {
    "reference": dispatch.Candidate(reference.simple_linear_attention),
    "xla": dispatch.Candidate(xla.simple_linear_attention),
}
