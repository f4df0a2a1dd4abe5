"""The public op: its contract, the checks made before anything compiles, the implementations."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.checks import Problem as Problem
from pallas_kernels.checks import check_recurrence, zeros
from pallas_kernels.gated_delta_rule import pallas_gpu, pallas_tpu, reference, xla

SHAPES = {
    "q": "B T Hk K",
    "k": "B T Hk K",
    "v": "B T H V",
    "g": "B T H",
    "beta": "B T H",
    "initial_state": "B H K V",
    "write_mask": "B N H",
    "segment_ids": "B T",
}


def gated_delta_rule(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    write_mask: Float[Array, "B N H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Linear attention whose state decays by exp(g) and is corrected towards v along k.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
        o_t = scale S_t^T q_t

    (Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464; g = 0 is DeltaNet,
    arXiv 2406.06484.) q and k are used as given: normalise them before the call. Value head j reads
    and writes with query/key head j // (H / Hk). A token with g = 0 and beta = 0 changes nothing,
    which makes it padding.

    Args:
      g: log decay, <= 0.
      beta: write strength, in [0, 1], or [0, 2] for negative eigenvalues.
      initial_state: state before the first token; zeros by default. Belongs to the row's first
        document.
      write_mask: per chunk of `chunk_size` tokens of the row, the weight m_c of the chunk's whole
        write (the erase included) in the state that later chunks see; the decay is kept:
        S_next = exp(sum of g) S + m_c dS. None means 1. A chunk's own outputs never depend on
        its own weight; `final_state` applies it to the last chunk too, whole or partial.
      segment_ids: the state is reset to zero where the id changes along the row, at any position.
        After a reset inside a chunk only what was written since remains, times m_c.
      scale: of the query; K ** -0.5 by default.
      chunk_size: the unit of `write_mask`. Without a mask it does not change the result.
      precision: of the matrix products of fp32 inputs in `xla`; the highest by default.
      implementation: `auto` takes the fastest that runs here; any other name runs or raises.

    Returns:
      o [B, T, H, V] in the dtype of v, and final_state [B, H, K, V] in fp32 (float64 for float64
      inputs). Products accumulate in fp32; both are differentiable in every floating input.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    arguments |= {"write_mask": write_mask, "segment_ids": segment_ids}
    problem = check_recurrence(arguments, SHAPES, scale=scale, chunk_size=chunk_size)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    B, H, K, V = problem.B, problem.H, problem.K, problem.V
    if initial_state is None:
        initial_state = zeros((B, H, K, V), dtype, like=(q, k, v, g, beta))
    candidate = dispatch.resolve("gated_delta_rule", IMPLEMENTATIONS, implementation, problem)
    return candidate.run(
        q,
        k,
        v,
        g.astype(dtype),
        beta.astype(dtype),
        initial_state=initial_state.astype(dtype),
        write_mask=None if write_mask is None else write_mask.astype(dtype),
        segment_ids=segment_ids,
        scale=K**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        precision=precision,
    )


IMPLEMENTATIONS: dispatch.Table = {
    "reference": dispatch.Candidate(reference.gated_delta_rule),
    "xla": dispatch.Candidate(xla.gated_delta_rule),
    "pallas_tpu": dispatch.Candidate(
        pallas_tpu.gated_delta_rule, pallas_tpu.unsupported, names_kept=True
    ),
    "pallas_gpu": dispatch.Candidate(
        pallas_gpu.gated_delta_rule, pallas_gpu.unsupported, names_kept=True
    ),
}
