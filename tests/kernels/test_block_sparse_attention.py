"""Block-sparse attention: values and gradients of every implementation against the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from kernels import attention_oracle
from kernels.attention_calls import drawn, outputs_and_gradients

from pallas_kernels import BlockMask, block_sparse_attention
from pallas_kernels.block_sparse_attention import xla
from pallas_kernels.block_sparse_attention.cases import BY_NAME, tagged

TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 5e-3}
CASES = [case.name for case in tagged("ci")]


@functools.cache
def solved(implementation: str, name: str, dtype: str) -> dict:
    """Outputs and gradients of a case; float64 in xla takes short blocks and two spans."""
    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            patch.setattr(xla, "QUERY_BLOCK", 7)
            patch.setattr(xla, "SPAN_TOKENS", 20)
            patch.setattr(xla, "MAX_SPANS", 2)
        problem = drawn(BY_NAME[name], dtype)
        return outputs_and_gradients(implementation, *problem)


@functools.cache
def oracle(name: str):
    with jax.enable_x64(True):
        arguments, fixed, _ = drawn(BY_NAME[name], jnp.float64)
        everything = arguments | fixed
        return attention_oracle.attention(everything, *attention_oracle.pairs(everything))


@pytest.mark.covers("block_sparse_attention", "{implementation}", "forward")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_contract_pair_by_pair(name, implementation):
    found = solved(implementation, name, "float64")
    o, lse = oracle(name)
    assert_close(found["o"], o, 1e-10, "o")
    assert_close(found["lse"], lse, 1e-10, "lse")


@pytest.mark.covers("block_sparse_attention", "reference", "backward")
@pytest.mark.parametrize("name", ["causal", "chunks-capped-offset", "everything"])
def test_gradients_are_the_slopes_of_the_contract(float64, name):
    arguments, fixed, (do, dlse) = drawn(BY_NAME[name], jnp.float64)
    visible, biased = attention_oracle.pairs(arguments | fixed)
    seen = visible.any(-1)

    def loss(arguments):
        o, lse = attention_oracle.attention(arguments | fixed, visible, biased)
        return np.sum(o * np.asarray(do)) + np.sum(np.asarray(dlse)[seen] * lse[seen])

    gradients = solved("reference", name, "float64")
    for argument, x in arguments.items():
        x = np.asarray(x)
        step = 1e-5 * np.random.default_rng(0).standard_normal(x.shape)
        ahead, behind = (loss(arguments | {argument: x + sign * step}) for sign in (1, -1))
        slope = np.vdot(gradients[f"d{argument}"], step)
        assert_close(slope, (ahead - behind) / 2, 1e-7, f"d{argument}")


@pytest.mark.covers("block_sparse_attention", "xla")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float64") for name in CASES]
    + [(name, "float32") for name in ("one-query", "blocks", "everything")]
    + [(name, "bfloat16") for name in ("causal", "chunks", "mixed-packed-windowed")],
)
def test_xla_equals_the_reference(name, dtype):
    actual, expected = solved("xla", name, dtype), solved("reference", name, dtype)
    assert actual.keys() == expected.keys()
    for result in expected:
        assert actual[result].dtype == expected[result].dtype, result
        assert_close(actual[result], expected[result], TOLERANCE[dtype], result, floor=1e-30)


def test_a_long_row_never_holds_all_its_scores():
    T = 4096
    shape = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)

    def loss(q, k, v):
        o, lse = block_sparse_attention(q, k, v, BlockMask.causal(), implementation="xla")
        return o.sum() + lse.sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T  # a quarter of fp32 scores


def test_the_backward_pass_is_deterministic():
    problem = drawn(BY_NAME["chunks"], jnp.float32)
    first, second = (outputs_and_gradients("xla", *problem) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
