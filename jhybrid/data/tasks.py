"""Task-labelled documents from JSON lines: context, question, answer and the name of the task."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jhybrid.config import TaskFiles, require
from jhybrid.data.chat import answer_ids, prompt_ids
from jhybrid.data.rows import Example, PackedRows
from jhybrid.data.text import Split, find_files, read_records, text_of
from jhybrid.data.tokenizer import Tokenizer
from jhybrid.errors import UserError
from pallas_kernels.array_types import Int

SUFFIXES = (".jsonl", ".jsonl.gz")


class Document(NamedTuple):
    prompt: str
    answer: str
    task: int  # index in data.tasks


def read_tasks(source: TaskFiles, tasks: Sequence[str], field: str) -> list[Document]:
    """Every document of the files; UserError naming the line that is none."""
    files = find_files(source.paths, SUFFIXES, f"{field}.paths")
    return [
        _document(record, tasks, where) for file in files for record, where in read_records(file)
    ]


def _document(record: Any, tasks: Sequence[str], where: str) -> Document:
    context, question, answer = (
        text_of(record, name, where) for name in ("context", "question", "answer")
    )
    metadata = record.get("metadata")
    facts = {**metadata, **record} if isinstance(metadata, dict) else record
    if facts.get("task") not in tasks:
        raise UserError(f"{where}: task {facts.get('task')!r} is none of data.tasks={tasks}")
    parts = (question, context) if facts.get("is_prefix") is True else (context, question)
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        raise UserError(f"{where}: context and question are both empty")
    return Document(prompt, answer, tasks.index(facts["task"]))


class TaskStore:
    """Documents of source.min_tokens to `most` tokens, encoded once and held in memory.

    Attributes:
      prompts: tokens before each answer.
      tasks: of each, its index in data.tasks.
      left_out: how many documents were shorter or longer; UserError if that is all of them.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        source: TaskFiles,
        tokenizer: Tokenizer,
        *,
        most: int,
        field: str,
    ):
        self._ids: list[np.ndarray] = []
        self.prompts: list[int] = []
        self.tasks: list[int] = []
        self.left_out = 0
        self.bounds = f"{source.min_tokens:,} to {most:,} tokens"
        self.answer_only = source.answer_only
        digest = hashlib.sha256()
        for document in documents:
            prompt = prompt_ids(tokenizer, source.chat, document.prompt)
            ids = prompt + answer_ids(tokenizer, source.chat, document.answer)
            if not source.min_tokens <= len(ids) <= most:
                self.left_out += 1
                continue
            self._ids.append(np.asarray(ids, np.int32))
            self.prompts.append(len(prompt))
            self.tasks.append(document.task)
            digest.update(self._ids[-1].tobytes() + bytes(f"{len(prompt)}:", "ascii"))
            digest.update(bytes(f"{document.task}:", "ascii"))
        require(
            len(self._ids) > 0 or self.left_out == 0,
            f"{field}: none of {self.left_out:,} documents has {self.bounds}",
        )
        self.lengths = np.array([len(ids) for ids in self._ids], np.int64)
        self.fingerprint = digest.hexdigest()

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        return self._ids[document][start:stop]


class TaskRows(PackedRows):
    """Whole documents of a TaskStore, packed."""

    def __init__(self, store: TaskStore, row_tokens: int, alignment: int, **options):
        super().__init__(store, row_tokens, alignment, **options)
        self._store = store

    def describe(self) -> str:
        store = self._store
        if store.left_out == 0:
            return super().describe()
        return f"{super().describe()}; {store.left_out:,} more left out, not of {store.bounds}"

    def _example(self, document: int, start: int, stop: int) -> Example:
        tokens, targets, *_ = super()._example(document, start, stop)
        prompt = self._store.prompts[document]
        if self._store.answer_only:
            targets = np.where(np.arange(len(targets)) < prompt - 1, -1, targets)
        return Example(tokens, targets, prompt, self._store.tasks[document])


def of_split(documents: list[Document], fraction: float, split: Split) -> list[Document]:
    """Documents to train on, or the last `fraction`, for validation."""
    cut = round(len(documents) * (1 - fraction))
    return documents[:cut] if split == "train" else documents[cut:]
