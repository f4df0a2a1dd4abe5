"""Runs of train.py as processes that are killed or stopped, and go on as if they had not been."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import plain
import pytest
import tiny

from jhybrid.checkpoint import Checkpoints, latest
from jhybrid.data import train_batches

ROOT = Path(tiny.__file__).parent.parent

# Kills its own process, as nothing else can be caught doing, right after a given step.
KILLED = """
import os, signal, sys
from jhybrid import commandline
from jhybrid.training import loop
import train

def kill(run, step):
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return False

loop._Run._told_to_stop = kill
commandline.run(train.main)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(workdir, *arguments, config=tiny, program=...) -> a running train.py."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of the time of a small run
    }

    def start(workdir, *arguments, config=tiny, program=("train.py",)):
        command = [sys.executable, *program, "--config", config.__file__]
        command += ["--workdir", str(workdir)]
        return subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def saved_files(workdir, step):
    """Contents of everything a checkpoint restores, by name."""
    checkpoints = Checkpoints(workdir, keep=2)
    item = checkpoints._manager.restore(step)
    checkpoints.close()
    return item


def test_killed_and_resumed_equals_never_interrupted(start, tmp_path):
    steps = ("--set", "training.steps=8")
    whole = start(tmp_path / "whole", *steps)
    out, err = whole.communicate()
    assert whole.returncode == 0, err

    killed = start(tmp_path / "killed", *steps, program=("-c", KILLED.format(step=5)))
    _, err = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, err
    durable, _ = latest(tmp_path / "killed")
    assert durable in (2, 4)

    resumed = start(tmp_path / "killed", *steps)
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert f"after step {durable}" in out

    ours, theirs = (saved_files(tmp_path / name, 8) for name in ("killed", "whole"))
    assert set(ours["params"]) == set(theirs["params"])
    for path, wanted in theirs["params"].items():
        np.testing.assert_array_equal(ours["params"][path], wanted, err_msg=path)
    moments = zip(*(jax.tree.leaves(item["train"]) for item in (ours, theirs)), strict=True)
    for ours_leaf, theirs_leaf in moments:
        np.testing.assert_array_equal(ours_leaf, theirs_leaf)

    batches = []
    for item in (ours, theirs):
        iterator = train_batches(tiny.config().data)
        iterator.set_state(item["data"])
        batches.append(next(iterator))
        iterator.close()
    for field, wanted in batches[1].items():
        np.testing.assert_array_equal(batches[0][field], wanted, err_msg=field)
    fresh = next(train_batches(tiny.config().data))
    assert np.any(fresh["tokens"] != batches[0]["tokens"])


def test_sigterm_saves_and_exits_with_code_0(start, tmp_path):
    running = start(tmp_path, "--set", "training.steps=1000000", config=plain)
    metrics = tmp_path / "metrics.jsonl"
    while running.poll() is None and '"step": 3' not in (
        metrics.read_text() if metrics.exists() else ""
    ):
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate()
    assert running.returncode == 0, err
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["event"] == "checkpoint"
    assert f"stopped by SIGTERM after step {last['step']}" in out
    assert latest(tmp_path)[0] == last["step"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_and_resume_as_one_does(start, tmp_path):
    constant = ("--set", "optimizer.schedule=warmup_stable_decay")  # whatever the last step is

    def train_together(steps):
        join = ("--coordinator", f"localhost:{free_port()}", "--num-processes", "2")
        runs = [
            start(
                tmp_path / "two",
                *(*join, "--process-id", str(process)),
                *("--set", "mesh.data=2", "--set", f"training.steps={steps}", *constant),
                config=plain,
            )
            for process in range(2)
        ]
        for run in runs:
            _, err = run.communicate()
            assert run.returncode == 0, err

    train_together(4)
    assert latest(tmp_path / "two")[0] == 4
    train_together(6)
    alone = start(tmp_path / "one", "--set", "training.steps=6", *constant, config=plain)
    _, err = alone.communicate()
    assert alone.returncode == 0, err

    def losses(workdir):
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [record["loss"] for record in records if record["event"] == "train"]

    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
