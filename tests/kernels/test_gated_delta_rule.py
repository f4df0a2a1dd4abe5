"""The gated delta rule: the reference against numpy, every implementation against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import gated_delta_rule
from pallas_kernels.gated_delta_rule import xla
from pallas_kernels.gated_delta_rule.cases import BY_NAME, Case, accepted, tagged
from tests.closeness import assert_close
from tests.kernels import token_loop
from tests.quick_compile import QUICK_COMPILE


@functools.partial(
    jax.jit, static_argnames=("implementation", "chunk_size"), compiler_options=QUICK_COMPILE
)
def outputs(arguments, integers, *, implementation, chunk_size):
    return gated_delta_rule(
        **arguments, **integers, chunk_size=chunk_size, implementation=implementation
    )


@functools.partial(
    jax.jit,
    static_argnames=("implementation", "chunk_size", "tiling"),
    compiler_options=QUICK_COMPILE,
)
def outputs_and_gradients(
    arguments, integers, cotangents, *, implementation, chunk_size, tiling=None
):
    """{"o", "final_state", "dq", ...}: outputs, and gradients of <outputs, cotangents>."""

    def op(arguments):
        return gated_delta_rule(
            **arguments, **integers, chunk_size=chunk_size, implementation=implementation
        )

    with pytest.MonkeyPatch.context() as patch:
        if tiling is not None:
            patch.setattr(xla, "choose_tiling", lambda *_: xla.Tiling(*tiling))
        (o, final_state), pullback = jax.vjp(op, arguments)
        gradients = pullback(cotangents)[0]
    named = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"o": o, "final_state": final_state} | named


def upcast(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@functools.cache
def drawn(case: Case, dtype: str):
    """Inputs of `case` in `dtype`, and the reference's results from the same values in fp32."""
    arguments, integers, cotangents = case.draw(jax.random.key(len(case.name)), dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    expected = outputs_and_gradients(
        upcast(arguments, wide),
        integers,
        upcast(cotangents, wide),
        implementation="reference",
        chunk_size=case.chunk_size,
    )
    return (arguments, integers, cotangents), expected


def check(case: Case, dtype: str, tiling: tuple[int, int] | None = None):
    inputs, expected = drawn(case, dtype)
    actual = outputs_and_gradients(
        *inputs, implementation="xla", chunk_size=case.chunk_size, tiling=tiling
    )
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted(dtype)[name], f"{case.name}: {name}")


ALIKE = ("T64", "T75", "T1000", "odd-chunks")  # other lengths and chunks stay in the default tier
CI = pytest.mark.parametrize("case", tagged("ci"), ids=lambda case: case.name)


@pytest.mark.covers("gated_delta_rule", "reference", "forward")
@CI
def test_reference_is_the_token_loop(case, float64):
    arguments, integers, _ = case.draw(jax.random.key(1), "float64")
    o, final_state = outputs(
        arguments, integers, implementation="reference", chunk_size=case.chunk_size
    )
    o_loop, final_loop = token_loop.gated_delta_rule(
        **jax.tree.map(np.asarray, arguments | integers), chunk_size=case.chunk_size
    )
    assert_close(o, o_loop, 1e-12, "o")
    assert_close(final_state, final_loop, 1e-12, "final_state")


@pytest.mark.covers("gated_delta_rule", "xla")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in ALIKE else [])
        for case in tagged("ci")
    ],
)
def test_xla_matches_the_reference_in_float32(case):
    check(case, "float32")


@pytest.mark.parametrize(
    ("name", "tiling"),
    [("packed", (64, 2)), ("packed", (128, 1)), ("odd-chunks", (21, 3))],
)
def test_no_tiling_changes_the_result(name, tiling):
    check(BY_NAME[name], "float32", tiling)


def test_xla_matches_the_reference_in_float64(float64):
    check(BY_NAME["packed"], "float64", (128, 2))


@pytest.mark.covers("gated_delta_rule", "xla")
@pytest.mark.parametrize(
    "name",
    [
        "packed",
        "extreme-mixed",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("negative-eigenvalues", "slow-decay", "slow-mixed")
        ),
    ],
)
def test_xla_matches_the_reference_in_bfloat16(name):
    check(BY_NAME[name], "bfloat16")


@pytest.mark.slow
def test_long_tiles_and_stretches_match_the_reference_in_bfloat16():
    check(BY_NAME["T1000"], "bfloat16", (128, 4))


@pytest.mark.covers("gated_delta_rule", "xla")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", tagged("fla"), ids=lambda case: case.name)
def test_xla_matches_the_reference_on_the_shapes_of_flash_linear_attention(case, dtype):
    check(case, dtype)


@pytest.mark.covers("gated_delta_rule", "{implementation}", "backward")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_match_finite_differences(implementation, float64):
    case = Case("tiny", 1, 11, 1, 2, 3, 2, chunk_size=4, write_mask=True, documents=(6, 5))
    arguments, integers, _ = case.draw(jax.random.key(3), "float64")
    options = integers | case.options

    @jax.jit
    def op(arguments):
        return gated_delta_rule(**arguments, **options, implementation=implementation)

    check_grads(op, (arguments,), order=1, modes=["rev"], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_output_and_state_dtypes_follow_the_contract(implementation):
    case = BY_NAME["T65-grouped"]
    arguments, _, _ = jax.eval_shape(lambda key: case.draw(key, "bfloat16"), jax.random.key(0))
    op = functools.partial(gated_delta_rule, implementation=implementation)
    o, state = jax.eval_shape(lambda arguments: op(**arguments), arguments)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_boolean_mask_is_a_mask_of_zeros_and_ones():
    case = BY_NAME["T64"]
    arguments, integers, _ = case.draw(jax.random.key(0), "float32")
    mask = arguments["write_mask"] > 0
    options = {"implementation": "xla", "chunk_size": case.chunk_size}
    boolean = outputs(arguments | {"write_mask": mask}, integers, **options)
    numbers = outputs(arguments | {"write_mask": mask.astype(jnp.float32)}, integers, **options)
    jax.tree.map(np.testing.assert_array_equal, boolean, numbers)


def test_residuals_grow_linearly_with_the_sequence():
    def residual_bytes(tokens):
        case = Case("memory", 1, tokens, 1, 2, 16, 16)
        arguments, _, _ = jax.eval_shape(lambda key: case.draw(key, "float32"), jax.random.key(0))

        def residuals(arguments):
            return jax.vjp(lambda a: gated_delta_rule(**a, implementation="xla"), arguments)[1]

        shapes = jax.tree.leaves(jax.eval_shape(residuals, arguments))
        return sum(x.size * x.dtype.itemsize for x in shapes)

    first, second, third = (residual_bytes(tokens) for tokens in (256, 512, 1024))
    assert third - second == 2 * (second - first)
