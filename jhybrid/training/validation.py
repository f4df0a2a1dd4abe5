"""Loss and bits per byte on the held-out part of each data source, during training."""

import dataclasses
import math
from typing import Any

import numpy as np

from jhybrid import data
from jhybrid.config import Experiment
from jhybrid.data.sources import is_synthetic
from jhybrid.training.step import Program, TrainState


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Sums over the targets of some batches."""

    nats: float = 0.0
    targets: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the target tokens

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.nats + other.nats,
            self.targets + other.targets,
            self.text_bytes + other.text_bytes,
        )

    def record(self) -> dict[str, Any]:
        """Mean loss in nats per target, and bits/byte = nats / log(2) / bytes."""
        return {
            "loss": self.nats / self.targets if self.targets else None,
            "bits_per_byte": self.nats / math.log(2) / self.text_bytes if self.text_bytes else None,
            "targets": self.targets,
        }


class Validation:
    """The first `training.eval_batches` held-out batches of every source, the same every time."""

    def __init__(self, experiment: Experiment):
        sources = experiment.data.sources
        self._batches = {
            f"{index}:{type(source).__name__}": data.validation_batches(
                experiment.data, sources=[index]
            )[: experiment.training.eval_batches]
            for index, source in enumerate(sources)
        }
        # Where there is text, the headline is text alone: a generated source has its own scale.
        text = [not is_synthetic(source) for source in sources]
        self._headline = [is_text or not any(text) for is_text in text]

    def __call__(self, program: Program, state: TrainState) -> dict[str, Any]:
        """The headline's record, with that of each source under "sources" if there are several."""
        scores = {
            name: sum((_score(program, state, batch) for batch in batches), Score())
            for name, batches in self._batches.items()
        }
        chosen = (score for score, use in zip(scores.values(), self._headline, strict=True) if use)
        record = sum(chosen, Score()).record()
        if len(scores) > 1:
            record["sources"] = {name: score.record() for name, score in scores.items()}
        return record


def _score(program: Program, state: TrainState, batch: data.Batch) -> Score:
    nats, targets = program.eval_step(state.params, state.frozen, program.put_whole_batch(batch))
    return Score(float(nats), int(targets), int(np.sum(batch["bytes"])))
