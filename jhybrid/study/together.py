"""Trains all seeds of a cell in one program, whose arrays have a leading axis of seeds.

A small model leaves an accelerator idle between its kernels; three of them in one program cost
little more than one and compile once. The step is train.py's own (`training.step.Program`), mapped
over seeds; the batches are drawn on the device (`jhybrid.study.batches`), so a run of many steps is
one call. Everything that a step depends on is the seed, the step's number and the state, so that a
resumed cell ends where an uninterrupted one does.
"""

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jhybrid.checkpoint import write_whole
from jhybrid.config import Experiment, MeshConfig, require
from jhybrid.sharding import make_mesh
from jhybrid.study.batches import Batches
from jhybrid.training.step import Program, TrainState
from pallas_kernels.array_types import Array, Float, Int

Record = dict[str, Any]


class Interrupted(Exception):  # noqa: N818  it is no error
    """Training was told to stop; what it had done is saved."""


class Outcome(NamedTuple):
    """What training made of one seed."""

    params: dict[str, Array]  # by path
    diverged: str | None  # how, if it did
    log: list[Record]  # step and mean loss since the one before; routing where there is any
    seconds: float  # of the whole cell, compilation included


class SeedProgram:
    """The compiled functions of a cell.

    Attributes:
        init: (seeds [S]) -> TrainState with a leading axis of S in every array.
        train: (TrainState, seeds [S], arrays of the batches, first step, number of steps) ->
            (TrainState, mean losses [S], routing statistics of the last step); donates the state.
    """

    def __init__(self, experiment: Experiment):
        require(
            experiment.mesh == MeshConfig(), "mesh: seeds that train together do so on one device"
        )
        program = Program(experiment, make_mesh(experiment.mesh))
        batches = Batches(experiment.data)
        self.arrays = batches.arrays

        def one_init(seed: Int[Array, ""]) -> TrainState:
            return program.init(jnp.stack([jnp.zeros_like(seed), seed]))

        def one_step(state: TrainState, seed: Int[Array, ""], arrays: Any, step: Int[Array, ""]):
            key = jax.random.fold_in(jax.random.key(seed), step)
            state, metrics = program.train_step(state, batches.draw(key, arrays))
            return state, (metrics["loss"], metrics["routing"])

        step_of_all = jax.vmap(one_step, (0, 0, None, None))
        self.init = jax.jit(jax.vmap(one_init))

        @functools.partial(jax.jit, donate_argnums=0)
        def train(states, seeds, arrays, first, steps):
            shapes = jax.eval_shape(step_of_all, states, seeds, arrays, first)[1]
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def advance(i, carry):
                states, (losses, _) = carry
                states, (loss, routing) = step_of_all(states, seeds, arrays, first + i)
                return states, (losses + loss, routing)

            states, (losses, routing) = jax.lax.fori_loop(0, steps, advance, (states, nothing))
            return states, losses / steps, routing

        self.train = train


def train(
    experiment: Experiment,
    seeds: Sequence[int],
    folder: Path,
    *,
    announce: Callable[[str], None] = print,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """The outcome of every seed; `folder` holds what an interrupted cell goes on from.

    A seed has diverged when `training.max_skipped_steps` steps in a row were not finite, or when
    its loss ends no number or above where it began.

    Raises Interrupted after saving when `stop()` says so between two logs.
    """
    began = time.perf_counter()
    settings = experiment.training
    program = SeedProgram(experiment)
    seed_array = jnp.asarray(seeds, jnp.uint32)
    states = program.init(seed_array)
    saved = _Saved(folder)
    states, log, spent = saved.restore(states)
    step = log[-1]["step"] if log else 0
    compiled = None
    while step < settings.steps:
        until_log = settings.log_every_steps - step % settings.log_every_steps
        count = min(until_log, settings.steps - step)
        states, losses, routing = program.train(
            states, seed_array, program.arrays, jnp.int32(step), jnp.int32(count)
        )
        step += count
        log.append(_record(step, losses, routing))
        if compiled is None:
            compiled = time.perf_counter() - began
            announce(f"first {count} steps done after {compiled:.0f} s")
        else:
            spent_here = time.perf_counter() - began
            announce(f"step {step}: loss {_shown(log[-1]['loss'])} after {spent_here:.0f} s")
        stopping = stop()
        if step % settings.checkpoint_every_steps == 0 or stopping or step == settings.steps:
            saved.save(states, log, spent + time.perf_counter() - began)
        if stopping and step < settings.steps:
            raise Interrupted
    seconds = spent + time.perf_counter() - began
    skipped = np.asarray(states.skipped_in_row)
    return [
        Outcome(
            params={path: value[i] for path, value in states.params.items()},
            diverged=_divergence(
                [record["loss"][i] for record in log], int(skipped[i]), settings.max_skipped_steps
            ),
            log=[_of_seed(record, i) for record in log],
            seconds=seconds,
        )
        for i in range(len(seeds))
    ]


def _divergence(losses: Sequence[float | None], skipped: int, max_skipped: int) -> str | None:
    first, last = losses[0], losses[-1]
    if skipped >= max_skipped:
        return f"the last {skipped} steps were not finite"
    if last is None:
        return "the last losses were not finite"
    if first is not None and last > first:
        return f"the loss rose from {first:.3f} to {last:.3f}"
    return None


def _record(step: int, losses: Float[Array, "S"], routing: Any) -> Record:
    """As JSON takes it: a loss that is no number becomes null."""
    found, routing = jax.device_get((losses, routing))
    return {
        "step": step,
        "loss": [float(x) if np.isfinite(x) else None for x in found],
        "softmax_fraction": {
            block: np.asarray(of["softmax_fraction"], float).tolist()
            for block, of in routing.items()
        },
    }


def _of_seed(record: Record, index: int) -> Record:
    fractions = {block: values[index] for block, values in record["softmax_fraction"].items()}
    one = {"step": record["step"], "loss": record["loss"][index]}
    return {**one, "softmax_fraction": fractions} if fractions else one


def _shown(losses: Sequence[float | None]) -> str:
    return " ".join("nan" if x is None else f"{x:.4f}" for x in losses)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """The states of a cell in the middle of training, and its log; whole or not there."""

    folder: Path

    def save(self, states: TrainState, log: list[Record], seconds: float) -> None:
        step = log[-1]["step"]
        path = (self.folder / f"state-{step}").absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, states, force=True)
        text = json.dumps({"step": step, "seconds": seconds, "log": log})
        write_whole(self.folder / "training.json", text)
        for other in self.folder.glob("state-*"):
            if other.name != path.name:
                shutil.rmtree(other)

    def restore(self, states: TrainState) -> tuple[TrainState, list[Record], float]:
        """Like `states` if there is nothing to go on from."""
        file = self.folder / "training.json"
        if not file.is_file():
            return states, [], 0.0
        found = json.loads(file.read_text())
        path = (self.folder / f"state-{found['step']}").absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
            return checkpointer.restore(path, abstract), found["log"], found["seconds"]
