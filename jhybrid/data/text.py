"""Text documents from local files, and their division into training and validation parts."""

import contextlib
import glob
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TextIO, cast

from jhybrid.config import require
from jhybrid.errors import UserError

Split = Literal["train", "validation"]
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")


def find_files(paths: Sequence[str], suffixes: Sequence[str], field: str) -> list[pathlib.Path]:
    """Expands files, folders (searched recursively) and globs; sorted within each entry.

    `field` is what the error names when an entry matches nothing or a file is of another kind.
    """
    kinds = ", ".join(suffixes)
    files: list[pathlib.Path] = []
    for entry in paths:
        path = pathlib.Path(entry).expanduser()
        if path.is_dir():
            found = [f for f in path.rglob("*") if f.is_file() and f.name.endswith(tuple(suffixes))]
            require(bool(found), f"{field}: no {kinds} file in folder {entry}")
        elif path.is_file():
            found = [path]
        else:
            found = [pathlib.Path(f) for f in glob.glob(str(path), recursive=True)]
            found = [f for f in found if f.is_file()]
            require(bool(found), f"{field}: no such file: {entry}")
        for file in found:
            require(file.name.endswith(tuple(suffixes)), f"{field}: {file} is not one of {kinds}")
        files.extend(sorted(found))
    require(len(files) > 0, f"{field}: no files given")
    return list(dict.fromkeys(files))


def read_documents(path: pathlib.Path, text_field: str = "text") -> Iterator[str]:
    """The documents of one file: all of a .txt, or `text_field` of each line of a .jsonl."""
    if path.name.removesuffix(".gz").endswith(".txt"):
        with _reading(path) as file:
            yield file.read()
        return
    for record, where in read_records(path):
        yield text_of(record, text_field, where)


def read_records(path: pathlib.Path) -> Iterator[tuple[Any, str]]:
    """(what each line of a .jsonl says, where it stands)."""
    with _reading(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _record(line, where), where


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[TextIO]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            yield cast(TextIO, file)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None
    except (EOFError, zlib.error):
        raise UserError(f"{path}: truncated or damaged gzip file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _record(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not a complete JSON line ({error.msg})") from None
    except RecursionError:
        raise UserError(f"{where}: JSON nested too deeply") from None


def text_of(record: Any, field: str, where: str) -> str:
    """The text in a field of an object."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: has no text field {field!r}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        raise UserError(f"{where}: field {field!r} is not Unicode text") from None
    return text


def split_documents(documents: Sequence[str], validation_fraction: float) -> dict[Split, list[str]]:
    """Cuts a source where its last `validation_fraction` of UTF-8 bytes begins.

    A document the cut falls into is divided before its next white space; without any there, it
    stays whole in the training part.
    """
    sizes = [len(text.encode()) for text in documents]
    cut = round(sum(sizes) * (1 - validation_fraction))
    parts: dict[Split, list[str]] = {"train": [], "validation": []}
    for text, size in zip(documents, sizes, strict=True):
        here = min(max(cut, 0), size)
        cut -= size
        if 0 < here < size:
            characters = len(text.encode()[:here].decode(errors="ignore"))
            space = re.compile(r"\s").search(text, characters)
            head = space.start() if space else len(text)
        else:
            head = len(text) if here else 0
        parts["train"].append(text[:head])
        parts["validation"].append(text[head:])
    return {split: [text for text in texts if text] for split, texts in parts.items()}
