"""The public op: its contract and its implementations."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.gated_linear_attention import pallas_gpu, pallas_tpu, reference, xla

SHAPES = {
    "q": "B T Hk K",
    "k": "B T Hk K",
    "v": "B T H V",
    "g": "B T H K",
    "beta": "B T H",
    "bonus": "H K",
    "initial_state": "B H K V",
    "segment_ids": "B T",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem(checks.Problem):
    """What decides which implementation can run."""

    beta: bool
    bonus: bool


def gated_linear_attention(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    *,
    beta: Float[Array, "B T H"] | None = None,
    bonus: Float[Array, "H K"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Linear attention whose state decays by exp(g), each key channel at its own rate.

        S_t = Diag(exp g_t) S_{t-1} + k_t u_t^T,    o_t = scale S_t^T q_t,    u_t = v_t

    Gated Linear Attention (arXiv 2312.06635); with k = 1 - exp(g), HGRN-2 (arXiv 2404.07904).

    `beta` adds the delta rule, Kimi Delta Attention (arXiv 2510.26692): what is written is the
    correction u_t = beta_t (v_t - (Diag(exp g_t) S_{t-1})^T k_t).

    `bonus` reads the state before the token's decay and write, and the token itself through a
    weight of its own: o_t = scale (S_{t-1} + Diag(bonus) k_t v_t^T)^T q_t, RWKV-6 (arXiv
    2404.05892).

    Value head j reads and writes with query/key head j // (H / Hk). A token with g = 0 and k = 0
    (or beta = 0) changes nothing, which makes it padding.

    Args:
      g: log decay, <= 0. Any size is safe: no positive number is ever exponentiated.
      beta: write strength, in [0, 1], or [0, 2] for negative eigenvalues. Not with `bonus`.
      initial_state: state before the first token; zeros by default. Belongs to the row's first
        document.
      segment_ids: the state is reset to zero where the id changes along the row, at any position.
      scale: of the query; K ** -0.5 by default.
      chunk_size: tokens computed together; it does not change the result.
      precision: of the matrix products of fp32 inputs in `xla`; the highest by default.
      implementation: `auto` takes the fastest that runs here; any other name runs or raises.

    Returns:
      o [B, T, H, V] in the dtype of v, and final_state [B, H, K, V] in fp32 (float64 for float64
      inputs). Products accumulate in fp32; both are differentiable in every floating input.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "bonus": bonus}
    arguments |= {"initial_state": initial_state, "segment_ids": segment_ids}
    shared = checks.check_recurrence(arguments, SHAPES, scale=scale, chunk_size=chunk_size)
    if beta is not None and bonus is not None:
        raise ValueError("beta and bonus are both given; a rule has one of them or none")
    problem = Problem(**dataclasses.asdict(shared), beta=beta is not None, bonus=bonus is not None)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if initial_state is None:
        shape = (problem.B, problem.H, problem.K, problem.V)
        initial_state = checks.zeros(shape, dtype, like=(q, k, v, g))
    candidate = dispatch.resolve("gated_linear_attention", IMPLEMENTATIONS, implementation, problem)
    return candidate.run(
        q,
        k,
        v,
        g.astype(dtype),
        beta=None if beta is None else beta.astype(dtype),
        bonus=None if bonus is None else bonus.astype(dtype),
        initial_state=initial_state.astype(dtype),
        segment_ids=segment_ids,
        scale=problem.K**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        precision=precision,
    )


def _differentiable(kernels: Callable) -> Callable:
    """`kernels` with the gradients of `xla`: their own were wrong on an H200 (README.md)."""

    def run(
        q: Array, k: Array, v: Array, g: Array, *, scale, chunk_size, precision, **rest
    ) -> tuple[Array, Array]:
        options = {"scale": scale, "chunk_size": chunk_size, "precision": precision}
        arguments = {"q": q, "k": k, "v": v, "g": g, **rest}
        rule = jax.custom_vjp(lambda arguments: kernels(**arguments, **options))

        def backward(arguments: dict, cotangents: tuple) -> tuple[dict]:
            floating = {name: x for name, x in arguments.items() if name != "segment_ids"}

            def attend(floating: dict) -> tuple[Array, Array]:
                ids = arguments["segment_ids"]
                return xla.gated_linear_attention(**floating, segment_ids=ids, **options)

            return ({**jax.vjp(attend, floating)[1](cotangents)[0], "segment_ids": None},)

        rule.defvjp(lambda arguments: (kernels(**arguments, **options), arguments), backward)
        return rule(arguments)

    return run


def _untimed(problem: Problem) -> str:
    """`slower` of kernels whose outputs were right on a GPU, where nobody has timed them."""
    del problem
    return "its forward pass has not been timed and its gradients are those of xla; it runs by name"


IMPLEMENTATIONS: dispatch.Table = {
    "reference": dispatch.Candidate(reference.gated_linear_attention),
    "xla": dispatch.Candidate(xla.gated_linear_attention),
    "pallas_tpu": dispatch.Candidate(pallas_tpu.gated_linear_attention, pallas_tpu.unsupported),
    "pallas_gpu": dispatch.Candidate(
        _differentiable(pallas_gpu.gated_linear_attention), pallas_gpu.unsupported, slower=_untimed
    ),
}
