"""Tasks of the LM Evaluation Harness as rows of results."""

import dataclasses
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]  (the extra `eval`)
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from jhybrid.config import Experiment
from jhybrid.errors import UserError, first_line
from jhybrid.evals.harness import HarnessModel
from jhybrid.evals.options import EvalOptions
from jhybrid.evals.results import Predictions, Row
from jhybrid.model import HybridLM

BOOTSTRAP = 1000  # resamples for the errors that have no formula


@dataclasses.dataclass(frozen=True)
class HarnessJob:
    """One task, its inputs cut to `length` tokens on the left, as lm_eval does."""

    experiment: Experiment
    model: HybridLM
    options: EvalOptions
    tasks: Any  # lm_eval's TaskManager
    name: str
    length: int

    def facts(self) -> dict[str, Any]:
        folder = self.options.include_path
        files = sorted(Path(folder).rglob("*.yaml")) if folder is not None else []
        return {
            "task": f"lm:{self.name}",
            "length": self.length,
            "limit": self.options.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
            "include_path": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        }

    def run(self, predictions: Predictions, key: str) -> Row:
        try:
            self.tasks.load([self.name])
        except Exception as error:  # whatever the task's own loader raises: its data is missing
            raise UserError(
                f"--tasks lm:{self.name}: cannot be loaded ({first_line(error)})"
            ) from None
        model = HarnessModel(
            (self.experiment, self.model),
            max_length=self.length,
            batch_size=self.options.batch_size,
        )
        found = simple_evaluate(
            model=model,
            tasks=[self.name],
            task_manager=self.tasks,
            limit=self.options.limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
        )
        samples = [(task, row) for task, rows in found["samples"].items() for row in rows]
        for index, (task, row) in enumerate(samples):
            scores = {name: row[name] for name in row["metrics"]}
            answer = repr(row["filtered_resps"])
            predictions.add(key, index, answer, task=f"lm:{task}", doc=row["doc_id"], **scores)
        return {
            **_metrics(found["results"], self.name),
            "samples": len(samples),
            "truncated": sum(model.truncated.values()),
            "versions": found["versions"],
        }


def jobs(
    options: EvalOptions, experiment: Experiment, model: HybridLM
) -> dict[tuple[str, int], HarnessJob]:
    """Every task at every length; UserError if lm_eval does not know one."""
    tasks = TaskManager(include_path=options.include_path)
    if unknown := set(options.harness_tasks) - set(tasks.all_tasks):
        raise UserError(f"--tasks lm:{min(unknown)}: lm_eval knows no such task")
    return {
        (f"lm:{name}", length): HarnessJob(experiment, model, options, tasks, name, length)
        for name in options.harness_tasks
        for length in options.lengths
    }


def _metrics(results: dict[str, dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """lm_eval's "acc,none" and "acc_stderr,none" of each task; a group's own and its tasks'."""
    metrics, errors = {}, {}
    for task, values in results.items():
        for label, value in values.items():
            metric, _, filtered = label.partition(",")
            if not filtered or not isinstance(value, float | int):
                continue
            kind, metric = (
                (errors, metric.removesuffix("_stderr"))
                if metric.endswith("_stderr")
                else (metrics, metric)
            )
            metric = metric if filtered == "none" else f"{metric},{filtered}"
            kind[metric if task == name else f"{task}:{metric}"] = value
    return {"metrics": metrics, "standard_errors": errors}
