"""What a study trains and measures, as frozen data. Imports no JAX.

A plan file is a Python file with `def study() -> Study`. A cell is one model and recipe; a run is a
cell with one seed.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from jhybrid.config import AssociativeRecall, Experiment, Needle
from jhybrid.config_fields import frozen, require, require_positive
from jhybrid.layouts import full_layers
from jhybrid.model_families import like
from jhybrid.serialization import to_json


@frozen
class RecallMeasure:
    """Held-out documents of a task at lengths of their own; accuracy by distance from the answer.

    Queries of `AssociativeRecall` stand where its `power` puts them: 1 spreads them evenly.
    """

    task: AssociativeRecall | Needle
    lengths: tuple[int, ...]
    documents: int = 64  # per length

    def __post_init__(self):
        require_positive("recall", self, "documents")
        for length in self.lengths:
            dataclasses.replace(self.task, length=length)  # may refuse


@frozen
class Evaluation:
    """What is measured of every run; tasks and lengths as those of eval.py."""

    tasks: tuple[str, ...] = ("perplexity",)
    lengths: tuple[int, ...] = (512,)
    num_samples: int = 20  # of each RULER task and length
    recall: tuple[RecallMeasure, ...] = ()

    def __post_init__(self):
        require_positive("evaluation", self, "num_samples")
        require(
            bool(self.tasks) == bool(self.lengths),
            "evaluation: tasks and lengths go together",
        )


@frozen
class Cell:
    """One mixer in one layout. The seeds of its experiment are those of the run, not its own."""

    mixer: str
    layout: str
    full_share: float  # of the layers, those of full attention
    experiment: Experiment

    @property
    def name(self) -> str:
        return f"{self.mixer}_{self.layout}".replace(":", "to")

    def run(self, seed: int) -> Experiment:
        """The experiment of one run. All runs of one seed see the same data."""
        return dataclasses.replace(
            self.experiment,
            name=f"{self.name}_seed{seed}",
            data=dataclasses.replace(self.experiment.data, seed=seed),
            training=dataclasses.replace(self.experiment.training, seed=seed),
        )


@frozen
class Study:
    """Every cell with every seed.

    `seeds_together`: one program trains all seeds of a cell, on one device, and draws its batches
    there (`jhybrid.study.together`); else every run is one of train.py's.
    """

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluation: Evaluation = Evaluation()
    seeds_together: bool = True

    def __post_init__(self):
        require(len(self.cells) > 0, "study.cells must not be empty")
        require(len(self.seeds) > 0, "study.seeds must not be empty")
        require_distinct("study.seeds", self.seeds)
        require_distinct("study.cells: run", [cell.name for cell in self.cells])
        models: dict[str, str] = {}
        for cell in self.cells:
            other = models.setdefault(_facts(cell), cell.name)
            require(
                other == cell.name,
                f"study.cells: {cell.name} and {other} are the same model, trained alike: "
                "a duplicate run",
            )


def require_distinct(name: str, values: Sequence[Any]) -> None:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    require(not twice, f"{name} {', '.join(twice)} is named twice: a duplicate run")


def _facts(cell: Cell) -> str:
    facts = json.loads(to_json(cell.experiment))
    del facts["name"]
    return json.dumps(facts, sort_keys=True)


def grid(
    mixers: Iterable[str],
    layouts: Iterable[str],
    experiment: Experiment,
    *,
    depth: int,
    transformer: bool = True,
) -> tuple[Cell, ...]:
    """Every mixer of `model_families` in every layout, and once the Transformer they approach.

    `experiment` says all but the blocks; its own blocks count for nothing. Raises UserError for an
    unknown mixer and a layout that `depth` does not fit.
    """
    layouts = tuple(layouts)
    require("full" not in layouts, "layouts: full is the Transformer, whatever the mixer")
    pairs = [(mixer, layout) for mixer in mixers for layout in layouts]
    pairs += [("softmax", "full")] if transformer else []
    return tuple(_cell(mixer, layout, experiment, depth) for mixer, layout in pairs)


def _cell(mixer: str, layout: str, experiment: Experiment, depth: int) -> Cell:
    model = like(experiment.model, mixer, layout, depth=depth)
    return Cell(
        mixer=mixer,
        layout=layout,
        full_share=len(full_layers(layout, depth)) / depth,
        experiment=dataclasses.replace(experiment, model=model),
    )
