"""The status matrix: which op ran where, from the tests that passed there.

    pytest -m "" tests/kernels --record-status    # updates status.json with what passes here
    python -m pallas_kernels.status               # prints it as a Markdown table

A test says what it shows by `@pytest.mark.covers(op, implementation, *passes, how=..., where=...)`.
A record stands only if every test of its kind passed in one session, and replaces the older one.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).with_name("status.json")
PASSES = ("forward", "backward")
HOW = {
    "run": "run on",
    "interpreted": "interpreted",  # Pallas' interpreter, on a CPU
    "compiled": "compiled ahead of time for",
}


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Record:
    """`tests` tests of one kind passed, with that version of JAX."""

    op: str
    implementation: str
    how: str  # of HOW
    where: str  # the device or chip; "CPU" for the interpreter
    direction: str  # of PASSES
    jax: str
    tests: int

    @property
    def kind(self) -> tuple[str, ...]:
        return self.op, self.implementation, self.how, self.where, self.direction


def load(path: Path) -> list[Record]:
    return [Record(**record) for record in json.loads(path.read_text())]


def merge(old: Iterable[Record], new: Iterable[Record], failed: Iterable[tuple]) -> list[Record]:
    """The new records in place of the old of their kind; kinds that failed have none."""
    gone = set(failed)
    kept = {record.kind: record for record in (*old, *new) if record.kind not in gone}
    return sorted(kept.values())


def save(records: Iterable[Record], path: Path) -> None:
    lines = (json.dumps(dataclasses.asdict(record)) for record in sorted(records))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def table(records: Iterable[Record]) -> str:
    """One row per op and implementation, one column per way of running it."""
    rows: dict[tuple[str, str], dict[str, dict[str, list[Record]]]] = {}
    for record in sorted(records):
        row = rows.setdefault((record.op, record.implementation), {})
        row.setdefault(record.how, {}).setdefault(record.where, []).append(record)
    lines = ["| op | implementation | " + " | ".join(HOW.values()) + " |"]
    lines.append("|---" * (2 + len(HOW)) + "|")
    for (op, implementation), row in rows.items():
        cells = ("; ".join(map(_cell, row.get(how, {}).values())) or "-" for how in HOW)
        lines.append(f"| `{op}` | `{implementation}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(records: list[Record]) -> str:
    """ "TPU v6e: forward, backward (JAX 0.11.2, 12 tests)" for the records of one place."""
    found = {record.direction for record in records}
    passes = ", ".join(direction for direction in PASSES if direction in found)
    versions = ", ".join(sorted({record.jax for record in records}))
    tests = max(record.tests for record in records)
    noun = "test" if tests == 1 else "tests"
    return f"{records[0].where}: {passes} (JAX {versions}, {tests} {noun})"


if __name__ == "__main__":
    print(table(load(FILE)))
