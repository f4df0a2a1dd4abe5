"""Needle in a haystack: keys with values hidden in noise, essays or other needles."""

import dataclasses
import random

import numpy as np

from jhybrid.evals.ruler import templates
from jhybrid.evals.ruler.haystacks import Essay
from jhybrid.evals.ruler.task import Sample, order_rng
from jhybrid.evals.ruler.words import RANDOM, distinct

DEPTHS = tuple(int(d) for d in np.round(np.linspace(0, 100, 40)))  # percent of the sentences


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleInHaystack:
    """`num_queries` of `num_keys` keys are asked for; each has `num_values` values.

    Essay: needle j follows sentence int(num_sentences * depth_j / 100), depths drawn without
    replacement from 40 and sorted. Lines: needles go in front of distinct random lines.
    """

    name: str
    hay: str  # "noise" | "needle" | "essay"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    essay: Essay | None = None
    faithful: bool = True

    tokens_to_generate = templates.NIAH.tokens_to_generate
    metric = "all"
    shortest_length = 0

    @property
    def haystack(self) -> str:
        return self.essay.label if self.essay else self.hay

    def increment(self, length: int) -> int:
        """NVIDIA's, which publishes no lengths below 4096: 50 words there is this project's."""
        if self.hay == "essay":
            return 500 if length >= 4096 else 50
        return 25 if length >= 4096 else 5

    def minimum(self, length: int, index: int) -> int:
        return max(self.increment(length), self.num_keys * self.num_values)

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        keys = distinct(lambda: RANDOM[self.keys](rng), self.num_keys)
        values = [[RANDOM[self.values](rng) for _ in range(self.num_values)] for _ in keys]
        needles = [
            self._needle(key, value)
            for key, of_key in zip(keys, values, strict=True)
            for value in of_key
        ]
        order = list(range(len(needles)))
        order_rng(self.faithful, rng).shuffle(order)
        placed = [needles[i] for i in order]
        context = (
            self._among_sentences(rng, placed, size)
            if self.hay == "essay"
            else self._among_lines(rng, placed, size, keys)
        )
        asked = rng.sample(range(self.num_keys), self.num_queries)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        outputs = [value for i in asked for value in values[i]]
        depths = [
            round(100 * context.index(self._needle(keys[i], value)) / len(context), 2)
            for i in asked
            for value in values[i]
        ]
        single = self.num_queries * self.num_values == 1
        template = templates.NIAH_SINGULAR if single else templates.NIAH
        kind = self.values[:-1] if single else self.values
        return Sample(
            input=template.text.format(type_needle_v=kind, context=context, query=query),
            answer_prefix=template.answer_prefix.format(type_needle_v=kind, query=query),
            outputs=tuple(outputs),
            details={"depths": depths},
        )

    def _needle(self, key: str, value: str) -> str:
        return templates.NEEDLE.format(type_needle_v=self.values, key=key, value=value)

    def _among_sentences(self, rng: random.Random, needles: list[str], size: int) -> str:
        assert self.essay is not None
        sentences = self.essay.sentences(size)
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        cuts = [0, *(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        pieces = []
        for j, needle in enumerate(needles):
            pieces += [" ".join(sentences[cuts[j] : cuts[j + 1]]), needle]
        pieces.append(" ".join(sentences[cuts[-2] :]))
        return " ".join(pieces)

    def _among_lines(
        self, rng: random.Random, needles: list[str], size: int, keys: list[str]
    ) -> str:
        if self.hay == "noise":
            lines = [templates.NOISE] * size
        else:
            others = distinct(lambda: RANDOM[self.keys](rng), size, excluded=keys)
            lines = [self._needle(key, RANDOM[self.values](rng)) for key in others]
        # From the back, so that every position counts lines of hay: the first needle goes last.
        positions = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for position, needle in zip(positions, needles, strict=True):
            lines.insert(position, needle)
        return "\n".join(lines)
