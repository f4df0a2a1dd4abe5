"""Which implementation of an op runs: one visible table per op, one pure choice.

An op builds `Table`: implementation name -> `Candidate`. `choose` looks at nothing but its
arguments, so the same call explains itself (`Choice.skipped`) in a test and at trace time.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Implementation = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn", "splash"]

PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "tpu": ("splash", "pallas_tpu", "xla"),
    "gpu": ("cudnn", "pallas_gpu", "xla"),
    "cpu": ("xla",),
}
LIBRARIES = ("cudnn", "splash")  # kernels of others, for the ops that list them

# Name, for policies of jax.checkpoint, of what a backward pass needs besides its op's arguments.
KEPT = "kept_by_op"

_logger = logging.getLogger("pallas_kernels")
_announced: set[tuple] = set()


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The hardware a program is traced for, which may be another machine's (ahead of time)."""

    platform: str  # "cpu" | "gpu" | "tpu"
    device_kind: str  # as the runtime spells it, e.g. "NVIDIA H200", "TPU v6 lite"

    @classmethod
    def current(cls) -> "Target":
        """The device of the mesh set by `jax.set_mesh`, else the default backend's."""
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        kind = device.device_kind if device is not None else jax.devices()[0].device_kind
        if kind.lower().startswith("tpu"):
            return cls("tpu", kind)
        if kind.lower() in ("cpu", "interpreter"):
            return cls("cpu", kind)
        return cls("gpu", kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """`run` has the op's signature; `unsupported` gives the reason it cannot run, or None.

    What can run but is `slower` than the next in the order of preference runs by name only. With
    `names_kept`, its forward rule names what it keeps KEPT, results included; the results of all
    others are named by `resolve`.
    """

    run: Callable[..., Any]
    unsupported: Callable[[Any, Target], str | None] = lambda problem, target: None
    slower: Callable[[Any], str | None] = lambda problem: None  # why `auto` takes the next one
    names_kept: bool = False


Table = Mapping[str, Candidate]


class UnsupportedError(ValueError):
    """A named implementation does not exist or cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    name: str
    skipped: tuple[tuple[str, str], ...]  # (implementation, why not), in order of preference


def choose(table: Table, implementation: Implementation, problem: Any, target: Target) -> Choice:
    """Picks the implementation for `problem` (hashable shapes, dtypes, options) on `target`.

    Raises UnsupportedError when a named implementation does not exist or cannot run.
    """
    if implementation != "auto":
        if implementation not in table:
            raise UnsupportedError(
                f"implementation={implementation!r}: choose one of {('auto', *table)}"
            )
        reason = table[implementation].unsupported(problem, target)
        if reason is not None:
            raise UnsupportedError(f"implementation={implementation!r} cannot run here: {reason}")
        return Choice(implementation, ())
    skipped: list[tuple[str, str]] = []
    for name in PREFERENCE[target.platform]:
        if name not in table and name in LIBRARIES:
            continue
        if name not in table:
            skipped.append((name, "not written yet"))
            continue
        reason = table[name].unsupported(problem, target) or table[name].slower(problem)
        if reason is None:
            return Choice(name, tuple(skipped))
        skipped.append((name, reason))
    raise ValueError(f"no implementation runs {problem} on {target}: {skipped}")


def resolve(op: str, table: Table, implementation: Implementation, problem: Any) -> Candidate:
    """`choose` for the current target; says once per op and problem what `auto` skipped and why."""
    target = Target.current()
    choice = choose(table, implementation, problem, target)
    key = (op, problem, target)
    if choice.skipped and key not in _announced:
        _announced.add(key)
        why = "; ".join(f"{name}: {reason}" for name, reason in choice.skipped)
        _logger.warning("%s runs on %s (skipped %s)", op, choice.name, why)
    candidate = table[choice.name]
    if candidate.names_kept:
        return candidate
    return dataclasses.replace(candidate, run=functools.partial(_named, candidate.run))


def _named(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint_name(run(*args, **kwargs), KEPT)
