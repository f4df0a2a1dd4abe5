"""The tidy table of a study: one row per run and number that was measured."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

RUN_COLUMNS = (
    "study",
    "run",
    "mixer",
    "layout",
    "full_share",
    "seed",
    "status",
    "reason",
    "parameters",
    "kv_bytes_per_token",
    "state_bytes",
    "softmax_fraction",
    "train_seconds",
    "preparing_seconds",
    "milliseconds_per_step",
    "evaluation_seconds",
    "jax",
    "device",
)
MEASURE_COLUMNS = ("measure", "length", "distance_from", "distance_to", "value", "count")
COLUMNS: tuple[str, ...] = (*RUN_COLUMNS, *MEASURE_COLUMNS)


def tidy(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A run without measures (it failed, it diverged) is one row whose `measure` is None."""
    rows = []
    for result in results:
        run = {name: result.get(name) for name in RUN_COLUMNS}
        for of in result.get("measures") or [{}]:
            rows.append({**run, **{name: of.get(name) for name in MEASURE_COLUMNS}})
    return rows


def to_csv(rows: Iterable[Row]) -> str:
    """None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(rows: Iterable[Row]) -> str:
    lines = (json.dumps(row, allow_nan=False) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"
