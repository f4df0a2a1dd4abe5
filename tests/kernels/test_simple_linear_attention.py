"""Scalar-decay linear attention: the reference against numpy, XLA against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import simple_linear_attention
from pallas_kernels.simple_linear_attention.cases import BY_NAME, Case, accepted, tagged
from tests.closeness import assert_close
from tests.kernels import recurrences, token_loop

check = functools.partial(recurrences.check, simple_linear_attention, accepted=accepted)
MAIN = ("T65-grouped", "odd-chunks", "packed", "extreme-mixed")  # every option between them


@pytest.mark.covers("simple_linear_attention", "reference", "forward")
@pytest.mark.parametrize("name", MAIN)
def test_reference_is_the_token_loop(name, float64):
    case = BY_NAME[name]
    (arguments, integers, _), actual = recurrences.drawn(simple_linear_attention, case, "float64")
    o, final = token_loop.linear_attention(
        **jax.tree.map(np.asarray, arguments | integers), **case.options
    )
    assert_close(actual["o"], o, 1e-12, "o")
    assert_close(actual["final_state"], final, 1e-12, "final_state")


@pytest.mark.covers("simple_linear_attention", "xla")
@pytest.mark.parametrize("case", tagged("ci"), ids=lambda case: case.name)
def test_xla_matches_the_reference_in_float32(case):
    check(case, "float32")


@pytest.mark.covers("simple_linear_attention", "xla")
@pytest.mark.parametrize("name", ["packed", "slow-decay", "slow-mixed", "extreme-mixed"])
def test_xla_matches_the_reference_in_bfloat16(name):
    check(BY_NAME[name], "bfloat16")


def test_xla_matches_the_reference_in_float64(float64):
    check(BY_NAME["packed"], "float64")


@pytest.mark.covers("simple_linear_attention", "xla")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", tagged("fla"), ids=lambda case: case.name)
def test_xla_matches_the_reference_on_the_shapes_of_flash_linear_attention(case, dtype):
    check(case, dtype)


@pytest.mark.covers("simple_linear_attention", "{implementation}", "backward")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_match_finite_differences(implementation, float64):
    case = Case("tiny", 1, 11, 1, 2, 3, 2, chunk_size=4, write_mask=True, documents=(6, 5))
    arguments, integers, _ = case.draw(jax.random.key(3), "float64")
    op = functools.partial(
        simple_linear_attention, **integers, **case.options, implementation=implementation
    )
    check_grads(jax.jit(lambda arguments: op(**arguments)), (arguments,), 1, ["rev"], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_output_and_state_dtypes_follow_the_contract(implementation):
    case = BY_NAME["T65-grouped"]
    arguments, _, _ = jax.eval_shape(lambda key: case.draw(key, "bfloat16"), jax.random.key(0))
    op = functools.partial(simple_linear_attention, implementation=implementation)
    o, state = jax.eval_shape(lambda arguments: op(**arguments), arguments)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_residuals_are_the_arguments():
    case = BY_NAME["T1000"]
    arguments = jax.eval_shape(lambda key: case.draw(key, "float32")[0], jax.random.key(0))

    def residuals(arguments):
        op = functools.partial(simple_linear_attention, **case.options, implementation="xla")
        return jax.vjp(lambda a: op(**a), arguments)[1]

    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, arguments)))
    given = sum(x.size for x in jax.tree.leaves(arguments))
    assert kept <= 1.1 * given  # padding


def test_a_wrong_shape_is_named():
    x = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"g has shape \(1, 8, 2, 4\); it must be \(1, 8, 2\)"):
        simple_linear_attention(x, x, x, x)
    with pytest.raises(TypeError, match="v has dtype bfloat16, q has float32"):
        simple_linear_attention(x, x, x.astype(jnp.bfloat16), x[..., 0])
