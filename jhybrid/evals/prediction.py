"""Greedy answers to many prompts: batches of similar length through `jhybrid.decoding`."""

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jhybrid.decoding import generate
from jhybrid.model import HybridLM

Predict = Callable[[Sequence[Sequence[int]], int], Iterator[tuple[int, list[int]]]]


def bucket(length: int) -> int:
    """`length` rounded up to one of eight sizes per octave, multiples of 64: few compilations."""
    step = max(64, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def automatic_batch_size(length: int) -> int:
    """At most 32 rows and about 32k tokens, at least one row."""
    return max(1, min(32, 32768 // length))


def predictor(model: HybridLM, stop_token: int, batch_size: int | None) -> Predict:
    """A function (prompts, max_new_tokens) -> (index, answer tokens), in order of prompt length.

    An answer ends before `stop_token`. Prompts are padded on the right, never cut.
    """

    def predict(
        prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        if not prompts:
            return
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows = batch_size or automatic_batch_size(max(map(len, prompts)) + max_new_tokens)
        rows = min(rows, len(prompts))
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            # The last batch repeats its last prompt, so that one batch size is compiled.
            batch = [prompts[i] for i in chosen] + [prompts[chosen[-1]]] * (rows - len(chosen))
            lengths = np.array([len(prompt) for prompt in batch], np.int32)
            tokens = np.zeros((rows, bucket(int(lengths.max()))), np.int32)
            for row, prompt in enumerate(batch):
                tokens[row, : len(prompt)] = prompt
            answers = np.asarray(
                generate(
                    model,
                    jnp.asarray(tokens),
                    jnp.asarray(lengths),
                    max_new_tokens=max_new_tokens,
                    stop_token=stop_token,
                )
            )
            for index, answer in zip(chosen, answers.tolist(), strict=False):
                end = answer.index(stop_token) if stop_token in answer else len(answer)
                yield index, answer[:end]

    return predict
