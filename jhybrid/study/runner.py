"""Runs the cells of a study: what is finished is skipped, what was interrupted goes on.

A workdir holds
    runs/RUN/model/         the trained model, an export: eval.py, generate and others read it
    runs/RUN/result.json    what became of the run, and all that was measured
    runs/RUN/eval.json      rows of eval.py, whole after every row
    cells/CELL/             the middle of training, gone when the cell is finished
    table.csv  table.json  report.html
Every file appears whole, so several processes may share a workdir, each with cells of its own.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.checkpoint import latest, load_model, prepare_workdir, write_export, write_whole
from jhybrid.config import ChunkRoutedConfig, Experiment
from jhybrid.data import check_vocabulary, load_tokenizer
from jhybrid.errors import UserError, first_line
from jhybrid.evals.evaluate import evaluate
from jhybrid.evals.options import EvalOptions, parse_tasks
from jhybrid.evals.results import Row, digest
from jhybrid.memory import memory
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten
from jhybrid.serialization import to_json
from jhybrid.study import recall, together
from jhybrid.study.plan import Cell, Evaluation, Study
from jhybrid.study.together import Interrupted, Outcome, Spent
from jhybrid.training import loop

Result = dict[str, Any]
DONE = ("finished", "diverged")  # a failed run is tried again


class Runner:
    """One study in one workdir. Bad input is refused here, before anything trains."""

    def __init__(
        self,
        study: Study,
        workdir: Path,
        *,
        announce: Callable[[str], None] = print,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.study = study
        self.workdir = workdir
        self.announce = announce
        self.stop = stop
        if study.evaluation.tasks:
            parse_tasks(",".join(study.evaluation.tasks), with_squad=False, with_hotpotqa=False)
        for cell in study.cells:
            tokenizer = load_tokenizer(cell.experiment.data.tokenizer)
            check_vocabulary(tokenizer, cell.experiment.model)
        for cell in study.cells:
            for seed in study.seeds:
                self._result(cell, seed)  # a conflict
        prepare_workdir(workdir)

    def run(self, cells: Sequence[Cell]) -> None:
        """Trains and measures what is not done. Raises Interrupted when told to stop."""
        for number, cell in enumerate(cells, start=1):
            self._go_on()
            seeds = [seed for seed in self.study.seeds if not self._done(cell, seed)]
            self.announce(f"{cell.name} ({number} of {len(cells)}): seeds {_listed(seeds)} to do")
            if not seeds:
                continue
            try:
                self._run_cell(cell, seeds)
            except Interrupted:
                raise
            except Exception as error:  # the study survives a run that cannot
                reason = f"{type(error).__name__}: {first_line(error)}"
                self.announce(f"{cell.name} failed: {reason}")
                for seed in seeds:
                    if not self._done(cell, seed):
                        self._write(cell, seed, {"status": "failed", "reason": reason})

    def _go_on(self) -> None:
        if self.stop():
            raise Interrupted

    def results(self) -> list[Result]:
        """Of every run of the study that has one, in its order."""
        found = [self._result(c, seed) for c in self.study.cells for seed in self.study.seeds]
        return [result for result in found if result is not None]

    def _run_cell(self, cell: Cell, seeds: Sequence[int]) -> None:
        untrained = [seed for seed in seeds if not self._folder(cell, seed, "model").is_dir()]
        if untrained and self.study.seeds_together:
            self._train_together(cell, untrained)
        elif untrained:
            for seed in untrained:
                self._train_alone(cell, seed)
        for seed in seeds:
            if not self._done(cell, seed):
                self._go_on()
                self._measure(cell, seed)
        shutil.rmtree(self.workdir / "cells" / cell.name, ignore_errors=True)

    def _train_together(self, cell: Cell, seeds: Sequence[int]) -> None:
        folder = self.workdir / "cells" / cell.name / f"seeds-{'-'.join(map(str, seeds))}"
        folder.mkdir(parents=True, exist_ok=True)
        experiment = cell.run(seeds[0])
        outcomes = together.train(experiment, seeds, folder, announce=self.announce, stop=self.stop)
        for seed, outcome in zip(seeds, outcomes, strict=True):
            self._keep(cell, seed, outcome)

    def _train_alone(self, cell: Cell, seed: int) -> None:
        experiment = cell.run(seed)
        folder = self.workdir / "cells" / cell.name / f"seed-{seed}"
        began = time.perf_counter()
        diverged = None
        try:
            loop.run(experiment, loop.Options(workdir=folder))
        except loop.TrainingError as error:
            diverged = first_line(error)
        found = latest(folder)
        if diverged is None and (found is None or found[0] < experiment.training.steps):
            raise Interrupted
        params = {} if diverged else flatten_model(load_model(folder)[1])
        spent = Spent(time.perf_counter() - began)
        self._keep(cell, seed, Outcome(params, diverged, _log(folder), spent))

    def _keep(self, cell: Cell, seed: int, outcome: Outcome) -> None:
        """Writes the model, or that there is none worth measuring; training is then over."""
        spent = outcome.spent
        step = spent.of_step(outcome.log[-1]["step"]) if outcome.log else None
        facts = {
            "train_seconds": round(spent.seconds, 1),
            "preparing_seconds": round(spent.preparing, 1),
            "milliseconds_per_step": None if step is None else round(1000 * step, 2),
            "log": outcome.log,
        }
        if outcome.diverged is not None:
            facts |= {"status": "diverged", "reason": outcome.diverged}
            self._write(cell, seed, facts)
            return
        folder = self._folder(cell, seed)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "training.json", json.dumps(facts))
        write_export(cell.run(seed), outcome.params, folder / "model")

    def _measure(self, cell: Cell, seed: int) -> None:
        began = time.perf_counter()
        folder = self._folder(cell, seed)
        facts = json.loads((folder / "training.json").read_text())
        experiment, model = load_model(folder / "model")
        measures = measure(experiment, model, self.study.evaluation, folder / "eval.json")
        final = facts["log"][-1]
        measures.append({"measure": "training loss", "value": final["loss"]})
        facts |= {"status": "finished", "measures": measures}
        facts |= cache_facts(experiment, model, final.get("softmax_fraction", {}))
        facts["evaluation_seconds"] = round(time.perf_counter() - began, 1)
        self._write(cell, seed, facts)
        self.announce(
            f"{cell.run(seed).name}: measured in {facts['evaluation_seconds']} s; trained in "
            f"{facts['train_seconds']} s with its other seeds, {facts['preparing_seconds']} s of "
            f"them before the first step"
        )

    def _write(self, cell: Cell, seed: int, facts: Result) -> None:
        folder = self._folder(cell, seed)
        folder.mkdir(parents=True, exist_ok=True)
        device = jax.devices()[0]
        result = {
            "study": self.study.name,
            "run": cell.run(seed).name,
            "mixer": cell.mixer,
            "layout": cell.layout,
            "full_share": cell.full_share,
            "seed": seed,
            **facts,
            "jax": jax.__version__,
            "device": f"{device.platform} {device.device_kind}",
            "key": self._key(cell, seed),
        }
        write_whole(folder / "result.json", json.dumps(result, indent=1) + "\n")

    def _result(self, cell: Cell, seed: int) -> Result | None:
        path = self._folder(cell, seed, "result.json")
        if not path.is_file():
            return None
        try:
            result = json.loads(path.read_text())
            same = result["key"] == self._key(cell, seed)
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"--workdir: {path} is no result of a run; remove it") from None
        if not same and result["status"] in DONE:
            raise UserError(
                f"--workdir: {path} was made with other settings than the plan's; "
                "give another --workdir or remove the run's folder"
            )
        return result

    def _done(self, cell: Cell, seed: int) -> bool:
        result = self._result(cell, seed)
        return result is not None and result["status"] in DONE

    def _key(self, cell: Cell, seed: int) -> str:
        evaluation = json.loads(to_json(self.study.evaluation))
        return digest(
            {
                "experiment": json.loads(to_json(cell.run(seed))),
                "evaluation": evaluation,
                "seeds_together": self.study.seeds_together,
            }
        )

    def _folder(self, cell: Cell, seed: int, *parts: str) -> Path:
        return self.workdir.joinpath("runs", cell.run(seed).name, *parts)


def flatten_model(model: HybridLM) -> dict[str, jax.Array]:
    """Parameters by path."""
    return flatten(nnx.state(model, nnx.Param))


def measure(
    experiment: Experiment, model: HybridLM, evaluation: Evaluation, out: Path
) -> list[Row]:
    """Everything an evaluation asks for, one row per number."""
    rows: list[Row] = []
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    for of in evaluation.recall:
        for found in recall.measure(model, of, tokenizer):
            task = found.pop("task")
            right, asked = found.pop("right"), found.pop("questions")
            rows.append({"measure": task, **found, "value": right / asked, "count": asked})
    if evaluation.tasks:
        options = EvalOptions(
            checkpoint=experiment.name,
            tasks=evaluation.tasks,
            lengths=evaluation.lengths,
            num_samples=evaluation.num_samples,
            out=out,
        )
        for row in evaluate(options, experiment, model, announce=lambda line: None).rows:
            rows += rows_of_eval(row)
    return rows


def rows_of_eval(row: Row) -> list[Row]:
    """A row of eval.py as the study's rows; what did not fit a length gives none."""
    same = {"length": row["length"]}
    if "loss" in row:
        bits = {"measure": "bits per byte", "value": row["bits_per_byte"], "count": row["bytes"]}
        loss = {"measure": "loss", "value": row["loss"], "count": row["tokens"]}
        by_position = [
            {
                "measure": "loss by position",
                "distance_from": int(part["positions"].split("-")[0]),
                "distance_to": int(part["positions"].split("-")[1]) + 1,
                "value": part["loss"],
            }
            for part in row["loss_by_position"]
            if part["loss"] is not None
        ]
        return [{**same, **found} for found in (bits, loss, *by_position)]
    if "score" in row:
        return [{**same, "measure": row["task"], "value": row["score"] / 100}]
    metrics = row.get("metrics", {})
    return [
        {**same, "measure": f"{row['task']} {name}", "value": value, "count": row["samples"]}
        for name, value in metrics.items()
    ]


def cache_facts(
    experiment: Experiment, model: HybridLM, softmax_fraction: dict[str, Any]
) -> dict[str, Any]:
    """Parameters, and bytes of one row: keys and values per token, and what it holds besides.

    Of routed blocks, the keys and values of the chunks that softmax kept at the end of training.
    """
    config = experiment.model
    blocks = memory(model, experiment.data.sequence_length)
    kept, fractions = 0.0, []
    for block, held in zip(config.blocks, blocks, strict=True):
        mixer = block.mixer
        if isinstance(mixer, ChunkRoutedConfig):
            fraction = float(np.mean(softmax_fraction[f"blocks.{held.block}"]))
            width = mixer.num_heads * (mixer.key_dim + mixer.value_dim)
            kept += fraction * width * jnp.dtype(config.compute_dtype).itemsize
            fractions.append(fraction)
        else:
            kept += held.cache_bytes_per_token
    return {
        "parameters": sum(x.size for x in flatten_model(model).values()),
        "kv_bytes_per_token": kept,
        "state_bytes": sum(held.row_bytes for held in blocks),
        "softmax_fraction": float(np.mean(fractions)) if fractions else None,
    }


def _log(folder: Path) -> list[dict[str, Any]]:
    """The training records of a run of the training loop, as `together` has them."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["event"] == "train"]
    return [
        {
            "step": record["step"],
            "loss": record["loss"],
            "softmax_fraction": {
                block: of["softmax_fraction"] for block, of in record.get("routing", {}).items()
            },
        }
        for record in records
    ]


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"
