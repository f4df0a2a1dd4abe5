"""Needle-in-a-haystack documents in the phrasing of RULER (Hsieh et al., arXiv 2404.06654).

The haystack is prose, one or more needles are sentences in it, one of them is asked for at the end
and answered. Differences from the benchmark, which keep training apart from it: the haystack starts
at a random sentence of the embedded prose, needles stand at any sentence, and the answer follows.
"""

import functools
import re

import numpy as np
from wonderwords import RandomWord

from jhybrid.config import Needle, require
from jhybrid.data.corpus import embedded_text
from jhybrid.data.rows import Example
from jhybrid.data.text import Split
from jhybrid.data.tokenizer import Tokenizer

NEEDLE = "One of the special magic numbers for {key} is: {value}."
PROMPT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{context}\n"
    "What is the special magic number for {key} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic number for {key} mentioned in the provided text is"
ANSWER = " {value}."


@functools.cache
def words(kind: str) -> list[str]:
    return sorted(set(RandomWord.read_words(f"{kind}list.txt")))


@functools.cache
def sentences(split: Split) -> list[str]:
    text = " ".join(embedded_text(split))
    return re.split(r"(?<=[.!?]) ", re.sub(r"\s+", " ", text).strip())


class NeedleTask:
    """Documents of at most `config.length` tokens, the end-of-text token included."""

    fingerprint = ""

    def __init__(self, config: Needle, tokenizer: Tokenizer, split: Split = "train"):
        self._config = config
        self._tokenizer = tokenizer
        self._sentences = sentences(split)
        spaced = tokenizer.encode_batch([" " + sentence for sentence in self._sentences])
        self._ends = np.cumsum([len(ids) for ids in spaced])  # tokens up to and with each sentence
        self.length = config.length - 1  # tokens read: the last one is only predicted
        self.example(np.random.default_rng(0))

    def example(self, rng: np.random.Generator) -> Example:
        pairs = self._draw_pairs(rng)
        key, value = pairs[rng.integers(len(pairs))]
        needles = [NEEDLE.format(key=k, value=v) for k, v in pairs]
        answer = [*self._tokenizer.encode(ANSWER.format(value=value)), self._tokenizer.eos]
        places = rng.random(len(needles))
        first = int(rng.integers(len(self._sentences)))

        room = self._config.length - len(answer)
        space = room - len(self._prompt(needles, [], places, key))
        count = self._sentences_within(first, space)
        prompt = self._prompt(needles, self._sentences[first : first + count], places, key)
        while len(prompt) > room and count > 0:
            count -= 1
            prompt = self._prompt(needles, self._sentences[first : first + count], places, key)
        require(
            len(prompt) <= room,
            f"data.sources Needle.length={self._config.length} is too short: the question and "
            f"{len(needles)} needle(s) alone take {len(prompt) + len(answer)} tokens",
        )
        ids = np.asarray(prompt + answer, np.int32)
        targets = ids[1:].copy()
        if self._config.answer_only:
            targets[: len(prompt) - 1] = -1
        return Example(ids[:-1], targets)

    def _draw_pairs(self, rng: np.random.Generator) -> list[tuple[str, int]]:
        """Distinct adjective-noun keys with seven-digit values."""
        adjectives, nouns = words("adjective"), words("noun")
        chosen = rng.choice(len(adjectives) * len(nouns), self._config.num_needles, replace=False)
        keys = [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in chosen]
        return [(key, int(rng.integers(10**6, 10**7))) for key in keys]

    def _sentences_within(self, first: int, tokens: int) -> int:
        """How many sentences from `first` on have at most this many tokens together."""
        before = self._ends[first - 1] if first else 0
        return int(np.searchsorted(self._ends, before + tokens, side="right")) - first

    def _prompt(
        self, needles: list[str], sentences: list[str], places: np.ndarray, key: str
    ) -> list[int]:
        """Tokens up to the answer, needle i standing after the share places[i] of sentences."""
        after = [int(place * (len(sentences) + 1)) for place in places]
        lines = []
        for i in range(len(sentences) + 1):
            lines += [needle for needle, a in zip(needles, after, strict=True) if a == i]
            lines += sentences[i : i + 1]
        prompt = PROMPT.format(context=" ".join(lines), key=key)
        return self._tokenizer.encode(prompt + ANSWER_PREFIX.format(key=key))
