"""Sets of samples: generated in order, kept on disk, taken up again where they stopped."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jhybrid.errors import UserError
from jhybrid.evals.ruler import fitting
from jhybrid.evals.ruler.task import Task

VERSION = 1  # of the rules; part of every key, so that a change makes new files
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SetKey:
    """Everything a set of samples depends on."""

    task: str
    length: int
    num_samples: int
    seed: int
    faithful: bool
    tokenizer: str  # a digest
    material: str  # a digest of the essay or question file; empty without one
    version: int = VERSION

    @property
    def file_name(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{self.task}-{self.length}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"


def generate(
    task: Task, key: SetKey, count_tokens: fitting.CountTokens, first: int = 0, size: int = 0
) -> Iterator[Row]:
    """Rows `first` and following of a set; `size` skips the search for the haystack's size.

    Row i depends on the key and on i only, not on the rows before it.
    """
    if not size:
        size = fitting.fitted_size(task, key.length, key.seed, count_tokens)
    for index in range(first, key.num_samples):
        sample, tokens = fitting.draw_within(task, key.length, key.seed, index, size, count_tokens)
        yield {
            "index": index,
            "input": sample.input,
            "answer_prefix": sample.answer_prefix,
            "outputs": list(sample.outputs),
            "length": tokens + task.tokens_to_generate,
            "fitted_size": size,
            **sample.details,
        }


def load_or_generate(
    task: Task, key: SetKey, count_tokens: fitting.CountTokens, cache: Path | None
) -> list[Row]:
    """The whole set, from the cache when it is there.

    Rows are appended to a `.partial` file as they are made; an interrupted run continues it. The
    finished file appears by a rename, so it is complete whenever it exists.

    Raises:
        DoesNotFitError: some sample is longer than the length even with its least haystack.
    """
    if cache is not None and (rows := _read_rows(cache / key.file_name, key.num_samples)):
        return rows
    indices = range(key.num_samples)
    needs = fitting.required_length(task, key.length, key.seed, indices, count_tokens)
    if needs > key.length:
        raise fitting.DoesNotFitError(needs)
    if cache is None:
        return list(generate(task, key, count_tokens))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{key.file_name}.partial"
        rows = _read_prefix(partial)[: key.num_samples]
        # Rewritten first: what a kill left of the last line must not stay in the middle.
        _write_atomically(partial, rows)
        size = rows[0]["fitted_size"] if rows else 0
        with partial.open("a", encoding="utf-8") as file:
            for row in generate(task, key, count_tokens, len(rows), size):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                rows.append(row)
        _write_atomically(cache / key.file_name, rows)
        partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--cache {cache}: cannot be written ({error.strerror})") from None
    return rows


def _read_rows(path: Path, num_samples: int) -> list[Row]:
    """A finished set, or nothing when it is not there or not whole."""
    rows = _read_prefix(path)
    return rows if len(rows) == num_samples else []


def _read_prefix(path: Path) -> list[Row]:
    """The rows up to the first line that is torn or out of order."""
    rows: list[Row] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return rows
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or row.get("index") != len(rows):
            break
        rows.append(row)
    return rows


def _write_atomically(path: Path, rows: list[Row]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
