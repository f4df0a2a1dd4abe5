"""Results as text: one line per finished row, and a table of all."""

from collections.abc import Mapping, Sequence
from typing import Any


def _with_error(value: float, error: float | None, digits: int) -> str:
    spread = "" if error is None else f" ± {error:.{digits}f}"
    return f"{value:.{digits}f}{spread}"


def cell(row: Mapping[str, Any]) -> str:
    """What a row found, in a few words."""
    if "score" in row:
        text = _with_error(row["score"], row["standard_error"], 1)
        return f"{text} ({row['nulls']} empty)" if row["nulls"] else text
    if "loss" in row:
        return f"{row['bits_per_byte']:.4f} bits/byte, perplexity {row['perplexity']:.2f}"
    if "metrics" in row:
        errors = row["standard_errors"]
        found = [
            f"{name} {_with_error(value, errors.get(name), 3)}"
            for name, value in row["metrics"].items()
        ]
        cut = f" ({row['truncated']} inputs cut)" if row["truncated"] else ""
        return ", ".join(found) + cut
    return row["result"]


def line(row: Mapping[str, Any]) -> str:
    return f"{row['task']} at {row['length']}: {cell(row)} [{row['seconds']:.1f} s]"


def table(rows: Sequence[Mapping[str, Any]], averages: Mapping[str, Any]) -> str:
    """Tasks down, lengths across."""
    lengths = sorted({row["length"] for row in rows})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["task"], row["length"]): cell(row) for row in rows}
    label = {row["task"]: row.get("haystack", "") for row in rows}
    lines = [["task", "haystack", *map(str, lengths)]]
    for task in tasks:
        lines.append([task, label[task], *(cells.get((task, length), "") for length in lengths)])
    if averages:
        means = [averages.get(str(length)) for length in lengths]
        lines.append(
            ["ruler mean", ""]
            + [f"{m['score']:.1f} over {len(m['tasks'])} tasks" if m else "" for m in means]
        )
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
