"""Question answering: the documents of a question among documents of other questions."""

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from jhybrid.errors import UserError
from jhybrid.evals.ruler import templates
from jhybrid.evals.ruler.task import Sample, order_rng

_TEMPLATE = templates.QUESTION_ANSWERING


@dataclasses.dataclass(frozen=True)
class Question:
    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # documents that go in first
    related: tuple[int, ...] = ()  # documents drawn before any other


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    label: str
    source: str
    documents: tuple[str, ...]  # distinct, sorted
    questions: tuple[Question, ...]
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnswering:
    """Sample i asks question i; its gold documents, related ones, then random ones, shuffled.

    With as many slots as documents or more, the whole collection is repeated in order.
    """

    name: str
    material: QuestionSet
    faithful: bool = True

    tokens_to_generate = _TEMPLATE.tokens_to_generate
    metric = "part"
    shortest_length = 0

    @property
    def haystack(self) -> str:
        return self.material.label

    def increment(self, length: int) -> int:
        """NVIDIA's, which publishes no lengths below 4096: one document there is this project's."""
        return 10 if length >= 4096 else 1

    def minimum(self, length: int, index: int) -> int:
        return len(self.material.questions[index].gold)

    def draw(self, rng: random.Random, size: int, length: int, index: int) -> Sample:
        question, documents = self.material.questions[index], self.material.documents
        missing = size - len(question.gold)
        if size >= len(documents):
            chosen = [i % len(documents) for i in range(size)]
        elif missing <= len(question.related):
            chosen = [*question.gold, *rng.sample(question.related, missing)]
        else:
            near = [*question.gold, *question.related]
            others = sorted(set(range(len(documents))) - set(near))
            chosen = near + rng.sample(others, size - len(near))
        order_rng(self.faithful, rng).shuffle(chosen)
        context = "\n\n".join(
            templates.DOCUMENT.format(i=i, document=documents[d]) for i, d in enumerate(chosen, 1)
        )
        return Sample(
            input=_TEMPLATE.text.format(context=context, query=question.query),
            answer_prefix=_TEMPLATE.answer_prefix,
            outputs=question.answers,
            details={"gold_slots": [i for i, d in enumerate(chosen) if d in question.gold]},
        )


def load_squad(path: str) -> QuestionSet:
    """SQuAD v2 in the official schema: its answerable questions."""
    data, digest = _read_json("--squad", path)
    try:
        articles = [[p["context"] for p in article["paragraphs"]] for article in data["data"]]
        documents = sorted({text for article in articles for text in article})
        number = {text: i for i, text in enumerate(documents)}
        questions = [
            Question(
                query=qa["question"],
                answers=tuple(answer["text"] for answer in qa["answers"]),
                gold=(number[paragraph["context"]],),
                related=tuple(number[text] for text in texts if text != paragraph["context"]),
            )
            for article, texts in zip(data["data"], articles, strict=True)
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if not qa.get("is_impossible", False)
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"--squad {path}: not SQuAD's schema ({error!r})") from None
    return _question_set("squad", "--squad", path, documents, questions, digest)


def load_hotpotqa(path: str) -> QuestionSet:
    """HotpotQA's distractor setting: a question comes with about ten paragraphs."""
    data, digest = _read_json("--hotpotqa", path)
    try:
        contexts = [[f"{t}\n{''.join(lines)}" for t, lines in item["context"]] for item in data]
        documents = sorted({text for context in contexts for text in context})
        number = {text: i for i, text in enumerate(documents)}
        questions = [
            Question(
                query=item["question"],
                answers=(item["answer"],),
                gold=tuple(number[text] for text in context),
            )
            for item, context in zip(data, contexts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--hotpotqa {path}: not HotpotQA's schema ({error!r})") from None
    return _question_set("hotpotqa", "--hotpotqa", path, documents, questions, digest)


def _read_json(flag: str, path: str) -> tuple[Any, str]:
    try:
        raw = Path(path).read_bytes()
        return json.loads(raw), hashlib.sha256(raw).hexdigest()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{flag} {path}: not JSON ({error})") from None


def _question_set(
    label: str,
    flag: str,
    path: str,
    documents: list[str],
    questions: list[Question],
    digest: str,
) -> QuestionSet:
    if not all(q.answers for q in questions) or not questions:
        raise UserError(f"{flag} {path}: no questions, or a question without an answer")
    return QuestionSet(label, Path(path).name, tuple(documents), tuple(questions), digest)
