"""RULER's metrics (NVIDIA/RULER, `scripts/eval/synthetic/constants.py`), with standard errors.

Both are case-insensitive substring tests, averaged over samples and given in percent.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """What is scored: control characters become line ends, outer white space goes."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def found(prediction: str, references: Sequence[str]) -> list[bool]:
    """Which references occur in the prediction."""
    return [reference.lower() in prediction.lower() for reference in references]


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of the references that occur."""
    return sum(found(prediction, references)) / len(references)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference occurs, else 0."""
    return float(any(found(prediction, references)))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"all": match_all, "part": match_part}


def mean_and_standard_error(scores: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (sample deviation / sqrt n), in percent, two decimals."""
    n = len(scores)
    mean = sum(scores) / n
    if n == 1:
        return round(100 * mean, 2), None
    variance = sum((score - mean) ** 2 for score in scores) / (n - 1)
    return round(100 * mean, 2), round(100 * math.sqrt(variance / n), 2)


def summarize(metric: str, predictions: Sequence[str], rows: Sequence[dict]) -> dict[str, Any]:
    """Score, standard error, empty predictions and, where samples have depths, score by depth."""
    cleaned = [clean(prediction) for prediction in predictions]
    references = [row["outputs"] for row in rows]
    scores = [METRICS[metric](p, r) for p, r in zip(cleaned, references, strict=True)]
    score, error = mean_and_standard_error(scores)
    summary: dict[str, Any] = {
        "score": score,
        "standard_error": error,
        "metric": f"string_match_{metric}",
        "num_samples": len(scores),
        "nulls": sum(not prediction for prediction in cleaned),
    }
    if all("depths" in row for row in rows):
        summary["by_depth"] = by_depth(
            (depth, hit)
            for row, prediction in zip(rows, cleaned, strict=True)
            for depth, hit in zip(row["depths"], found(prediction, row["outputs"]), strict=True)
        )
    return summary


def by_depth(hits: Iterable[tuple[float, bool]], num_bins: int = 5) -> list[dict[str, Any]]:
    """Needles found, in percent, by their depth in percent of the context's characters."""
    bins: list[list[bool]] = [[] for _ in range(num_bins)]
    for depth, hit in hits:
        bins[min(int(depth * num_bins / 100), num_bins - 1)].append(hit)
    width = 100 // num_bins
    return [
        {
            "depth": f"{i * width}-{(i + 1) * width}",
            "score": round(100 * sum(inside) / len(inside), 2) if inside else None,
            "needles": len(inside),
        }
        for i, inside in enumerate(bins)
    ]
