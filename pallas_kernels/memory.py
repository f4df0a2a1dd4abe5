"""What forward+backward holds in memory: counted from its types and from the compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Memory(NamedTuple):
    """Bytes of forward+backward. What is kept counts arguments that the backward pass needs too."""

    kept: int  # from the forward to the backward pass
    temporaries: int  # beside arguments, results and what is kept


def kept_bytes(op: Callable, arguments: Any) -> tuple[int, int]:
    """Bytes that the pullback of `op(arguments)` holds, and how many are not arguments themselves.

    Leaves of `arguments` are arrays or shapes; nothing is run.
    """
    traced = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(op, x)[1]))(arguments).jaxpr
    given = set(traced.invars)
    held = {x for x in traced.outvars if isinstance(x, type(traced.invars[0]))}
    return _bytes(held), _bytes(held - given)


def _bytes(variables) -> int:
    return sum(x.aval.size * x.aval.dtype.itemsize for x in variables)


def compiled_bytes(compiled: Any) -> tuple[int, int]:
    """Arguments, results and temporaries of a compiled program, and its temporaries alone."""
    found = compiled.memory_analysis()
    if found is None:
        raise RuntimeError("this JAX backend reports no memory analysis")
    temporaries = found.temp_size_in_bytes
    return found.argument_size_in_bytes + found.output_size_in_bytes + temporaries, temporaries


def describe(memory: Memory, bounds: Memory) -> str:
    """Both in MB, each beside its bound."""
    lines = []
    for name, found, bound in zip(
        ("kept for the backward pass", "temporaries beside"), memory, bounds, strict=True
    ):
        verdict = "" if found <= bound else ", MORE"
        lines.append(f"{name} {found / 1e6:.1f} MB (at most {bound / 1e6:.1f}{verdict})")
    return ", ".join(lines)
