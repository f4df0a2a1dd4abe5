"""The training loop: data, steps, logs, evaluations, checkpoints, and stopping when told to."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jhybrid import data
from jhybrid.checkpoint import (
    Checkpoints,
    check_resumable,
    check_workdir,
    latest,
    prepare_workdir,
    write_whole,
)
from jhybrid.config import Experiment
from jhybrid.errors import UserError
from jhybrid.model import HybridLM, flops_per_token
from jhybrid.serialization import to_json
from jhybrid.sharding import make_mesh
from jhybrid.training.backbone import Backbone
from jhybrid.training.metrics import MetricsWriter, collapsed_routing, model_flops_utilization
from jhybrid.training.progress import Reporter, duration
from jhybrid.training.step import Program, TrainState
from jhybrid.training.validation import Validation


class TrainingError(Exception):
    """The run cannot go on, and not because of its input."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run an experiment, as opposed to which.

    After every validation each of `evaluations` is called with the model as it is, on every
    process, and what it returns goes into the metrics as the event "evaluation" with its name.
    """

    workdir: Path
    resume: bool = False  # there must be a checkpoint; without it, resumes if there is one
    profile: tuple[int, int] | None = None  # steps [start, stop) to trace
    evaluations: Mapping[str, Callable[[HybridLM], Mapping[str, float]]] = dataclasses.field(
        default_factory=dict
    )


def run(experiment: Experiment, options: Options) -> None:
    """Trains until the last step, or until SIGTERM or SIGINT; resumes if the workdir can be.

    Bad input, what no op implementation can run included, is refused before anything is written.
    """
    check_workdir(options.workdir)
    data.check_vocabulary(data.load_tokenizer(experiment.data.tokenizer), experiment.model)
    mesh = make_mesh(experiment.mesh)
    rows, processes = experiment.mesh.data * experiment.mesh.fsdp, jax.process_count()
    if rows % processes:
        raise UserError(f"mesh.data*mesh.fsdp={rows} must be a multiple of {processes} processes")
    step = _resume_step(experiment, options)
    if step is not None and step >= experiment.training.steps:
        if jax.process_index() == 0:
            print(f"{options.workdir} is finished: its checkpoint has {step} steps")
        return
    with jax.set_mesh(mesh), _catch_signals() as signals:
        run = _Run(experiment, options, mesh, signals)
        backbone = run.backbone() if step is None else None
        prepare_workdir(options.workdir)
        checkpoints = Checkpoints(options.workdir, experiment.training.keep_checkpoints)
        with contextlib.closing(checkpoints):
            run.go(checkpoints, step, backbone)


def _resume_step(experiment: Experiment, options: Options) -> int | None:
    """The step of the checkpoint to go on from; None to begin."""
    found = latest(options.workdir)
    if found is None and options.resume:
        raise UserError(f"--resume: {options.workdir} holds no checkpoint")
    if found is not None:
        check_resumable(experiment, found[1], options.workdir)
    first, steps = 0 if found is None else found[0], experiment.training.steps
    if options.profile is not None and first < steps:
        start, stop = options.profile
        if not first <= start < stop <= steps:
            raise UserError(f"--profile {start}:{stop}: this run takes the steps {first}:{steps}")
    return None if found is None else first


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        options: Options,
        mesh: Mesh,
        signals: list[int],
    ):
        self.experiment = experiment
        self.settings = experiment.training
        self.options = options
        self.mesh = mesh
        self.signals = signals
        self.is_first_process = jax.process_index() == 0
        self.program = Program(experiment, mesh)
        self.program.train_step.trace(self.program.state, self.program.batch)  # may refuse
        self.batches = data.train_batches(
            experiment.data, process_index=jax.process_index(), process_count=jax.process_count()
        )
        self.validation = Validation(experiment)
        self.tokens_per_step = experiment.data.batch_size * experiment.data.sequence_length
        self.flops_of_no_and_all_softmax = [
            flops_per_token(
                experiment.model, experiment.data.sequence_length, softmax_fraction=fraction
            )
            for fraction in (0.0, 1.0)
        ]
        self.saved_step: int | None = None

    def backbone(self) -> Backbone | None:
        """The parameters to start from, not read yet."""
        path, state = self.settings.init_from, self.program.state
        if path is None:
            return None
        return Backbone(path, self.experiment.model, state.params | state.frozen)

    def go(
        self, checkpoints: Checkpoints, resume_from: int | None, backbone: Backbone | None
    ) -> None:
        self.checkpoints = checkpoints
        state = self._begin(resume_from, backbone)
        first = int(state.step)
        self.writer = MetricsWriter(self.options.workdir) if self.is_first_process else None
        self.reporter = Reporter(self.settings.steps, first, enabled=self.is_first_process)
        if self.is_first_process:
            write_whole(self.options.workdir / "config.json", to_json(self.experiment))
        self._write("start", first, resumed=resume_from is not None, devices=self.mesh.size)
        for line in (*self.batches.describe().splitlines(), self._summary()):
            self.reporter.say(line)
        if resume_from is not None:
            self.reporter.say(f"resuming {self.options.workdir} after step {first}")
        try:
            state, step = self._train(state, first)
            self._save(state, step)
            self.checkpoints.wait()
        finally:
            self._stop_trace()
            self.reporter.close()
            if self.writer is not None:
                self.writer.close()
        self._farewell(step)

    def _summary(self) -> str:
        count = sum(x.size for x in self.program.state.params.values())
        frozen = sum(x.size for x in self.program.state.frozen.values())
        return (
            f"{self.experiment.name}: {count:,} parameters to train"
            + (f", {frozen:,} frozen" if frozen else "")
            + f", {self.tokens_per_step:,} tokens per step, "
            f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}; compiling"
        )

    def _begin(self, resume_from: int | None, backbone: Backbone | None) -> TrainState:
        """The initial state, or the one of a checkpoint with the data iterator set to it."""
        if resume_from is None:
            seed = np.asarray([0, self.settings.seed], np.uint32)
            return self.program.init(seed, loaded={} if backbone is None else backbone.read())
        abstract = self.program.state
        params, rest = self.checkpoints.restore(
            resume_from,
            abstract.params | abstract.frozen,
            _without_params(abstract),
            self.batches,
        )
        self.saved_step = resume_from
        return dataclasses.replace(
            abstract,
            params={path: params[path] for path in abstract.params},
            frozen={path: params[path] for path in abstract.frozen},
            **rest,
        )

    def _train(self, state: TrainState, first: int) -> tuple[TrainState, int]:
        settings = self.settings
        step, window_start, window_steps = first, None, 0
        warned, began = None, time.perf_counter()
        while step < settings.steps:
            self._trace(step, state)
            batch = self.program.put_batch(next(self.batches))
            state, metrics = self.program.train_step(state, batch)
            step += 1
            window_steps += 1
            if window_start is None:  # the first step compiles: it counts for nothing
                jax.block_until_ready(metrics)
                window_start, window_steps = time.perf_counter(), 0
                self.reporter.say(f"first step done after {duration(window_start - began)}")
            self.reporter.advance(step)
            last = step == settings.steps
            if step % settings.log_every_steps == 0 or step == first + 1 or last:
                warned = self._log(step, metrics, window_start, window_steps, warned)
                window_start, window_steps = time.perf_counter(), 0
            evaluate = last or (settings.eval_every_steps and step % settings.eval_every_steps == 0)
            save = step % settings.checkpoint_every_steps == 0
            if evaluate:
                self._evaluate(state, step)
            if save:
                self._save(state, step)
            if evaluate or save:
                window_start, window_steps = time.perf_counter(), 0
            if self._told_to_stop(step):
                break
        return state, step

    def _flops_per_token(self, routing: dict[str, Any]) -> float:
        """Model FLOPs per trained token at the density the router chose in this step."""
        fractions = [np.mean(found["softmax_fraction"]) for found in routing.values()]
        none, everything = self.flops_of_no_and_all_softmax
        return none + (everything - none) * float(np.mean(fractions)) if fractions else none

    def _log(
        self, step: int, metrics: dict, since: float, steps: int, warned: str | None
    ) -> str | None:
        """Writes and shows the metrics of a step; returns the routing warning in force."""
        metrics = jax.device_get(metrics)  # waits for the step
        speed = steps * self.tokens_per_step / max(time.perf_counter() - since, 1e-9)
        devices = list(self.mesh.devices.flat)
        flops = self._flops_per_token(metrics["routing"])
        mfu = model_flops_utilization(speed, flops, devices) if steps else None
        self._write(
            "train",
            step,
            tokens=step * self.tokens_per_step,
            tokens_per_second=speed if steps else None,
            mfu=mfu,
            **metrics,
        )
        if steps:
            self.reporter.show(
                step,
                loss=float(metrics["loss"]),
                tokens_per_second=speed,
                mfu=mfu,
                seconds_left=(self.settings.steps - step) * self.tokens_per_step / speed,
            )
        warning = collapsed_routing(metrics["routing"])
        if warning is not None and warning != warned:
            self._warn(f"step {step}: {warning}", step)
        in_row = int(metrics["skipped_in_row"])
        if in_row:
            self._warn(
                f"step {step}: loss or gradient not finite, update skipped ({in_row} in a row, "
                f"{int(metrics['skipped'])} in all)",
                step,
            )
        if in_row >= self.settings.max_skipped_steps:
            raise TrainingError(
                f"gave up at step {step}: {in_row} steps in a row were not finite "
                f"(training.max_skipped_steps={self.settings.max_skipped_steps}); the last "
                f"checkpoint is that of step {self.saved_step}"
            )
        return warning

    def _evaluate(self, state: TrainState, step: int) -> None:
        record = self.validation(self.program, state)
        self._write("validation", step, **record)
        if record["targets"]:
            self.reporter.say(
                f"step {step}: validation loss {record['loss']:.4f}, "
                f"{record['bits_per_byte']:.4f} bits/byte"
            )
        else:
            self._warn(f"step {step}: the validation data has no targets", step)
        for name, evaluate in self.options.evaluations.items():
            self._write("evaluation", step, name=name, **evaluate(self.program.model(state)))

    def _save(self, state: TrainState, step: int) -> None:
        if step == self.saved_step:
            return
        self.checkpoints.save(
            step, state.params | state.frozen, _without_params(state), self.batches, self.experiment
        )
        self.saved_step = step
        self._write("checkpoint", step)

    def _told_to_stop(self, step: int) -> bool:
        """SIGTERM or SIGINT came, on any process: all of them answer alike at the same step."""
        if jax.process_count() == 1:
            return bool(self.signals)
        return multihost_utils.reached_preemption_sync_point(step)

    def _trace(self, step: int, state: TrainState) -> None:
        if self.options.profile is not None and self.is_first_process:
            start, stop = self.options.profile
            if step == start:
                jax.profiler.start_trace(str(self.options.workdir / "profile"))
                self._tracing = True
            elif step == stop:
                jax.block_until_ready(state)  # steps are dispatched ahead of the device
                self._stop_trace()

    _tracing = False

    def _stop_trace(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def _warn(self, message: str, step: int) -> None:
        self.reporter.warn(message)
        self._write("warning", step, message=message)

    def _write(self, event: str, step: int, **values: Any) -> None:
        if self.writer is not None:
            self.writer.write(event, step, **values)

    def _farewell(self, step: int) -> None:
        where = self.options.workdir
        if step == self.settings.steps:
            self.reporter.say(f"finished: {step} steps, checkpoint in {where}")
        else:
            name = signal.Signals(self.signals[0]).name if self.signals else "preemption"
            self.reporter.say(
                f"stopped by {name} after step {step}, saved in {where}; "
                f"the same command goes on from there"
            )


def _without_params(state: TrainState) -> dict[str, Any]:
    """What the checkpoint item `train` holds."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    del fields["params"], fields["frozen"]
    return fields


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT; a second SIGINT interrupts at once.

    With several processes JAX's preemption service owns SIGTERM, and Python must not take it away.
    """
    caught: list[int] = []
    if jax.process_count() > 1:
        yield caught
        return

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
