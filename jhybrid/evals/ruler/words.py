"""The random strings RULER hides and asks for: words, numbers, uuids.

Every draw takes its own `random.Random`; nothing here depends on `hash()` or on global state.
Rules: NVIDIA/RULER (arXiv 2404.06654), `scripts/data/synthetic`.
"""

import functools
import importlib.resources
import random
import string
import uuid
from collections.abc import Callable, Collection, Sequence


@functools.cache
def word_list(kind: str) -> tuple[str, ...]:
    """The distinct words of one list of the package wonderwords ("noun", "adjective", "verb")."""
    text = (importlib.resources.files("wonderwords.assets") / f"{kind}list.txt").read_text()
    return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))


def random_word(rng: random.Random) -> str:
    """adjective-noun, uniform over the 910 x 6782 distinct pairs (no two spell the same)."""
    return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"


def random_number(rng: random.Random) -> str:
    """Seven digits, the first not zero."""
    return str(rng.randint(10**6, 10**7 - 1))


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


RANDOM: dict[str, Callable[[random.Random], str]] = {
    "words": random_word,
    "numbers": random_number,
    "uuids": random_uuid,
}


def letters(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def distinct(draw: Callable[[], str], count: int, excluded: Collection[str] = ()) -> list[str]:
    """`count` different draws, in the order drawn, none of them in `excluded`."""
    seen = dict.fromkeys(excluded)
    skip = len(seen)
    while len(seen) < skip + count:
        seen[draw()] = None
    return list(seen)[skip:]


@functools.cache
def common_words() -> tuple[str, ...]:
    """The 8166 distinct nouns, adjectives and verbs that common-words extraction draws from."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def sample_words(rng: random.Random, count: int) -> Sequence[str]:
    """`count` different words.

    NVIDIA draws from a list of 370k English words once the pool above is exhausted (contexts
    around 128k tokens); that list is not redistributable here, so adjective-noun pairs stand in.
    """
    pool = common_words()
    if count <= len(pool):
        return rng.sample(pool, count)
    return distinct(lambda: random_word(rng), count)


CAPITALS = string.ascii_uppercase
LOWERCASE = string.ascii_lowercase
