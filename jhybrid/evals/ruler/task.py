"""What a RULER task is: something that draws a sample of a given size."""

import dataclasses
import random
from typing import Any, Protocol

SEED = 42  # of NVIDIA's generators; also the seed of their fixed orders


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question. The model reads `input + answer_prefix`."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix


class Task(Protocol):
    """A task with its arguments and its material; `size` is its unit of haystack.

    Haystack units: words of essay, lines, listed words, or documents. Sizes from `minimum` up are
    valid; a sample that turns out too long shrinks by `increment`.
    """

    @property
    def name(self) -> str: ...

    @property
    def haystack(self) -> str:
        """The label of what surrounds the answers."""
        ...

    @property
    def tokens_to_generate(self) -> int: ...

    @property
    def metric(self) -> str:
        """A key of scoring.METRICS."""
        ...

    @property
    def shortest_length(self) -> int:
        """Below this many tokens the task has no question to ask."""
        ...

    def increment(self, length: int) -> int: ...

    def minimum(self, length: int, index: int) -> int: ...

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        """Sample number `index`, made for a limit of `length` tokens but of any token count."""
        ...


def order_rng(faithful: bool, rng: random.Random) -> random.Random:
    """What shuffles needles, listed words and documents.

    NVIDIA restarts `random.Random(42)` for every sample, so orders repeat: the gold document of
    n is always in the same slot, four needles always appear as 3rd, 2nd, 4th, 1st.
    """
    return random.Random(SEED) if faithful else rng
