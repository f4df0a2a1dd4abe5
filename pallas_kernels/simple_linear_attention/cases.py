"""Named shapes with drawn inputs, for the tests and the benchmark alike: the gated delta rule's,
without beta. Tags as there."""

import dataclasses

from pallas_kernels.gated_delta_rule import cases as delta_rule
from pallas_kernels.gated_delta_rule.cases import accepted as accepted


class Case(delta_rule.Case):
    """A problem of the gated delta rule whose beta is dropped."""

    memory_bounds = None  # pyright: ignore[reportAssignmentType]  # of what the delta rule keeps

    def draw(self, key, dtype):
        """Differentiable arguments, integer arguments, and cotangents of (o, final_state)."""
        arguments, integers, cotangents = super().draw(key, dtype)
        return {n: x for n, x in arguments.items() if n != "beta"}, integers, cotangents


def _about_decay(case: delta_rule.Case) -> bool:
    return case.largest_beta == 1 and not case.identical_keys and "fla" not in case.tags


def _case(name: str, shape: tuple[int, ...], *tags: str, **options) -> Case:
    return Case(name, *shape, tags=frozenset(tags), **options)


CASES: tuple[Case, ...] = (
    *(
        Case(**{field.name: getattr(case, field.name) for field in dataclasses.fields(case)})
        for case in delta_rule.CASES
        if _about_decay(case)
    ),
    # flash-linear-attention's tests/ops/test_simple_gla.py
    _case("fla-63", (1, 63, 1, 1, 64, 64), "fla"),
    _case("fla-slow-decay", (2, 1024, 4, 4, 60, 60), "fla", decay_divisor=10),
    _case("fla-strong-decay", (2, 1024, 8, 8, 128, 128), "fla", decay_divisor=0.1),
    _case("fla-2048", (4, 2048, 8, 8, 64, 64), "fla"),
    _case("fla-packed-3", (1, 1000, 4, 4, 64, 64), "fla", documents=(256, 244, 500)),
    # RetNet and Mamba-2 of 340M parameters in 8 rows of 4096 tokens.
    _case("retnet-340m", (8, 4096, 8, 8, 128, 256), "bench"),
    _case("mamba2-340m", (8, 4096, 1, 32, 128, 64), "bench"),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
