"""Outputs and gradients of a recurrence op on one of its cases, held to its reference."""

import functools

import jax
import jax.numpy as jnp

from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE


@functools.partial(
    jax.jit, static_argnames=("op", "implementation", "options"), compiler_options=QUICK_COMPILE
)
def outputs_and_gradients(op, arguments, integers, cotangents, *, implementation, options=()):
    """{"o", "final_state", "dq", ...}: outputs, and gradients of <outputs, cotangents>."""

    def run(arguments):
        return op(**arguments, **integers, **dict(options), implementation=implementation)

    (o, final_state), pullback = jax.vjp(run, arguments)
    gradients = pullback(cotangents)[0]
    named = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"o": o, "final_state": final_state} | named


def upcast(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@functools.cache
def drawn(op, case, dtype: str):
    """Inputs of `case` in `dtype`, and the reference's results from the same values in fp32."""
    inputs = case.draw(jax.random.key(len(case.name)), dtype)
    arguments, integers, cotangents = inputs
    wide = jnp.promote_types(dtype, jnp.float32)
    expected = outputs_and_gradients(
        op,
        upcast(arguments, wide),
        integers,
        upcast(cotangents, wide),
        implementation="reference",
        options=tuple(case.options.items()),
    )
    return inputs, expected


def check(op, case, dtype: str, accepted):
    """xla equals the reference in outputs, final state and every gradient."""
    inputs, expected = drawn(op, case, dtype)
    options = tuple(case.options.items())
    actual = outputs_and_gradients(op, *inputs, implementation="xla", options=options)
    for name, reference in expected.items():
        ratio = accepted(dtype)[name]
        assert_close(actual[name], reference, ratio, f"{case.name}: {name}", floor=1e-36)
