"""The affine map of a stretch: against the rule it stands for, composed, and its gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule, gated_delta_rule_map
from pallas_kernels.gated_delta_rule.cases import Case
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

SLOW = {"decay_divisor": 100.0}  # a transition that is not nothing
PLAIN = Case("plain", 1, 140, 1, 2, 16, 24, largest_beta=2.0, **SLOW)
MASKED = Case("masked", 2, 96, 2, 4, 16, 16, write_mask=True, chunk_size=32, **SLOW)
PACKED = Case("packed", 1, 130, 1, 2, 16, 32, documents=(40, 65, 25), write_mask=True, **SLOW)
FIXED = ("initial_state", "q")


@functools.partial(
    jax.jit, static_argnames=("implementation", "chunk_size"), compiler_options=QUICK_COMPILE
)
def by_map(arguments, fixed, dstate, *, implementation, chunk_size):
    """(map, state after it, gradients) of a case's arguments."""

    def after(arguments):
        given = {name: x for name, x in arguments.items() if name not in FIXED}
        options = {"implementation": implementation, "chunk_size": chunk_size}
        stretch = gated_delta_rule_map(**given, **fixed, **options)
        return stretch(arguments["initial_state"]), stretch

    state, pullback, stretch = jax.vjp(after, arguments, has_aux=True)
    return stretch, state, pullback(dstate)[0]


@functools.partial(jax.jit, static_argnames="chunk_size", compiler_options=QUICK_COMPILE)
def by_rule(arguments, fixed, dstate, *, chunk_size):
    def after(arguments):
        options = {"implementation": "reference", "chunk_size": chunk_size}
        return gated_delta_rule(**arguments, **fixed, **options)[1]

    state, pullback = jax.vjp(after, arguments)
    return state, pullback(dstate)[0]


@pytest.mark.covers("gated_delta_rule_map", "{implementation}")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", [PLAIN, MASKED, PACKED], ids=lambda case: case.name)
def test_the_map_takes_a_state_and_a_gradient_where_the_rule_takes_them(case, implementation, key):
    arguments, fixed, (_, dstate) = case.draw(key, "float32")
    options = case.options
    _, actual, gradients = by_map(
        arguments, fixed, dstate, implementation=implementation, **options
    )
    expected, expected_gradients = by_rule(arguments, fixed, dstate, **options)
    assert_close(actual, expected, 1e-5, "state")
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, 1e-5, f"d{name}", floor=1e-7)


def test_the_transition_is_the_product_of_the_tokens():
    case = Case("short", 1, 9, 1, 1, 8, 8)
    arguments, fixed, (_, dstate) = case.draw(jax.random.key(3), "float32")
    stretch, _, _ = by_map(arguments, fixed, dstate, implementation="xla", chunk_size=64)
    expected = np.eye(8)
    for t in range(9):
        k, g, beta = (np.float64(arguments[x][0, t, 0]) for x in ("k", "g", "beta"))
        expected = np.exp(g) * (np.eye(8) - beta * np.outer(k, k)) @ expected
    assert_close(stretch.transition[0, 0], expected, 1e-5, "transition")


def part(case: Case, arguments, fixed, start: int, stop: int):
    """The map of tokens start..stop of the case's rows."""
    given = {name: arguments[name][:, start:stop] for name in ("k", "v", "g", "beta")}
    given |= {name: x[:, start:stop] for name, x in fixed.items()}
    if case.write_mask:
        chunks = slice(start // case.chunk_size, -(-stop // case.chunk_size))
        given["write_mask"] = arguments["write_mask"][:, chunks]
    compiled = jax.jit(
        functools.partial(gated_delta_rule_map, implementation="xla", **case.options),
        compiler_options=QUICK_COMPILE,
    )
    return compiled(**given)


@pytest.mark.parametrize(
    ("case", "cuts"), [(PLAIN, (77,)), (MASKED, (32, 64))], ids=lambda x: getattr(x, "name", "")
)
def test_stretches_compose_to_the_whole(case, cuts):
    arguments, fixed, _ = case.draw(jax.random.key(4), "float32")
    bounds = (0, *cuts, case.T)
    stretches = (part(case, arguments, fixed, *x) for x in itertools.pairwise(bounds))
    composed = functools.reduce(lambda first, later: first.then(later), stretches)
    whole = part(case, arguments, fixed, 0, case.T)
    assert_close(composed.transition, whole.transition, 1e-5, "transition")
    assert_close(composed.increment, whole.increment, 1e-5, "increment")


def test_a_reset_inside_forgets_what_entered():
    arguments, fixed, _ = PACKED.draw(jax.random.key(5), "float32")
    whole, first = (part(PACKED, arguments, fixed, 0, stop) for stop in (PACKED.T, 40))
    assert (whole.transition == 0).all() and whole.increment.any()
    assert jnp.abs(first.transition).max() > 0.1


def test_bfloat16_keys_give_a_map_in_float32():
    # Few tokens: what is left after many of beta up to 2 is small beside what was rounded.
    arguments, fixed, _ = PLAIN.draw(jax.random.key(6), "bfloat16")
    exact = {name: x.astype(jnp.float32) for name, x in arguments.items()}
    stretch, expected = (part(PLAIN, x, fixed, 0, 8) for x in (arguments, exact))
    assert {x.dtype.name for x in stretch} == {"float32"}
    assert_close(stretch.transition, expected.transition, 5e-3, "transition")
    assert_close(stretch.increment, expected.increment, 5e-3, "increment")
