"""Compiled calls of block_sparse_attention and drawn inputs, shared by its tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from quick_compile import QUICK_COMPILE

from pallas_kernels import block_sparse_attention
from pallas_kernels.block_sparse_attention.cases import Case

OPTIONS = ("window", "softcap", "scale")  # Python numbers; everything else is traced


def _split_options(fixed: dict) -> tuple[dict, dict]:
    options = {name: fixed[name] for name in OPTIONS if name in fixed}
    return options, {name: x for name, x in fixed.items() if name not in OPTIONS}


def drawn(case: Case, dtype) -> tuple[dict, dict, tuple]:
    """Differentiable arguments, all the others, and cotangents of (o, lse)."""
    arguments, arrays, cotangents = case.draw(jax.random.key(0), jnp.dtype(dtype))
    return arguments, arrays | case.options, cotangents


def attend(implementation: str, arguments: dict, **fixed):
    """(o, lse)."""
    options, traced = _split_options(fixed)
    return _forward(implementation, **options)(arguments, traced)


def outputs_and_gradients(implementation: str, arguments: dict, fixed: dict, cotangents) -> dict:
    """{"o", "lse", "dq", ...}: outputs, and gradients of <outputs, cotangents>."""
    options, traced = _split_options(fixed)
    return _forward_backward(implementation, **options)(arguments, traced, cotangents)


# One compiled function for all calls with the same options, because compiling is most of a test.
@functools.cache
def _forward(implementation: str, **options):
    def op(arguments, traced):
        call = {**arguments, **traced, **options}
        return block_sparse_attention(**call, implementation=implementation)

    return jax.jit(op, compiler_options=QUICK_COMPILE)


@functools.cache
def _forward_backward(implementation: str, **options):
    def run(arguments, traced, cotangents):
        def op(arguments):
            call = {**arguments, **traced, **options}
            return block_sparse_attention(**call, implementation=implementation)

        (o, lse), vjp = jax.vjp(op, arguments)
        return {"o": o, "lse": lse} | {f"d{x}": dx for x, dx in vjp(cotangents)[0].items()}

    return jax.jit(run, compiler_options=QUICK_COMPILE)


def normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(B=2, T=32, H=4, G=2, K=8, V=8, S=None, seed=0) -> dict:
    shapes = {"q": (B, T, H, K), "k": (B, S or T, G, K), "v": (B, S or T, G, V)}
    return {name: normal(3 * seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def cotangents_for(arguments: dict, seed: int = 1000):
    (B, T, H, _), V = arguments["q"].shape, arguments["v"].shape[3]
    return normal(seed, B, T, H, V), normal(seed + 1, B, H, T)


def pack(documents: list[dict], lengths: list[int], block: int) -> tuple[dict, np.ndarray]:
    """One row holding the documents from block boundaries on, zeros as padding between them."""
    slots = [-(-length // block) * block for length in lengths]
    ids = np.concatenate(
        [
            np.where(np.arange(slot) < length, n, -1)
            for n, (slot, length) in enumerate(zip(slots, lengths, strict=True))
        ]
    )
    row = {
        name: jnp.concatenate(
            [
                jnp.pad(x[name], ((0, 0), (0, slot - x[name].shape[1]), (0, 0), (0, 0)))
                for x, slot in zip(documents, slots, strict=True)
            ],
            axis=1,
        )
        for name in documents[0]
    }
    return row, ids[None]
