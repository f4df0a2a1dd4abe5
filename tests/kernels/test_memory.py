"""Bytes that forward+backward holds: counted on known functions, and of the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, gated_delta_rule
from pallas_kernels.gated_delta_rule import pallas_gpu
from pallas_kernels.gated_delta_rule.cases import tagged
from pallas_kernels.memory import Memory, compiled_bytes, describe, kept_bytes


def test_arguments_and_what_was_computed_are_told_apart():
    x = jax.ShapeDtypeStruct((100,), jnp.float32)

    def op(arguments):
        return jnp.sin(arguments["x"]) * arguments["y"]  # keeps y, sin(x) and cos(x)

    assert kept_bytes(op, {"x": x, "y": x}) == (1200, 800)


def test_a_compiled_program_is_arguments_results_and_temporaries():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    held, temporaries = compiled_bytes(jax.jit(lambda x: x[::-1] + 1).lower(x).compile())
    assert held == 8000 + temporaries


def test_a_bound_that_is_missed_says_so():
    text = describe(Memory(kept=1_000_000, temporaries=3_000_000), Memory(2_000_000, 2_500_000))
    kept, temporaries = text.split("), ")
    assert kept.endswith("1.0 MB (at most 2.0") and temporaries.endswith(
        "3.0 MB (at most 2.5, MORE)"
    )


@pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[] if x.name == "natsl-800m" else pytest.mark.slow, id=x.name)
        for x in tagged("bench")
    ],
)
def test_the_hopper_kernels_keep_no_more_than_their_bound(case, monkeypatch):
    hopper = dispatch.Target("gpu", "NVIDIA H200")
    monkeypatch.setattr(dispatch.Target, "current", lambda: hopper)
    op = functools.partial(gated_delta_rule, implementation="pallas_gpu", **case.options)
    arguments, integers, _ = jax.eval_shape(
        functools.partial(case.draw, dtype="bfloat16"), jax.random.key(0)
    )
    kept, _ = kept_bytes(lambda x: op(**x, **integers), arguments)
    assert kept <= case.memory_bounds("bfloat16").kept
