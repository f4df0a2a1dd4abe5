"""The choice of an implementation: pure, explained, and loud when forced to the impossible."""

import logging

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Candidate, Target, choose
from pallas_kernels.gated_delta_rule.api import IMPLEMENTATIONS
from pallas_kernels.gated_delta_rule.cases import BY_NAME

H200, V6E, CPU = Target("gpu", "NVIDIA H200"), Target("tpu", "TPU v6 lite"), Target("cpu", "cpu")


def run(*args):
    raise AssertionError("choosing must not run anything")


TABLE = {
    "reference": Candidate(run),
    "xla": Candidate(run),
    "pallas_gpu": Candidate(
        run, lambda problem, target: "K = 7; needs 64" if problem == 7 else None
    ),
}


def test_auto_takes_the_first_that_runs():
    assert choose(TABLE, "auto", 64, H200) == dispatch.Choice("pallas_gpu", ())


def test_auto_says_what_it_skipped_and_why():
    choice = choose(TABLE, "auto", 7, H200)
    assert choice == dispatch.Choice("xla", (("pallas_gpu", "K = 7; needs 64"),))


def test_auto_says_which_kernel_is_missing():
    choice = choose(TABLE, "auto", 64, V6E)
    assert (choice.name, [name for name, _ in choice.skipped]) == ("xla", ["pallas_tpu"])


def test_auto_never_takes_the_reference():
    assert choose(TABLE, "auto", 64, CPU).name == "xla"
    with pytest.raises(ValueError, match="no implementation runs"):
        choose({"reference": Candidate(run)}, "auto", 64, CPU)


def test_a_forced_implementation_that_cannot_run_raises_its_reason():
    with pytest.raises(ValueError, match=r"'pallas_gpu' cannot run here: K = 7; needs 64"):
        choose(TABLE, "pallas_gpu", 7, H200)


def test_a_kernel_that_is_slower_on_a_problem_runs_on_it_by_name_only():
    slow = Candidate(run, slower=lambda problem: "one query" if problem == 1 else None)
    table = TABLE | {"pallas_gpu": slow}
    assert choose(table, "auto", 1, H200) == dispatch.Choice("xla", (("pallas_gpu", "one query"),))
    assert choose(table, "pallas_gpu", 1, H200).name == "pallas_gpu"
    assert choose(table, "auto", 64, H200).name == "pallas_gpu"


def test_an_unknown_implementation_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'triton': choose one of .*'pallas_gpu'"):
        choose(TABLE, "triton", 64, H200)


def test_a_skipped_kernel_is_announced_once_per_problem(caplog, monkeypatch):
    monkeypatch.setattr(dispatch.Target, "current", classmethod(lambda cls: H200))
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        for _ in range(3):
            dispatch.resolve("some_op", TABLE, "auto", 7)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["some_op runs on xla (skipped pallas_gpu: K = 7; needs 64)"]


def test_the_target_is_the_device_programs_are_traced_for():
    assert Target.current().platform == jax.default_backend()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert Target.current().platform == jax.default_backend()


def test_every_case_of_the_gated_delta_rule_runs_somewhere():
    for case in BY_NAME.values():
        for target in (H200, V6E, CPU):
            choose(IMPLEMENTATIONS, "auto", case.problem("bfloat16"), target)
