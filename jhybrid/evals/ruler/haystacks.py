"""The essay haystack: running text cut into sentences, of any number of words.

A sentence ends at a word with closing punctuation when the next word opens one; the decision
needs these two words only, so the text is analysed once for all sizes.
"""

import bisect
import dataclasses
import hashlib
import json
import re
from pathlib import Path

from jhybrid.errors import UserError

_CLOSES = re.compile(r"""[.!?]["'”’)\]]*$""")
_OPENS = re.compile(r"""^["'“‘(\[]*[A-Z0-9]""")
_ABBREVIATION = re.compile(
    r"""^["'“‘(\[]*(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Rev|Gen|Col|Capt|Lt|vs|etc|e\.g|i\.e|No)\.$"""
)


def ends_sentence(word: str, following: str) -> bool:
    return bool(_CLOSES.search(word) and _OPENS.match(following) and not _ABBREVIATION.match(word))


@dataclasses.dataclass(frozen=True)
class Essay:
    """Words of running text, repeated when more are asked for than there are."""

    label: str  # "essay": given by path; "pd": the public-domain prose of the package
    source: str
    words: tuple[str, ...]
    starts: tuple[int, ...]  # index of the first word of every sentence
    sha256: str

    @classmethod
    def of(cls, text: str, label: str, source: str) -> "Essay":
        words = tuple(text.split())
        if not words:
            raise UserError(f"{source}: no text to make a haystack of")
        inner = (i for i in range(1, len(words)) if ends_sentence(words[i - 1], words[i]))
        digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
        return cls(label, source, words, (0, *inner), digest)

    def sentences(self, num_words: int) -> list[str]:
        """The first `num_words` words as sentences; joined by single blanks they give the text."""
        bounds: list[int] = []
        total = len(self.words)
        for offset in range(0, num_words, total):
            stop = bisect.bisect_left(self.starts, num_words - offset)
            bounds.extend(offset + start for start in self.starts[:stop])
        ends = [*bounds[1:], num_words]
        return [
            " ".join(self.words[a % total : (b - 1) % total + 1])
            for a, b in zip(bounds, ends, strict=True)
        ]


def load_essays(path: str) -> Essay:
    """RULER's PaulGrahamEssays.json (an object with a `text`), or any plain text file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--essays {path}: cannot be read as text ({error})") from None
    if path.endswith(".json"):
        try:
            text = json.loads(text)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f'--essays {path}: expected {{"text": "..."}}') from None
    return Essay.of(text, "essay", Path(path).name)
