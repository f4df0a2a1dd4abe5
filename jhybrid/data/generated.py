"""Generated questions for head routing: some need distant tokens, some a document's ends only.

needle and variable tracking are RULER's (Hsieh et al., arXiv 2404.06654) in its phrasing but over
other haystacks. `lead` answers with the text's first sentence, the baseline of news summarisation;
`copy_code` with the last lines of a piece of Python's standard library.
"""

import functools
import hashlib
import itertools
import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jhybrid.config import GeneratedTask, require
from jhybrid.data import needle
from jhybrid.data.chat import answer_ids, prompt_ids
from jhybrid.data.rows import Example
from jhybrid.data.text import Split, split_documents
from jhybrid.data.tokenizer import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
TRACKED = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are:"
)
HOPS = 4
SUMMARISE = "{context}\nSummarise the text above in one sentence."
SUMMARY = " Summary:"
COPY = "{context}\nRepeat the last {lines} lines of the code above."
COPIED = "\n"
COPIED_LINES = 3
SAMPLE_UNITS = 64  # sentences or lines whose tokens are counted to guess how many fit


class Question(NamedTuple):
    prompt: str
    prefix: str  # the first words of the reply; the rest is the answer
    answer: str


Make = Callable[[int], Question]  # the number of sentences or lines of haystack -> the question
Draw = Callable[[np.random.Generator, Split], Make]


class GeneratedQuestions:
    """Documents of at most `config.length` tokens, what ends the answer included."""

    def __init__(self, config: GeneratedTask, task: int, tokenizer: Tokenizer, split: Split):
        self._config = config
        self._task = task
        self._tokenizer = tokenizer
        self._split: Split = split
        code = config.generator == "copy_code"
        self.fingerprint = library(split).fingerprint if code else ""
        self.length = config.length - 1  # tokens read: the last one is only predicted
        make = self._draw(np.random.default_rng(0))
        shortest, some = (sum(map(len, self._ids(make(n)))) for n in (COPIED_LINES, SAMPLE_UNITS))
        self._unit_tokens = max(1.0, (some - shortest) / (SAMPLE_UNITS - COPIED_LINES))
        self.example(np.random.default_rng(0))

    def example(self, rng: np.random.Generator) -> Example:
        make = self._draw(rng)
        size = int(self._config.length / self._unit_tokens) + 1
        prompt, answer = self._ids(make(size))
        while (excess := len(prompt) + len(answer) - self._config.length) > 0:
            require(
                size > COPIED_LINES,
                f"data.sources GeneratedTask.length={self._config.length} is too short for "
                f"{self._config.generator}",
            )
            size = max(COPIED_LINES, size - math.ceil(excess / (2 * self._unit_tokens)))
            prompt, answer = self._ids(make(size))
        ids = np.asarray(prompt + answer, np.int32)
        targets = ids[1:].copy()
        if self._config.answer_only:
            targets[: len(prompt) - 1] = -1
        return Example(ids[:-1], targets, len(prompt), self._task)

    def _draw(self, rng: np.random.Generator) -> Make:
        return DRAWS[self._config.generator](rng, self._split)

    def _ids(self, question: Question) -> tuple[list[int], list[int]]:
        """Tokens before and from the answer on."""
        chat = self._config.chat
        prompt = prompt_ids(self._tokenizer, chat, question.prompt, question.prefix)
        return prompt, answer_ids(self._tokenizer, chat, question.answer)


def _among(lines: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> list[str]:
    """`hidden[i]` after the share places[i] of the lines; those at one place keep their order."""
    after = [int(place * (len(lines) + 1)) for place in places]
    found = []
    for i in range(len(lines) + 1):
        found += [line for line, a in zip(hidden, after, strict=True) if a == i]
        found += lines[i : i + 1]
    return found


def _needle(rng: np.random.Generator, split: Split) -> Make:
    prose = needle.sentences(split)
    adjectives, nouns = needle.words("adjective"), needle.words("noun")
    key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    value, place = int(rng.integers(10**6, 10**7)), rng.random()
    first = int(rng.integers(len(prose)))

    def make(size: int) -> Question:
        hidden = needle.NEEDLE.format(key=key, value=value)
        lines = _among(prose[first : first + size], [hidden], [place])
        prompt = needle.PROMPT.format(context=" ".join(lines), key=key)
        return Question(prompt, needle.ANSWER_PREFIX.format(key=key), f" {value}.")

    return make


def _variable_tracking(rng: np.random.Generator, split: Split) -> Make:
    letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    names = ["".join(rng.choice(letters, 5)) for _ in range(HOPS + 1)]
    value, places = int(rng.integers(10_000, 100_000)), np.sort(rng.random(HOPS + 1)).tolist()
    hidden = [f"VAR {names[0]} = {value}"]
    hidden += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]

    def make(size: int) -> Question:
        context = "\n".join(_among([NOISE] * size, hidden, places))
        prefix = TRACKED.format(count=len(names), value=value)
        prompt = TRACK.format(context=context, value=value)
        return Question(prompt, prefix, f" {' '.join(names)}.")

    return make


def _lead(rng: np.random.Generator, split: Split) -> Make:
    prose = needle.sentences(split)
    first = int(rng.integers(len(prose)))
    while not 8 <= len(prose[first % len(prose)].split()) <= 24:
        first += 1
    first %= len(prose)

    def make(size: int) -> Question:
        context = " ".join(prose[first : first + size])
        return Question(SUMMARISE.format(context=context), SUMMARY, f" {prose[first]}")

    return make


def _continuation(rng: np.random.Generator, split: Split) -> Make:
    prose = needle.sentences(split)
    last = int(rng.integers(SAMPLE_UNITS, len(prose)))

    def make(size: int) -> Question:
        return Question(" ".join(prose[max(last - size, 0) : last]), "", f" {prose[last]}")

    return make


def _copy_code(rng: np.random.Generator, split: Split) -> Make:
    lines = library(split).lines
    last = int(rng.integers(SAMPLE_UNITS, len(lines)))

    def make(size: int) -> Question:
        text = lines[max(last - size, 0) : last]
        prompt = COPY.format(context="\n".join(text), lines=COPIED_LINES)
        return Question(prompt, COPIED, "\n".join(text[-COPIED_LINES:]))

    return make


DRAWS: Mapping[str, Draw] = {
    "needle": _needle,
    "variable_tracking": _variable_tracking,
    "continuation": _continuation,
    "lead": _lead,
    "copy_code": _copy_code,
}


class Library(NamedTuple):
    lines: tuple[str, ...]  # without blank ones
    fingerprint: str


@functools.cache
def library(split: Split) -> Library:
    """The modules of Python's standard library that are no packages, as this Python has them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    require(len(files) > 0, "data.sources copy_code: this Python has no library as source code")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    text = "\n".join(split_documents(texts, 0.05)[split])
    lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
    return Library(lines, hashlib.sha256(text.encode()).hexdigest())
