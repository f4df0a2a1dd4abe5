"""The report of a study: one HTML page that needs nothing else."""

import html
import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jhybrid.charts import Point, Series, chart
from jhybrid.study import findings, table
from jhybrid.study.findings import Estimate, Measure, Result, Samples
from jhybrid.study.plan import Study

Cell = tuple[str, str]
MODEL = "bits per byte"
BITS = "bits per byte of held-out text"
SHARES = (0.0, 1.02)  # of right answers, on an axis


def measures(study: Study) -> tuple[list[Measure], list[Measure]]:
    """What the questions are about, at the first length of each: recall, then language modelling.

    RULER's tasks count as recall, by their mean; the harness's by the mean of their accuracies.
    """
    evaluation = study.evaluation
    recalls = [findings.recall(type(of.task).__name__, of.lengths[0]) for of in evaluation.recall]
    models = []
    if any(task.startswith("ruler:") for task in evaluation.tasks):
        recalls.append(findings.average("RULER", "ruler:", "", evaluation.lengths[0]))
    if "perplexity" in evaluation.tasks:
        models.append(findings.single(MODEL, evaluation.lengths[0]))
    if any(task.startswith("lm:") for task in evaluation.tasks):
        models.append(findings.average("LM accuracy", "lm:", " acc", evaluation.lengths[0]))
    return recalls, models


def render(study: Study, results: Sequence[Result]) -> str:
    """The page, from the results of any part of the study's runs."""
    recalls, models = measures(study)
    parts = {
        "name": html.escape(study.name),
        "lead": html.escape(_lead(study, results)),
        "questions": _questions(findings.findings(results, [*recalls, *models])),
        "charts": "\n".join(
            f'<figure id="{name}">{svg}</figure>' for name, svg in charts(study, results).items()
        ),
        "cells": _cells(results, [*recalls, *models]),
        "others": _others(results),
        "data": table.to_json(table.tidy(results)).replace("<", "\\u003c"),
    }
    template = importlib.resources.files("jhybrid.study").joinpath("report.html")
    # One pass from the front, so that nothing a result says is taken for a placeholder.
    head, *rest = template.read_text(encoding="utf-8").split("{{")
    return head + "".join(parts[key] + tail for key, tail in (part.split("}}", 1) for part in rest))


def charts(study: Study, results: Sequence[Result]) -> dict[str, str]:
    """Every chart that the results have numbers for, by name."""
    recalls, models = measures(study)
    found: dict[str, str | None] = {}
    for model in models:
        name = "text" if model.name.startswith(MODEL) else "suite"
        found[f"{name}-by-ratio"] = by_ratio(Samples(results, model), model.name, None)
    for recall in recalls:
        name = recall.name.split()[0].lower()
        samples = Samples(results, recall)
        found[f"{name}-by-ratio"] = by_ratio(samples, f"right answers, {recall.name}", SHARES)
        found[f"{name}-by-cache"] = by_cache(samples, results)
        found[f"{name}-ranks"] = ranks(samples)
    for of in study.evaluation.recall:
        name = type(of.task).__name__
        found[f"{name.lower()}-by-length"] = by_length(
            results,
            of.lengths,
            lambda length, name=name: findings.recall(name, length),
            f"{name}: right answers by length of the document",
            SHARES,
        )
        for length in of.lengths:
            found[f"{name.lower()}-by-distance-{length}"] = by_distance(results, name, length)
    lengths = study.evaluation.lengths
    if "perplexity" in study.evaluation.tasks and len(lengths) > 1:
        found["text-by-length"] = by_length(
            results, lengths, lambda length: findings.single(MODEL, length), f"{BITS} by length"
        )
    return {name: svg for name, svg in found.items() if svg is not None}


def by_ratio(samples: Samples, label: str, y_range: tuple[float, float] | None) -> str | None:
    """One line per mixer over the share of full layers; none if no mixer has two layouts."""
    by_mixer: dict[str, list[Point]] = {}
    for cell, estimate in _estimates(samples).items():
        share = samples.shares[cell[1]]
        by_mixer.setdefault(cell[0], []).append(_point(share, estimate, f"{cell[0]} {cell[1]}"))
    series = [
        Series(mixer, sorted(points, key=lambda p: p.x)) for mixer, points in by_mixer.items()
    ]
    if not any(len(one.points) > 1 for one in series):
        return None
    ticks = {share: layout for layout, share in samples.shares.items()}
    return chart(
        series,
        title=f"{label}, by ratio",
        x_label="share of layers with full attention",
        y_label=samples.measure.name,
        x_ticks=ticks,
        y_range=y_range,
    )


def by_cache(samples: Samples, results: Sequence[Result]) -> str | None:
    """A point per cell over the bytes of keys and values that a token leaves behind."""
    bytes_of: dict[Cell, list[float]] = {}
    for result in results:
        if result["status"] == "finished":
            cell = (result["mixer"], result["layout"])
            bytes_of.setdefault(cell, []).append(result["kv_bytes_per_token"])
    by_mixer: dict[str, list[Point]] = {}
    for cell, estimate in _estimates(samples).items():
        size = sum(bytes_of[cell]) / len(bytes_of[cell])
        by_mixer.setdefault(cell[0], []).append(_point(size, estimate, f"{cell[0]} {cell[1]}"))
    if not by_mixer:
        return None
    series = [Series(mixer, points, line=False) for mixer, points in by_mixer.items()]
    return chart(
        series,
        title=f"{samples.measure.name} against the size of the cache",
        x_label="bytes of keys and values per token",
        y_label=samples.measure.name,
        y_range=SHARES,
    )


def ranks(samples: Samples) -> str | None:
    """Each mixer's rank alone against its ranks in hybrids, 1 being the best."""
    sign = -1 if samples.measure.more_is_better else 1
    series = []
    for layout in samples.hybrids():
        mixers = samples.mixers("pure", layout)
        if len(mixers) < 2:
            continue
        places = []
        for of in ("pure", layout):
            values = {mixer: sign * samples.estimate((mixer, of)).value for mixer in mixers}
            order = sorted(mixers, key=lambda mixer: values[mixer])
            places.append({mixer: order.index(mixer) + 1 for mixer in mixers})
        points = [
            Point(places[0][m], places[1][m], label=f"{m} {layout}")
            for m in sorted(mixers, key=lambda m: places[0][m])
        ]
        series.append(Series(layout, points, line=False))
    if not series:
        return None
    return chart(
        series,
        title=f"rank by {samples.measure.name}",
        x_label="rank alone (pure)",
        y_label="rank in the hybrid",
    )


def by_length(
    results: Sequence[Result],
    lengths: Sequence[int],
    of: Callable[[int], Measure],
    title: str,
    y_range: tuple[float, float] | None = None,
) -> str | None:
    """A line per cell over the lengths that were measured."""
    by_cell: dict[Cell, list[Point]] = {}
    for length in lengths:
        for cell, estimate in _estimates(Samples(results, of(length))).items():
            by_cell.setdefault(cell, []).append(_point(length, estimate, f"{cell} {length}"))
    if len(lengths) < 2 or not by_cell:
        return None
    series = [Series(" ".join(cell), points) for cell, points in by_cell.items()]
    return chart(
        series,
        title=title,
        x_label="tokens",
        y_label=title.split(" by ")[0],
        log_x=True,
        y_range=y_range,
    )


def by_distance(results: Sequence[Result], name: str, length: int) -> str | None:
    """A line per cell over the distance from what is asked for, at one length."""
    values: dict[Cell, dict[int, list[float]]] = {}
    for result in results:
        for row in result.get("measures", ()):
            if (row["measure"], row.get("length")) == (name, length):
                cell = values.setdefault((result["mixer"], result["layout"]), {})
                cell.setdefault(row["distance_from"], []).append(row["value"])
    if not values:
        return None
    series = [
        Series(
            " ".join(cell),
            [_point(d, findings.mean(of), f"{cell} {d}") for d, of in sorted(buckets.items())],
        )
        for cell, buckets in values.items()
    ]
    return chart(
        series,
        title=f"{name} in documents of {length:,} tokens, by distance",
        x_label="tokens between what is asked for and the answer, from",
        y_label="right answers",
        log_x=True,
        y_range=SHARES,
    )


def _estimates(samples: Samples) -> dict[Cell, Estimate]:
    return {cell: samples.estimate(cell) for cell in samples.by_cell}


def _point(x: float, estimate: Estimate, label: str) -> Point:
    return Point(x, estimate.value, estimate.low, estimate.high, f"{label}: {estimate}")


def _lead(study: Study, results: Sequence[Result]) -> str:
    states = [result["status"] for result in results]
    wanted = len(study.cells) * len(study.seeds)
    devices = ", ".join(sorted({f"{r['device']}, JAX {r['jax']}" for r in results}))
    return (
        f"{len(study.cells)} cells of {len(study.seeds)} seeds: {wanted} runs, of which "
        f"{states.count('finished')} finished, {states.count('diverged')} diverged, "
        f"{states.count('failed')} failed. {devices}."
    )


def _questions(found: Iterable[findings.Finding]) -> str:
    return "\n".join(
        f"<section><h3>{html.escape(one.question)}</h3><p>{html.escape(one.answer)}</p>"
        + _numbers(one.numbers)
        + "</section>"
        for one in found
    )


def _numbers(numbers: Mapping[str, Estimate]) -> str:
    if not numbers:
        return ""
    rows = [(name, str(estimate)) for name, estimate in numbers.items()]
    return f"<details><summary>numbers</summary>{_table(('', 'estimate'), rows)}</details>"


def _cells(results: Sequence[Result], of: Sequence[Measure]) -> str:
    """One line per cell: its size, and the means over its finished seeds with their intervals."""
    samples = [Samples(results, measure) for measure in of]
    facts: dict[Cell, list[Result]] = {}
    for result in results:
        if result["status"] == "finished":
            facts.setdefault((result["mixer"], result["layout"]), []).append(result)
    rows = []
    for cell, runs in facts.items():
        fraction = [r["softmax_fraction"] for r in runs if r["softmax_fraction"] is not None]
        size = findings.mean([run["kv_bytes_per_token"] for run in runs]).value
        rows.append(
            (
                *cell,
                len(runs),
                f"{runs[0]['parameters']:,}",
                f"{size:,.0f}",
                f"{runs[0]['state_bytes']:,}",
                str(findings.mean(fraction)) if fraction else "",
                *(str(s.estimate(cell)) if cell in s.by_cell else "" for s in samples),
            )
        )
    names = ("mixer", "layout", "seeds", "parameters", "KV bytes/token", "state bytes")
    return _table((*names, "softmax fraction", *(m.name for m in of)), rows)


def _others(results: Sequence[Result]) -> str:
    rows = [
        (result["run"], result["status"], result["reason"])
        for result in results
        if result["status"] != "finished"
    ]
    return _table(("run", "status", "reason"), rows) if rows else "<p>None.</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"
