"""Vector-decay linear attention: the reference against numpy, XLA against the reference, laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import gated_delta_rule, gated_linear_attention
from pallas_kernels.gated_linear_attention.cases import BY_NAME, Case, accepted, tagged
from tests.closeness import assert_close
from tests.kernels import recurrences, token_loop
from tests.quick_compile import QUICK_COMPILE

check = functools.partial(recurrences.check, gated_linear_attention, accepted=accepted)
RULES = ("gla", "rwkv6", "kda")
every_rule = pytest.mark.parametrize("rule", RULES)


@pytest.mark.covers("gated_linear_attention", "reference", "forward")
@every_rule
def test_reference_is_the_token_loop(rule, float64):
    case = BY_NAME[f"{rule}-packed"]
    (arguments, integers, _), actual = recurrences.drawn(gated_linear_attention, case, "float64")
    o, final = token_loop.linear_attention(**jax.tree.map(np.asarray, arguments | integers))
    assert_close(actual["o"], o, 1e-12, "o")
    assert_close(actual["final_state"], final, 1e-12, "final_state")


@pytest.mark.covers("gated_linear_attention", "xla")
@pytest.mark.parametrize("case", tagged("ci"), ids=lambda case: case.name)
def test_xla_matches_the_reference_in_float32(case):
    check(case, "float32")


@pytest.mark.covers("gated_linear_attention", "xla")
@pytest.mark.parametrize("name", ["T65", "extreme-mixed"])
@every_rule
def test_xla_matches_the_reference_in_bfloat16(rule, name):
    check(BY_NAME[f"{rule}-{name}"], "bfloat16")


@pytest.mark.covers("gated_linear_attention", "xla")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", tagged("fla"), ids=lambda case: case.name)
def test_xla_matches_the_reference_on_the_shapes_of_flash_linear_attention(case, dtype):
    check(case, dtype)


@pytest.mark.covers("gated_linear_attention", "xla", "backward")
@every_rule
def test_gradients_match_finite_differences(rule, float64):
    case = Case("tiny", rule, 1, 11, 1, 2, 3, 2, chunk_size=4, documents=(6, 5))
    arguments, integers, _ = case.draw(jax.random.key(3), "float64")
    op = functools.partial(gated_linear_attention, **integers, **case.options)
    check_grads(
        jax.jit(lambda a: op(**a, implementation="xla")),
        (arguments,),
        order=1,
        modes=["rev"],
        rtol=1e-6,
    )


@functools.partial(jax.jit, static_argnames=("op",), compiler_options=QUICK_COMPILE)
def run(arguments, op=gated_linear_attention):
    return op(**arguments, implementation="xla")


def test_equal_channels_are_the_gated_delta_rule():
    arguments, _, _ = BY_NAME["kda-T65"].draw(jax.random.key(0), "float32")
    g = arguments["g"][..., 0]
    wide = arguments | {"g": jnp.broadcast_to(g[..., None], arguments["g"].shape)}
    narrow = run(arguments | {"g": g}, gated_delta_rule)
    for name, x, y in zip(("o", "final_state"), run(wide), narrow, strict=True):
        assert_close(x, y, 2e-6, name)


@every_rule
def test_split_and_carry_the_state(rule):
    arguments, _, _ = BY_NAME[f"{rule}-T65"].draw(jax.random.key(1), "float32")
    o, final = run(arguments)
    by_token = ("q", "k", "v", "g", "beta")
    for cut in (1, 16, 33):
        first, second = (
            {n: x[:, part] if n in by_token else x for n, x in arguments.items()}
            for part in (np.s_[:cut], np.s_[cut:])
        )
        head, state = run(first)
        tail, end = run(second | {"initial_state": state})
        assert_close(jnp.concatenate([head, tail], 1), o, 2e-6, f"o cut at {cut}")
        assert_close(end, final, 2e-6, f"final state cut at {cut}")


def test_residuals_are_the_arguments():
    case = BY_NAME["gla-T1000"]
    arguments = jax.eval_shape(lambda key: case.draw(key, "float32")[0], jax.random.key(0))

    def residuals(arguments):
        op = functools.partial(gated_linear_attention, implementation="xla")
        return jax.vjp(lambda a: op(**a), arguments)[1]

    kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, arguments)))
    assert kept <= 1.1 * sum(x.size for x in jax.tree.leaves(arguments))  # padding


def test_bad_arguments_are_named():
    x = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"g has shape \(1, 8, 2\); it must be \(1, 8, 2, 4\)"):
        gated_linear_attention(x, x, x, x[..., 0])
    with pytest.raises(ValueError, match=r"bonus has shape \(4, 2\); it must be \(2, 4\)"):
        gated_linear_attention(x, x, x, x, bonus=x[0, :4, :, 0])
    with pytest.raises(ValueError, match="beta and bonus are both given"):
        gated_linear_attention(x, x, x, x, beta=x[..., 0], bonus=x[0, 0])
