"""The public op: its contract, the checks made before anything compiles, the implementations."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float
from pallas_kernels.checks import check_recurrence
from pallas_kernels.gated_delta_step import pallas_gpu, pallas_tpu, reference, xla

SHAPES = {
    "q": "B Hk K",
    "k": "B Hk K",
    "v": "B H V",
    "g": "B H",
    "beta": "B H",
    "state": "B H K V",
}


def gated_delta_step(
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
    *,
    scale: float | None = None,
    implementation: dispatch.Implementation = "auto",
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """`gated_delta_rule` of one token per row, the step of decoding:

        S <- exp(g) S + k (beta (v - exp(g) S^T k))^T;  o = scale S^T q

    The rows are requests of any length; one with g = 0 and beta = 0 keeps its state. The Pallas
    kernels read and write the state once, in place where the caller gives it away: the carry of a
    loop, or an argument that `jax.jit` donates. Arguments are those of `gated_delta_rule` without
    the time axis.

    Returns:
      o [B, H, V] in the dtype of v and the new state in fp32 (float64 for float64 inputs), both
      differentiable in every argument; gradients are those of `xla`.
    """
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    problem = check_recurrence(arguments, SHAPES, scale=scale, chunk_size=1)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    candidate = dispatch.resolve("gated_delta_step", IMPLEMENTATIONS, implementation, problem)
    g, beta, state = (x.astype(dtype) for x in (g, beta, state))
    return candidate.run(problem.K**-0.5 if scale is None else scale, q, k, v, g, beta, state)


def _differentiable(kernel: Callable) -> Callable:
    """`kernel` with the gradients of `xla`."""
    run = jax.custom_vjp(kernel, nondiff_argnums=(0,))

    def backward(scale, arguments, cotangents):
        return jax.vjp(functools.partial(xla.step, scale), *arguments)[1](cotangents)

    run.defvjp(lambda scale, *arguments: (kernel(scale, *arguments), arguments), backward)
    return run


IMPLEMENTATIONS: dispatch.Table = {
    "reference": dispatch.Candidate(reference.step),
    "xla": dispatch.Candidate(xla.step),
    "pallas_tpu": dispatch.Candidate(_differentiable(pallas_tpu.step), pallas_tpu.unsupported),
    "pallas_gpu": dispatch.Candidate(_differentiable(pallas_gpu.step), pallas_gpu.unsupported),
}
