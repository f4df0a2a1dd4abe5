"""Trains all seeds of a cell in one program, whose arrays have a leading axis of seeds.

A small model leaves an accelerator idle between its kernels; three of them in one program cost
little more than one and compile once. The step is train.py's own (`training.step.Program`), mapped
over seeds; the batches of many steps are drawn on the device at once (`jhybrid.study.batches`), so
that these steps are one call. Everything that a step depends on is the seed, the step's number and
the state, so that a resumed cell ends where an uninterrupted one does.
"""

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jhybrid.checkpoint import write_whole
from jhybrid.config import Experiment, MeshConfig, require
from jhybrid.sharding import make_mesh
from jhybrid.study.batches import Batch, batches_of
from jhybrid.training.step import Program, TrainState
from pallas_kernels.array_types import Array, Float, Int

Record = dict[str, Any]
STEPS_AT_ONCE = 64  # at most: so many batches of every seed lie on the device


class Interrupted(Exception):  # noqa: N818  it is no error
    """Training was told to stop; what it had done is saved."""


class Spent(NamedTuple):
    """Wall-clock seconds of a cell's training, over all its starts."""

    seconds: float = 0.0
    preparing: float = 0.0  # of them: reading data, tracing, compiling and initialising

    def plus(self, seconds: float, preparing: float) -> "Spent":
        return Spent(self.seconds + seconds, self.preparing + preparing)

    def of_step(self, steps: int) -> float:
        """Seconds per step, of which `steps` were taken, with what was written in between."""
        return (self.seconds - self.preparing) / steps


class Outcome(NamedTuple):
    """What training made of one seed."""

    params: dict[str, Any]  # by path, arrays of NumPy or JAX
    diverged: str | None  # how, if it did
    log: list[Record]  # step and mean loss since the one before; routing where there is any
    spent: Spent


class SeedProgram:
    """The compiled functions of a cell.

    Attributes:
        batches: the batches of every seed.
        init: (seeds [S]) -> TrainState with a leading axis of S in every array.
        train: (TrainState, batches of N steps, number of steps to take of them) ->
            (TrainState, sums of losses [S], routing statistics of the last step); donates the
            state.
    """

    def __init__(self, experiment: Experiment):
        require(
            experiment.mesh == MeshConfig(), "mesh: seeds that train together do so on one device"
        )
        program = Program(experiment, make_mesh(experiment.mesh))
        self.batches = batches_of(dataclasses.replace(experiment.data, seed=0))

        def one_init(seed: Int[Array, ""]) -> TrainState:
            return program.init(jnp.stack([jnp.zeros_like(seed), seed]))

        def one_step(state: TrainState, batch: Batch):
            state, metrics = program.train_step(state, batch)
            return state, (metrics["loss"], metrics["routing"])

        step_of_all = jax.vmap(one_step)
        self.init = jax.jit(jax.vmap(one_init))

        @functools.partial(jax.jit, donate_argnums=0)
        def train(states, batches, steps):
            of_step = lambda i: jax.tree.map(lambda x: x[i], batches)  # noqa: E731
            shapes = jax.eval_shape(step_of_all, states, of_step(0))[1]
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def advance(i, carry):
                states, (losses, _) = carry
                states, (loss, routing) = step_of_all(states, of_step(i))
                return states, (losses + loss, routing)

            states, (losses, routing) = jax.lax.fori_loop(0, steps, advance, (states, nothing))
            return states, losses, routing

        self.train = train


class Prepared(NamedTuple):
    """A cell that is ready for its first step."""

    states: TrainState  # a leading axis of S seeds in every array
    draw: Callable[[Int[Array, ""]], Mapping[str, Array]]  # first step -> the batches of N
    take: Callable[..., Any]  # `SeedProgram.train`, compiled
    at_once: int  # N
    seconds: float  # that all this took


def prepare(experiment: Experiment, seeds: Sequence[int]) -> Prepared:
    """Compiles and initialises. May run in a thread while another cell trains."""
    began = time.perf_counter()
    program = SeedProgram(experiment)
    batches = program.batches
    seed_array = jnp.asarray(seeds, jnp.uint32)
    states = program.init(seed_array)
    at_once = min(experiment.training.log_every_steps, STEPS_AT_ONCE)

    def draw(first: Int[Array, ""]) -> Mapping[str, Array]:
        return batches.draw_steps(seed_array, batches.arrays, first, at_once)

    drawn = draw(jnp.int32(0))
    take = program.train.lower(states, drawn, jnp.int32(0)).compile()
    jax.block_until_ready((states, drawn))
    return Prepared(states, draw, take, at_once, time.perf_counter() - began)


def train(
    experiment: Experiment,
    seeds: Sequence[int],
    folder: Path,
    *,
    prepared: Prepared | None = None,
    announce: Callable[[str], None] = print,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """The outcome of every seed; `folder` holds what an interrupted cell goes on from.

    `prepared` is what `prepare` made of the same experiment and seeds; it is used up. A seed has
    diverged when `training.max_skipped_steps` steps in a row were not finite, or when its loss ends
    no number or above where it began.

    Raises Interrupted after saving when `stop()` says so between two logs.
    """
    settings = experiment.training
    if prepared is None:
        prepared = prepare(experiment, seeds)
    began = time.perf_counter() - prepared.seconds
    saved = _Saved(folder)
    states, log, before = saved.restore(prepared.states)
    preparing = time.perf_counter() - began
    announce(f"ready to train after {preparing:.0f} s")
    step, spent = log[-1]["step"] if log else 0, before
    while step < settings.steps:
        until_log = settings.log_every_steps - step % settings.log_every_steps
        count = min(until_log, settings.steps - step)
        losses = jnp.zeros(len(seeds), jnp.float32)
        routing = {}
        for start in range(step, step + count, prepared.at_once):
            taken = jnp.int32(min(prepared.at_once, step + count - start))
            batches = prepared.draw(jnp.int32(start))
            states, sums, routing = prepared.take(states, batches, taken)
            losses += sums
        step += count
        log.append(_record(step, losses / count, routing))
        spent = before.plus(time.perf_counter() - began, preparing)
        announce(
            f"step {step}: loss {_shown(log[-1]['loss'])}, "
            f"{1000 * spent.of_step(step):.1f} ms a step, {spent.seconds:.0f} s in all"
        )
        stopping = stop()
        if step % settings.checkpoint_every_steps == 0 or stopping or step == settings.steps:
            saved.save(states, log, spent)
        if stopping and step < settings.steps:
            raise Interrupted
    skipped, params = jax.device_get((states.skipped_in_row, states.params))
    return [
        Outcome(
            params={path: value[i] for path, value in params.items()},
            diverged=_divergence(
                [record["loss"][i] for record in log], int(skipped[i]), settings.max_skipped_steps
            ),
            log=[_of_seed(record, i) for record in log],
            spent=spent,
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

    def save(self, states: TrainState, log: list[Record], spent: Spent) -> None:
        step = log[-1]["step"]
        path = (self.folder / f"state-{step}").absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, states, force=True)
        text = json.dumps({"step": step, "spent": spent._asdict(), "log": log})
        write_whole(self.folder / "training.json", text)
        for other in self.folder.glob("state-*"):
            if other.name != path.name:
                shutil.rmtree(other)

    def restore(self, states: TrainState) -> tuple[TrainState, list[Record], Spent]:
        """Like `states` if there is nothing to go on from."""
        file = self.folder / "training.json"
        if not file.is_file():
            return states, [], Spent()
        found = json.loads(file.read_text())
        path = (self.folder / f"state-{found['step']}").absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
            return checkpointer.restore(path, abstract), found["log"], Spent(**found["spent"])
