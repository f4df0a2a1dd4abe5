"""The results of an evaluation on disk: whole after every row, and taken up where they stopped.

`FILE.json` holds the rows; beside it `FILE.predictions.jsonl` holds every answer as it is made, so
that a long row is resumed in its middle. Rows and answers carry a digest of everything they depend
on; a row of other settings is never mixed in silently.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jhybrid.errors import UserError

Row = dict[str, Any]


def digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Results:
    """Rows by (task, length), on disk after every `add`."""

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self.path = path
        self._header = dict(header)
        self._rows: dict[tuple[str, int], Row] = {}
        if path.exists():
            self._rows = {(row["task"], row["length"]): row for row in self._load()}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    @property
    def averages(self) -> dict[str, Any]:
        """Mean RULER score by length over the tasks that have one, and which tasks those are."""
        by_length: dict[int, dict[str, float]] = {}
        for row in self.rows:
            if row["task"].startswith("ruler:") and "score" in row:
                by_length.setdefault(row["length"], {})[row["task"]] = row["score"]
        return {
            str(length): {"score": round(sum(of.values()) / len(of), 2), "tasks": sorted(of)}
            for length, of in sorted(by_length.items())
        }

    def find(self, task: str, length: int, key: str) -> Row | None:
        """The row if it is there.

        Raises:
            UserError: it is there, but made with other settings.
        """
        row = self._rows.get((task, length))
        if row is not None and row["key"] != key:
            raise UserError(
                f"--out {self.path}: its row {task} at {length} was made with another checkpoint "
                "or other settings; give another --out or remove the file"
            )
        return row

    def add(self, row: Row) -> None:
        self._rows[row["task"], row["length"]] = row
        self.write()

    def _load(self) -> list[Row]:
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
            if not all({"task", "length", "key"} <= set(row) for row in rows):
                raise ValueError
        except OSError as error:
            raise UserError(f"--out {self.path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--out {self.path}: exists and is not a results file; give another --out"
            ) from None
        return rows

    def write(self) -> None:
        content = {**self._header, "rows": self.rows, "averages": self.averages}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            os.replace(temporary, self.path)
        except OSError as error:
            raise UserError(f"--out {self.path}: cannot be written ({error.strerror})") from None


class Predictions:
    """Answers by (key of the row, index of the sample), appended as they come."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if text and not text.endswith("\n"):  # a kill tore the last line; it stays unreadable
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        for line in text.splitlines():
            try:
                row = json.loads(line)
                self._known[row["key"], row["index"]] = row["prediction"]
            except (ValueError, KeyError, TypeError):
                continue

    def find(self, key: str, index: int) -> str | None:
        return self._known.get((key, index))

    def add(self, key: str, index: int, prediction: str, **facts: Any) -> None:
        self._known[key, index] = prediction
        line = json.dumps(
            {"key": key, "index": index, **facts, "prediction": prediction}, ensure_ascii=False
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
