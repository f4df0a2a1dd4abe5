"""Accuracy of recall by document length and by the distance from what is asked for.

An answer counts when the model's likeliest token is right at every token of it, given the right
ones before: what greedy decoding would have to get right from the start. The program is that of
perplexity, with as many rows, so that both measure a length with one.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.config import AssociativeRecall
from jhybrid.data import Tokenizer
from jhybrid.data.needle import NeedleTask
from jhybrid.data.recall import TASK_TOKENS
from jhybrid.evals.perplexity import score
from jhybrid.evals.prediction import automatic_batch_size
from jhybrid.model import HybridLM
from jhybrid.study.batches import recall_document
from jhybrid.study.plan import RecallMeasure
from pallas_kernels.array_types import Bool, Int

SEED = 20_250_709  # of held-out documents, the same for every run
SHORTEST_PROGRAM = 256  # tokens; shorter documents are filled up, which costs less than to compile


class Questions(NamedTuple):
    """Documents with Q answers each. `at` are the places read; an answer may take several."""

    tokens: Int[np.ndarray, "B T"]
    at: Int[np.ndarray, "B N"]
    answers: Int[np.ndarray, "B N"]  # the right token at each of these places; -1: none
    question: Int[np.ndarray, "B N"]  # which of the document's questions the place belongs to
    distances: Int[np.ndarray, "B Q"]  # tokens from what is asked for to the answer


def measure(model: HybridLM, of: RecallMeasure, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Rows of length, distance from (included) and to (excluded), questions, right answers."""
    rows = []
    for length in of.lengths:
        rows += count(model, of, length, held_out(of, length, tokenizer))
    return rows


def count(
    model: HybridLM, of: RecallMeasure, length: int, questions: Questions
) -> Iterator[dict[str, Any]]:
    """One row per power of two that the distances of `questions` reach."""
    graphdef, weights = nnx.split(model)
    documents = len(questions.tokens)
    padding = ((0, 0), (0, max(0, SHORTEST_PROGRAM - length)))
    tokens = np.pad(questions.tokens, padding)
    rows = min(automatic_batch_size(tokens.shape[1]), documents)
    targets = np.full(tokens.shape, -1, np.int32)
    document, place = np.nonzero(questions.answers >= 0)
    targets[document, questions.at[document, place]] = questions.answers[document, place]
    likeliest = []
    for start in range(0, documents, rows):
        # The last batch repeats its last document, so that one shape is compiled.
        part = np.minimum(np.arange(start, start + rows), documents - 1)
        likeliest.append(np.asarray(score(graphdef, weights, tokens[part], targets[part])[0]))
    right = np.take_along_axis(np.concatenate(likeliest)[:documents], questions.at, 1)
    places = right | (questions.answers < 0)
    correct = answered(places, questions.question, questions.distances.shape[1])
    exponents = np.floor(np.log2(np.maximum(questions.distances, 1))).astype(int)
    for exponent in np.unique(exponents):
        chosen = exponents == exponent
        yield {
            "task": type(of.task).__name__,
            "length": length,
            "distance_from": 2 ** int(exponent),
            "distance_to": 2 ** (int(exponent) + 1),
            "questions": int(chosen.sum()),
            "right": int(correct[chosen].sum()),
        }


def answered(
    places: Bool[np.ndarray, "B N"], question: Int[np.ndarray, "B N"], questions: int
) -> Bool[np.ndarray, "B Q"]:
    """Whether every place of a question is right."""
    found = np.ones((len(places), questions), bool)
    document = np.broadcast_to(np.arange(len(places))[:, None], places.shape)
    np.logical_and.at(found, (document, question), places)
    return found


@functools.lru_cache(maxsize=32)
def held_out(of: RecallMeasure, length: int, tokenizer: Tokenizer) -> Questions:
    """The documents of a measure at one length, the same at every call."""
    task: Any = dataclasses.replace(of.task, length=length)
    if isinstance(task, AssociativeRecall):
        vocabulary = jnp.asarray(tokenizer.ordinary_ids[:TASK_TOKENS], jnp.int32)
        keys = jax.random.split(jax.random.key(SEED), of.documents)
        draw = jax.jit(jax.vmap(lambda key: recall_document(key, vocabulary, task)))
        found = jax.tree.map(np.asarray, draw(keys))
        at = found["queries"]
        answers = np.take_along_axis(found["targets"], at, 1)
        question = np.broadcast_to(np.arange(at.shape[1]), at.shape)
        return Questions(found["tokens"], at, answers, question, found["distances"])
    needles = NeedleTask(dataclasses.replace(task, answer_only=True), tokenizer, "validation")
    examples = [needles.example(np.random.default_rng((SEED, i))) for i in range(of.documents)]
    tokens = np.full((of.documents, length), tokenizer.eos, np.int32)
    places = max(int((example.targets >= 0).sum()) for example in examples)
    at, answers = np.zeros((of.documents, places), int), np.full((of.documents, places), -1)
    distances = np.zeros((of.documents, 1), int)
    for i, example in enumerate(examples):
        tokens[i, : len(example.tokens)] = example.tokens
        asked = np.flatnonzero(example.targets >= 0)
        at[i, : len(asked)], answers[i, : len(asked)] = asked, example.targets[asked]
        distances[i] = asked[0] - _needle(example.tokens[: asked[0]], example.targets[asked])
    return Questions(tokens, at, answers, np.zeros_like(at), distances)


def _needle(context: Int[np.ndarray, "n"], answer: Int[np.ndarray, "m"]) -> int:
    """Where the answer begins in the text: the last place that spells all of it but its end.

    The answer's last two tokens are the full stop and end-of-text.
    """
    value = answer[:-2]
    windows = np.lib.stride_tricks.sliding_window_view(context, len(value))
    return int(np.flatnonzero((windows == value).all(1))[-1])
