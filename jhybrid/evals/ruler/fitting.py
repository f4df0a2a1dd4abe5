"""How much haystack fits: sizes by token count, and the shortest length a task can have."""

import random
from collections.abc import Callable, Iterable

from jhybrid.evals.ruler.task import Sample, Task

CountTokens = Callable[[str], int]


class DoesNotFitError(Exception):
    """Even the smallest haystack is too long; `needs` is the shortest length that is not."""

    def __init__(self, needs: int):
        super().__init__(f"does not fit, needs >= {needs}")
        self.needs = needs


def largest_fitting(count: Callable[[int], int], limit: int, minimum: int) -> int:
    """The largest size with count(size) <= limit, at least `minimum`; count grows with size.

    A bracketing search that probes where a straight line would cross the limit and falls back
    on halving: the answer of a binary search for a third of the tokenization.
    """
    low, low_count = minimum, count(minimum)
    if low_count > limit:
        return minimum
    high, high_count = None, 0
    while high is None:
        # A fixed cost makes the proportional guess too low, so it goes an eighth further.
        probe = 1 + max(2 * low, low * limit * 9 // (8 * max(low_count, 1)))
        probe_count = count(probe)
        if probe_count <= limit:
            low, low_count = probe, probe_count
        else:
            high, high_count = probe, probe_count
    halve = False
    while high - low > 1:
        width = high - low
        line = low + (limit - low_count) * width // max(high_count - low_count, 1)
        probe = low + width // 2 if halve else min(max(line, low + 1), high - 1)
        probe_count = count(probe)
        if probe_count <= limit:
            low, low_count = probe, probe_count
        else:
            high, high_count = probe, probe_count
        halve = not halve and high - low > width // 2
    return low


def draw(task: Task, length: int, seed: int, index: int | str, size: int) -> Sample:
    """Sample `index` at `size`: its own random stream, so it does not depend on the others.

    The stream is the same at every length: sample i hides the same answers, in more haystack.
    """
    rng = random.Random(f"{seed}/{task.name}/{index}")
    return task.draw(rng, size, length, index if isinstance(index, int) else 0)


def required_length(
    task: Task, length: int, seed: int, indices: Iterable[int], count_tokens: CountTokens
) -> int:
    """The shortest length, `length` or more, at which each sample fits with its least haystack.

    What a task draws can depend on the length (repeats, vocabulary), hence the iteration.
    """
    indices = tuple(indices)
    at = max(length, task.shortest_length)
    while True:
        smallest = (draw(task, at, seed, i, task.minimum(at, i)).prompt for i in indices)
        needs = max(count_tokens(prompt) for prompt in smallest) + task.tokens_to_generate
        if needs <= at:
            return at
        at = needs


def fitted_size(task: Task, length: int, seed: int, count_tokens: CountTokens) -> int:
    """The haystack size that fills `length`, measured on a draw of its own."""

    def count(size: int) -> int:
        return count_tokens(draw(task, length, seed, "fit", size).prompt)

    return largest_fitting(count, length - task.tokens_to_generate, task.minimum(length, 0))


def draw_within(
    task: Task, length: int, seed: int, index: int, size: int, count_tokens: CountTokens
) -> tuple[Sample, int]:
    """Sample `index` and its prompt's tokens: drawn at `size`, shrunk by increments until it fits.

    Raises:
        DoesNotFitError: not even the smallest haystack fits.
    """
    increment, minimum = task.increment(length), task.minimum(length, index)
    size = max(size, minimum)
    while True:
        sample = draw(task, length, seed, index, size)
        tokens = count_tokens(sample.prompt)
        if tokens + task.tokens_to_generate <= length:
            return sample, tokens
        if size == minimum:
            raise DoesNotFitError(required_length(task, length, seed, (index,), count_tokens))
        size = max(minimum, size - (increment if size > increment else max(1, increment // 10)))
