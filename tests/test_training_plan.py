"""Plans for other machines, joining several processes, and how speed is reported."""

import dataclasses
import importlib.util
import io
import types

import jax
import plain
import pytest

from jhybrid.config import MeshConfig
from jhybrid.errors import UserError
from jhybrid.model import parameter_count
from jhybrid.training import distributed
from jhybrid.training.metrics import model_flops_utilization, peak_flops
from jhybrid.training.plan import GIB, Memory, Plan, plan_tpu
from jhybrid.training.progress import Reporter

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the extra `tpu`"
)


@needs_libtpu
def test_a_tpu_plan_spreads_the_run_over_the_slice():
    experiment = plain.config()
    plan = plan_tpu(experiment, "v5e:2x2")
    assert (plan.device_kind, plan.devices, plan.mesh.fsdp) == ("TPU v5 lite", 4, 4)
    assert plan.parameters == plan.trainable == parameter_count(experiment.model)
    assert plan.fits and plan.available == 16 * GIB
    shown = "\n".join(plan.lines())
    assert "4 x TPU v5 lite (data=1, fsdp=4, tensor=1, context=1)" in shown
    assert "fits 16 GiB: yes" in shown


@needs_libtpu
def test_a_mesh_that_is_not_the_slice_is_refused():
    experiment = dataclasses.replace(plain.config(), mesh=MeshConfig(data=2))
    with pytest.raises(UserError, match="4 devices, the mesh asks for 2"):
        plan_tpu(experiment, "v5e:2x2")


PLAN = Plan(
    device_kind="TPU v5 lite",
    devices=4,
    mesh=MeshConfig(fsdp=4),
    parameters=10,
    trainable=8,
    model_flops_per_step=1e9,
    compiled_flops_per_device=None,
    memory=None,
    available=16 * GIB,
)


@pytest.mark.parametrize(("gibibytes", "fits"), [(15, "yes"), (17, "no")])
def test_what_needs_more_memory_than_there_is_does_not_fit(gibibytes, fits):
    memory = Memory(state=gibibytes * GIB, temporary=0, output=0, code=0)
    assert f"fits 16 GiB: {fits}" in dataclasses.replace(PLAN, memory=memory).lines()


def test_a_compiler_out_of_memory_is_an_answer_too():
    lines = dataclasses.replace(PLAN, failure="RESOURCE_EXHAUSTED: 21G of 15.75G").lines()
    assert any("more than there is: RESOURCE_EXHAUSTED: 21G" in line for line in lines)
    assert "fits 16 GiB: no" in lines


@pytest.fixture
def joined(monkeypatch):
    """Arguments of every call of jax.distributed.initialize."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    return calls


def test_processes_join_by_flags(joined):
    distributed.initialize({}, "host:1", 2, 1)
    assert joined == [("host:1", 2, 1)]


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_processes_join_by_the_launchers_environment(joined, environ):
    distributed.initialize(environ)
    assert joined == [()]


@pytest.mark.parametrize("environ", [{}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["none", "one"])
def test_a_single_process_joins_nobody(joined, environ):
    distributed.initialize(environ)
    assert joined == []


@pytest.mark.parametrize("flags", [("host:1", None, None), ("host:1", 2, 2)])
def test_distributed_flags_that_make_no_sense_are_refused(joined, flags):
    with pytest.raises(UserError, match="--process-id"):
        distributed.initialize({}, *flags)
    assert joined == []


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [("NVIDIA H200", 989), ("TPU v5 lite", 197), ("TPU v5p", 459), ("TPU v6 lite", 918)],
)
def test_utilization_is_relative_to_the_peak_of_all_devices(kind, teraflops):
    devices = [types.SimpleNamespace(device_kind=kind)] * 2
    assert peak_flops(devices[0]) == teraflops * 1e12
    mfu = model_flops_utilization(1e5, teraflops * 1e7, devices)
    assert mfu == pytest.approx(0.5)


def test_a_cpu_has_no_utilization():
    assert model_flops_utilization(1e5, 1e9, jax.devices("cpu")) is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        reporter = Reporter(4, 0, enabled=True, stream=stream)
        reporter.show(2, loss=1.5, tokens_per_second=12_345.6, mfu=0.25, seconds_left=90)
        reporter.say("a line that stays")
        reporter.close()
        shown[type(stream)] = stream.getvalue()
    line = "loss 1.5000  12,346 tokens/s  MFU 25.0%  ETA 1m30s"
    assert shown[io.StringIO] == f"step 2/4  {line}\na line that stays\n"
    assert "2/4" in shown[Terminal] and "\x1b[" in shown[Terminal]
    assert "a line that stays" in shown[Terminal]


def test_a_process_that_is_not_the_first_shows_nothing(capsys):
    reporter = Reporter(4, 0, enabled=False)
    reporter.say("hello")
    reporter.warn("hello")
    reporter.show(2, loss=1.0, tokens_per_second=1.0, mfu=None, seconds_left=0)
    reporter.close()
    assert capsys.readouterr() == ("", "")
