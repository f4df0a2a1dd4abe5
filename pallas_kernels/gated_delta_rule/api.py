"""The public op: its contract, the checks made before anything compiles, the implementations."""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv
from pallas_kernels.gated_delta_rule import pallas_gpu, reference, xla


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What decides which implementation can run: shapes, dtypes, options; no values."""

    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int
    dtype: str  # of q, k, v and o
    chunk_size: int
    write_mask: bool
    segments: bool


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
    problem = _check(q, k, v, g, beta, initial_state, write_mask, segment_ids, scale, chunk_size)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    B, H, K, V = problem.B, problem.H, problem.K, problem.V
    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, V), dtype)
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


def _check(q, k, v, g, beta, initial_state, write_mask, segment_ids, scale, chunk_size) -> Problem:
    """Raises TypeError or ValueError in one line: the argument, what it is, what it must be."""
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {"initial_state": initial_state, "write_mask": write_mask}
    for name, x in (arrays | {n: x for n, x in optional.items() if x is not None}).items():
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if not floating and not (name == "write_mask" and x.dtype == jnp.bool_):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be floating")
    for name in ("k", "v"):
        if arrays[name].dtype != q.dtype:
            raise TypeError(f"{name} has dtype {arrays[name].dtype}, q has {q.dtype}; use one")
    for name, letters in (("q", "[B, T, Hk, K]"), ("v", "[B, T, H, V]")):
        if arrays[name].ndim != 4:
            raise ValueError(f"{name} has {arrays[name].ndim} axes; it must be 4: {letters}")
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; it must be an integer >= 1")
    for name, size in (("B", B), ("T", T), ("Hk", Hk), ("K", K), ("H", H), ("V", V)):
        if size < 1:
            raise ValueError(f"axis {name} has size {size}; it must be >= 1")
    if H % Hk:
        raise ValueError(f"v has {H} heads, q and k have {Hk}; {H} is not a multiple of {Hk}")
    expected = {
        "k": (B, T, Hk, K),
        "v": (B, T, H, V),
        "g": (B, T, H),
        "beta": (B, T, H),
        "initial_state": (B, H, K, V),
        "write_mask": (B, cdiv(T, chunk_size), H),
        "segment_ids": (B, T),
    }
    for name, x in (arrays | optional | {"segment_ids": segment_ids}).items():
        if x is not None and name != "q" and x.shape != expected[name]:
            raise ValueError(f"{name} has shape {x.shape}; it must be {expected[name]}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids has dtype {segment_ids.dtype}; it must be an integer type")
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a Python number")
    concrete = not isinstance(g, jax.core.Tracer) and getattr(g, "is_fully_addressable", True)
    if concrete and (largest := float(np.max(np.asarray(g)))) > 0:
        raise ValueError(f"g reaches {largest:g}; a log decay must be <= 0")
    return Problem(
        B=B,
        T=T,
        Hk=Hk,
        H=H,
        K=K,
        V=V,
        dtype=q.dtype.name,
        chunk_size=chunk_size,
        write_mask=write_mask is not None,
        segments=segment_ids is not None,
    )


IMPLEMENTATIONS: dispatch.Table = {
    "reference": dispatch.Candidate(reference.gated_delta_rule),
    "xla": dispatch.Candidate(xla.gated_delta_rule),
    "pallas_gpu": dispatch.Candidate(pallas_gpu.gated_delta_rule, pallas_gpu.unsupported),
}
