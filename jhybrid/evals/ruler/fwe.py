"""Frequent words extraction: the three most frequent coded words under a zeta distribution."""

import dataclasses
import math
import random

from jhybrid.evals.ruler import templates
from jhybrid.evals.ruler.task import Sample, order_rng
from jhybrid.evals.ruler.words import LOWERCASE, distinct, letters

ZETA_2 = math.pi**2 / 6
MINIMUM_WORDS = 53  # from here on rank 4 occurs more often than rank 5: the answer is unique
_TEMPLATE = templates.FREQUENT_WORDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords:
    """Word of rank r occurs int(num_words * r**-2 / zeta(2)) times; rank 1 is the noise `...`.

    With A = L - 50 tokens available the vocabulary has A // 50 words of six letters, and
    num_words starts at A // 6 and moves in steps of A // 32. A size is the number of such steps.
    """

    name: str
    faithful: bool = True

    haystack = "coded words"
    tokens_to_generate = _TEMPLATE.tokens_to_generate
    metric = "all"
    shortest_length = 250  # a vocabulary of four: the noise and three answers

    def increment(self, length: int) -> int:
        return 1

    def minimum(self, length: int, index: int) -> int:
        step = (length - self.tokens_to_generate) // 32
        return math.ceil((MINIMUM_WORDS - self.num_words(0, length)) / step)

    def num_words(self, size: int, length: int) -> int:
        available = length - self.tokens_to_generate
        step = available // 32
        return available // 6 % step + size * step

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        vocabulary = (length - self.tokens_to_generate) // 50
        words = sorted(distinct(lambda: letters(rng, LOWERCASE, 6), vocabulary))
        order_rng(self.faithful, rng).shuffle(words)
        words[0] = "..."
        scale = self.num_words(size, length) / ZETA_2
        text = [word for rank, word in enumerate(words, 1) for _ in range(int(scale / rank**2))]
        order_rng(self.faithful, rng).shuffle(text)
        return Sample(
            input=_TEMPLATE.text.format(context=" ".join(text)),
            answer_prefix=_TEMPLATE.answer_prefix,
            outputs=tuple(words[1:4]),
        )
