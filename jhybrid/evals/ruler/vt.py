"""Variable tracking: a chain of assignments scattered among lines of noise."""

import dataclasses
import itertools
import random
from collections.abc import Callable

from jhybrid.evals.ruler import templates
from jhybrid.evals.ruler.fitting import largest_fitting
from jhybrid.evals.ruler.task import SEED, Sample
from jhybrid.evals.ruler.words import CAPITALS, distinct, letters

NUM_HOPS = 4
EXAMPLE_TOKENS = 500
EXAMPLE_LINES = 5  # at least
_TEMPLATE = templates.VARIABLE_TRACKING


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking:
    """`VAR A = 12345`, then `VAR B = VAR A ` and so on; which variables have the value?

    A solved example comes first: noise fitted to 500 tokens with three-letter names. Its lines
    stay, its names and its number are drawn anew for every sample.
    """

    name: str
    example_size: int  # lines of noise, from `fit_example`
    seed: int = SEED

    haystack = "noise"
    tokens_to_generate = _TEMPLATE.tokens_to_generate
    metric = "all"
    shortest_length = 0

    def increment(self, length: int) -> int:
        return 10 if length >= 4096 else 5

    def minimum(self, length: int, index: int) -> int:
        return self.increment(length)

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        sample = _question(rng, _chain(rng, 5), _value(rng), size)
        example = _example(self.seed, self.example_size, _chain(rng, 3), _value(rng))
        solved = f"{example.prompt} {' '.join(example.outputs)}\n"
        return dataclasses.replace(sample, input=f"{solved}\n{sample.input}")


def fit_example(count_tokens: Callable[[str], int], seed: int = SEED) -> int:
    """The lines of noise with which the example stays within 500 tokens."""
    names = _chain(random.Random(f"{seed}/example"), 3)

    def count(size: int) -> int:
        return count_tokens(_example(seed, size, names, "12345").prompt)

    return largest_fitting(count, EXAMPLE_TOKENS, EXAMPLE_LINES)


def _example(seed: int, size: int, chain: list[str], value: str) -> Sample:
    """The same places for the same seed and size, whatever the names."""
    return _question(random.Random(f"{seed}/example/{size}"), chain, value, size)


def _value(rng: random.Random) -> str:
    return str(rng.randrange(10000, 99999))


def _chain(rng: random.Random, letters_per_name: int) -> list[str]:
    def name() -> str:
        return letters(rng, CAPITALS, letters_per_name)

    return distinct(name, NUM_HOPS + 1, excluded=("VAR",))


def _question(rng: random.Random, chain: list[str], value: str, size: int) -> Sample:
    assignments = [f"VAR {chain[0]} = {value}"]
    assignments += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(chain)]
    lines = [templates.NOISE] * size
    positions = sorted(rng.sample(range(size), len(assignments)))
    for j, (position, assignment) in enumerate(zip(positions, assignments, strict=True)):
        lines.insert(position + j, assignment)
    context = "\n".join(lines).replace(". \n", ".\n")
    return Sample(
        input=_TEMPLATE.text.format(context=context, query=value),
        answer_prefix=_TEMPLATE.answer_prefix.format(num_v=len(chain), query=value),
        outputs=tuple(chain),
    )
