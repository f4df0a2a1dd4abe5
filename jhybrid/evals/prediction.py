"""Greedy answers to many prompts, in batches through `jhybrid.decoding`."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from jhybrid.decoding import generate
from jhybrid.model import HybridLM

LONGEST_ANSWER = 128  # tokens that every call generates, so that tasks share compiled programs


class Predict(Protocol):
    def __call__(
        self, prompts: Sequence[Sequence[int]], length: int, max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """(index of the prompt, answer tokens) for prompts shorter than `length`."""
        ...


def automatic_batch_size(length: int) -> int:
    """At most 32 rows and about 32k tokens, at least one row."""
    return max(1, min(32, 32768 // length))


def predictor(model: HybridLM, stop_token: int, batch_size: int | None) -> Predict:
    """Answers end before `stop_token`. Prompts are padded on the right, never cut.

    All calls with one length and as many prompts compile one program between them: on a CPU
    compiling takes longer than the answers, and a few more padded tokens take little.
    """

    def predict(
        prompts: Sequence[Sequence[int]], length: int, max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        rows = min(batch_size or automatic_batch_size(length), len(prompts))
        new_tokens = max(LONGEST_ANSWER, max_new_tokens)
        for start in range(0, len(prompts), max(rows, 1)):
            chosen = range(start, min(start + rows, len(prompts)))
            tokens = np.zeros((rows, length), np.int32)
            lengths = np.zeros(rows, np.int32)
            for row in range(rows):
                # The last batch repeats its last prompt.
                prompt = prompts[min(start + row, chosen[-1])]
                tokens[row, : len(prompt)] = prompt
                lengths[row] = len(prompt)
            answers = np.asarray(
                generate(
                    model,
                    jnp.asarray(tokens),
                    jnp.asarray(lengths),
                    max_new_tokens=new_tokens,
                    stop_token=stop_token,
                ).tokens
            )
            for index, answer in zip(chosen, answers[:, :max_new_tokens].tolist(), strict=False):
                end = answer.index(stop_token) if stop_token in answer else len(answer)
                yield index, answer[:end]

    return predict
