"""Other packages' GPU kernels for the same rules, timed beside ours by the benchmark.

None gets the initial state or returns the final one: plain rows are what all can do.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.gpu_peers import NOTE as NOTE
from pallas_kernels.gated_delta_rule.gpu_peers import Jax, Torch
from pallas_kernels.gated_linear_attention import reference
from pallas_kernels.gated_linear_attention.cases import Case


def exact(arguments: dict) -> jax.Array:
    """o of a row that starts from a state of zeros, in fp32."""
    given = {name: x.astype(jnp.float32) for name, x in arguments.items()}
    K = given["q"].shape[-1]
    options = {"beta": None, "bonus": None, "segment_ids": None, "scale": K**-0.5}
    options["initial_state"] = jnp.zeros_like(given.pop("initial_state"))
    return jax.jit(lambda given: reference.gated_linear_attention(**options | given)[0])(given)


def _names(case: Case) -> tuple[str, ...]:
    more = {"kda": ("beta",), "rwkv6": ("bonus",)}.get(case.rule, ())
    return ("q", "k", "v", "g", *more)


def _jla(ops: Any, case: Case) -> Jax:
    rule = functools.partial(ops.linear_attention, case.rule, impl="mosaic_gpu")
    names = _names(case)

    def attend(q, k, v, *gates):
        return rule(q, k, v, **dict(zip(names[3:], gates, strict=True)))[0]

    return Jax(attend, names)


def _fla(ops: Any, case: Case) -> Torch:
    module = importlib.import_module(f"{ops.__name__}.{case.rule}")
    rule = functools.partial(getattr(module, f"chunk_{case.rule}"), scale=case.K**-0.5)
    return Torch(lambda *tensors: rule(*tensors)[0], _names(case))


def _peer(package: str, rules: tuple[str, ...], build: Callable[[Any, Case], Any]):
    """case -> (its kernels, why not)"""

    def bind(case: Case) -> tuple[Any, str | None]:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return None, f"{package.partition('.')[0]} is not installed"
        if case.rule not in rules:
            return None, f"has kernels for {', '.join(rules)}, not {case.rule}"
        if case.documents:
            return None, "compared on plain rows only"
        return build(importlib.import_module(package), case), None

    return bind


PEERS: dict[str, Callable[[Case], tuple[Any, str | None]]] = {
    "jax-linear-attention": _peer("jla.ops", ("gla", "kda"), _jla),
    "fla": _peer("fla.ops", ("gla", "rwkv6", "kda"), _fla),
}
