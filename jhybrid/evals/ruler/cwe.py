"""Common words extraction: ten words of a long numbered list appear more often than the rest."""

import dataclasses
import random

from jhybrid.evals.ruler import templates
from jhybrid.evals.ruler.task import Sample, order_rng
from jhybrid.evals.ruler.words import sample_words

NUM_COMMON = 10
_TEMPLATE = templates.COMMON_WORDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords:
    """Of `size` different words the first ten are repeated 30 times and the others 3 times.

    One solved example precedes (40 words, 10 and 3 times). Below 4096 tokens: 6 and 1 times, and
    an example of 20 words, 3 and 1 times.
    """

    name: str
    faithful: bool = True

    haystack = "words"
    tokens_to_generate = _TEMPLATE.tokens_to_generate
    metric = "all"
    shortest_length = 0

    def increment(self, length: int) -> int:
        return 10

    def minimum(self, length: int, index: int) -> int:
        return NUM_COMMON

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        example = (40, 10, 3) if length >= 4096 else (20, 3, 1)
        repeats = (30, 3) if length >= 4096 else (6, 1)
        shown, solution = self._list(rng, *example)
        context, common = self._list(rng, size, *repeats)
        solved = " ".join(f"{i}. {word}" for i, word in enumerate(solution, 1))
        asked = (_TEMPLATE.text + _TEMPLATE.answer_prefix).format(context=shown)
        return Sample(
            input=f"{asked} {solved}\n{_TEMPLATE.text.format(context=context)}",
            answer_prefix=_TEMPLATE.answer_prefix,
            outputs=tuple(common),
        )

    def _list(
        self, rng: random.Random, num_words: int, common_repeats: int, other_repeats: int
    ) -> tuple[str, list[str]]:
        words = list(sample_words(rng, num_words))
        common, others = words[:NUM_COMMON], words[NUM_COMMON:]
        listed = common * common_repeats + others * other_repeats
        order_rng(self.faithful, rng).shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), common
