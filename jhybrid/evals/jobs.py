"""One row of results each: a task at a length. `facts` is all that the row depends on."""

import dataclasses
import hashlib
from typing import Any, Protocol

import numpy as np

from jhybrid.data import Tokenizer
from jhybrid.evals.perplexity import LogLikelihoods, perplexity
from jhybrid.evals.prediction import Predict, automatic_batch_size
from jhybrid.evals.results import Predictions, Row
from jhybrid.evals.ruler import scoring
from jhybrid.evals.ruler.fitting import DoesNotFitError
from jhybrid.evals.ruler.source import RulerSource
from pallas_kernels.array_types import Int


class Job(Protocol):
    def facts(self) -> dict[str, Any]: ...

    def run(self, predictions: Predictions, key: str) -> Row: ...


@dataclasses.dataclass(frozen=True)
class PerplexityJob:
    log_likelihoods: LogLikelihoods
    tokens: Int[np.ndarray, "n"]
    tokenizer: Tokenizer
    length: int
    batch_size: int | None

    def facts(self) -> dict[str, Any]:
        return {"length": self.length, "text": hashlib.sha256(self.tokens.tobytes()).hexdigest()}

    def run(self, predictions: Predictions, key: str) -> Row:
        return perplexity(
            self.log_likelihoods,
            self.tokens,
            self.tokenizer.byte_lengths,
            length=self.length,
            batch_size=self.batch_size or automatic_batch_size(self.length),
        )


@dataclasses.dataclass(frozen=True)
class RulerJob:
    predict: Predict
    source: RulerSource
    name: str
    length: int

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self.source.key(self.name, self.length))

    def run(self, predictions: Predictions, key: str) -> Row:
        task, tokenizer = self.source.task(self.name), self.source.tokenizer
        known = {
            "haystack": task.haystack,
            "seed": self.source.options.seed,
            "faithful": self.source.options.faithful,
        }
        try:
            samples = self.source.samples(task, self.length)
        except DoesNotFitError as error:
            return {**known, "result": str(error), "needs": error.needs}
        open_rows = [row for row in samples if predictions.find(key, row["index"]) is None]
        prompts = [tokenizer.encode(row["input"] + row["answer_prefix"]) for row in open_rows]
        for i, answer in self.predict(prompts, self.length, task.tokens_to_generate):
            row = open_rows[i]
            text = tokenizer.decode(answer)
            score = scoring.METRICS[task.metric](scoring.clean(text), row["outputs"])
            predictions.add(
                key,
                row["index"],
                text,
                task=f"ruler:{self.name}",
                length=self.length,
                outputs=row["outputs"],
                score=score,
            )
        answers = [predictions.find(key, row["index"]) or "" for row in samples]
        lengths = [row["length"] for row in samples]
        return {
            **known,
            **scoring.summarize(task.metric, answers, samples),
            "tokens_to_generate": task.tokens_to_generate,
            "tokens_used": {"least": min(lengths), "most": max(lengths)},
        }
