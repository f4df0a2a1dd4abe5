"""What head-routed layers chose for labelled documents: sparsity by task, length, layer and head.

    MSR   share of (layer, key/value head) pairs that attend sparsely
    ESR   pruned share of what the last layer's heads attend to, for the last query of a document;
          a sparse SSA head of W = (sink + local) tokens prunes 1 - W / T, a full head nothing

(Elastic Attention, arXiv 2601.17367, section 4.) `pruned` is the same over all layers and queries.
XAttention's pruning depends on the text: heads on it count as pruning nothing.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jhybrid import data, report_page
from jhybrid.charts import Point, Series, chart
from jhybrid.config import DataConfig, Experiment, GeneratedTask, HeadRoutedConfig, Needle
from jhybrid.model import HybridLM, training_context
from jhybrid.sparsity import document_tasks
from pallas_kernels.array_types import Bool, Int

NO_TASK = "no task"
ROWS = 4  # at a time
CELL = (24, 9)  # pixels of a head in a layer

Line = Sequence[tuple[float, float]]  # (step or block, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The documents of one task at one nominal length."""

    task: str
    length: int
    tokens: Int[np.ndarray, "D"]
    full: Bool[np.ndarray, "D L G"]


def routed_blocks(experiment: Experiment) -> dict[int, HeadRoutedConfig]:
    mixers = {i: block.mixer for i, block in enumerate(experiment.model.blocks)}
    return {i: mixer for i, mixer in mixers.items() if isinstance(mixer, HeadRoutedConfig)}


def collect(
    experiment: Experiment, model: HybridLM, lengths: Sequence[int], documents: int
) -> list[Group]:
    """At each length the first held-out documents of every source, `documents` or a few more."""
    blocks = routed_blocks(experiment)
    block_size = next(iter(blocks.values())).block_size
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights: Any, batch: dict[str, Any]) -> tuple[Any, list[Any]]:
        reports = nnx.merge(graphdef, weights)(batch["tokens"], training_context(batch)).reports
        chosen = [reports[f"blocks.{i}"]["decisions"] for i in blocks]
        return document_tasks(batch, block_size), chosen

    found: dict[tuple[str, int], list[tuple[int, np.ndarray]]] = {}
    for length in lengths:
        config = at_length(experiment, length)
        for index in range(len(config.sources)):
            seen = 0
            for batch in data.validation_batches(config, sources=[index]):
                tasks, chosen = jax.device_get(run(weights, batch))
                for row, block, tokens in _starts(batch, block_size):
                    task = int(tasks[row, block])
                    name = config.tasks[task] if task >= 0 else NO_TASK
                    full = np.stack([layer[row, block] for layer in chosen])
                    found.setdefault((name, length), []).append((tokens, full))
                    seen += 1
                if seen >= documents:
                    break
    return [
        Group(
            task=task,
            length=length,
            tokens=np.array([tokens for tokens, _ in rows]),
            full=np.stack([full for _, full in rows]),
        )
        for (task, length), rows in found.items()
    ]


def at_length(experiment: Experiment, length: int) -> DataConfig:
    """The data with rows, and what is generated, of `length` tokens."""
    sources = tuple(
        dataclasses.replace(source, length=length)
        if isinstance(source, GeneratedTask | Needle)
        else source
        for source in experiment.data.sources
    )
    return dataclasses.replace(
        experiment.data, sources=sources, sequence_length=length, batch_size=ROWS
    )


def _starts(batch: Mapping[str, np.ndarray], block_size: int) -> list[tuple[int, int, int]]:
    """(row, block it starts in, tokens) of every document."""
    found = []
    for row, ids in enumerate(batch["segment_ids"]):
        for segment in range(ids.max() + 1):
            (here,) = np.nonzero(ids == segment)
            found.append((row, int(here[0]) // block_size, len(here)))
    return found


def numbers(experiment: Experiment, groups: Sequence[Group]) -> dict[str, Any]:
    """The report as JSON."""
    blocks = routed_blocks(experiment)
    targets = {} if experiment.sparsity is None else experiment.sparsity.targets
    bounds = {target.task: [target.low, target.high] for target in targets}
    last = blocks[max(blocks)]
    rows = []
    for group in groups:
        sparse = ~group.full
        width = (last.sink_blocks + last.local_blocks) * last.block_size
        prunes = np.maximum(1 - width / group.tokens, 0) if "SSA" in last.mode else 0.0
        rows.append(
            {
                "task": group.task,
                "length": group.length,
                "documents": len(group.full),
                "mean_tokens": float(group.tokens.mean()),
                "target": bounds.get(group.task),
                "msr": float(sparse.mean()),
                "msr_standard_error": _standard_error(sparse.mean((1, 2))),
                "esr": float((sparse[:, -1].mean(1) * prunes).mean()),
                "pruned": _pruned(list(blocks.values()), group),
                "msr_by_layer": sparse.mean((0, 2)).tolist(),
                "full": group.full.mean(0).tolist(),
            }
        )
    return {
        "mode": last.mode,
        "blocks": list(blocks),
        "heads": last.attention.num_kv_heads,
        "msr": float(np.mean([row["msr"] for row in rows])),
        "groups": rows,
    }


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _pruned(mixers: Sequence[HeadRoutedConfig], group: Group) -> float:
    shares = [
        1 - mixer.mixing_flops(int(tokens), float(full[i].mean())) / mixer.mixing_flops(tokens, 1.0)
        for tokens, full in zip(group.tokens, group.full, strict=True)
        for i, mixer in enumerate(mixers)
    ]
    return float(np.mean(shares))


def curves(workdir: Path) -> dict[str, dict[str, Line]]:
    """By title, what a run logged of its routers' training; empty for an export."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {x["step"]: x for x in lines if x["event"] == "train" and "sparsity" in x}
    if not steps:
        return {}
    tasks = next(iter(steps.values()))["sparsity"]["tasks"]

    def of_tasks(key: str) -> dict[str, Line]:
        return {
            task: [(n, _number(x["sparsity"]["tasks"][task][key])) for n, x in steps.items()]
            for task in tasks
        }

    return {
        "share of sparse heads": of_tasks("sparse"),
        "loss, nats per target": of_tasks("loss"),
        "linear multiplier": of_tasks("linear"),
        "quadratic multiplier": of_tasks("quadratic"),
        "objective": {
            "language model": [(n, _number(x["loss"])) for n, x in steps.items()],
            "sparsity penalty": [(n, _number(x["sparsity"]["penalty"])) for n, x in steps.items()],
        },
    }


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def charts(report: Mapping[str, Any], trained: Mapping[str, Mapping[str, Line]]) -> dict[str, str]:
    """SVG by file name: the training's curves, and which layers are sparse."""
    made = {
        f"{measure.split(',')[0].replace(' ', '_')}.svg": _chart(lines, "Training", "step", measure)
        for measure, lines in trained.items()
    }
    by_layer = {
        f"{row['task']}, {row['length']}": list(
            zip(report["blocks"], row["msr_by_layer"], strict=True)
        )
        for row in report["groups"]
    }
    made["sparse_heads_by_layer.svg"] = _chart(
        by_layer, "After training", "block", "share of sparse heads"
    )
    return made


def _chart(lines: Mapping[str, Line], title: str, x_label: str, y_label: str) -> str:
    series = [
        Series(name, [Point(x, y) for x, y in line if math.isfinite(y)])
        for name, line in lines.items()
    ]
    return chart(series, title=title, x_label=x_label, y_label=y_label)


def render(name: str, report: Mapping[str, Any], svgs: Mapping[str, str]) -> str:
    """The page."""
    layers, heads = len(report["blocks"]), report["heads"]
    facts = (
        (f"{100 * report['msr']:.1f} %", "of heads sparse, mean over tasks and lengths"),
        (f"{layers} x {heads}", "routed layers x key/value heads"),
        (report["mode"], "full heads - sparse heads"),
        (f"{sum(row['documents'] for row in report['groups']):,}", "documents"),
    )
    body = report_page.fill(
        "head_routing.html",
        {
            "rows": "".join(map(_table_row, report["groups"])),
            "maps": "".join(_map(row, report["blocks"]) for row in report["groups"]),
            "charts": "".join(f'<div class="map">{svg}</div>' for svg in svgs.values()),
        },
    )
    return report_page.page(
        title=f"Which heads of {name} attend fully",
        lead="A router in every layer decides, for each document and key/value head, between full "
        "attention and a sparse one, from the keys of the prompt's first and last tokens.",
        facts=facts,
        body=body,
        footer="by python -m jhybrid.routing_report",
        data=report,
    )


def _table_row(row: Mapping[str, Any]) -> str:
    low, high = row["target"] or (None, None)
    target = "-" if low is None else f"{low:g}" if low == high else f"{low:g} to {high:g}"
    error = row["msr_standard_error"]
    cells = (
        report_page.escaped(row["task"]),
        f"{row['length']:,}",
        f"{row['documents']}",
        f"{row['msr']:.3f}" + ("" if error is None else f" &plusmn; {error:.3f}"),
        target,
        f"{row['esr']:.3f}",
        f"{row['pruned']:.3f}",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _map(row: Mapping[str, Any], blocks: Sequence[int]) -> str:
    """Layers from top to bottom, heads from left to right; the fuller, the stronger the colour."""
    width, height = CELL
    cells = [
        f'<rect x="{34 + width * h}" y="{height * layer}" width="{width - 1}" '
        f'height="{height - 1}" style="fill: rgb(var(--softmax) / {0.06 + 0.94 * share:.2f})">'
        f"<title>block {blocks[layer]}, head {h}: full in {100 * share:.0f} %</title></rect>"
        for layer, shares in enumerate(row["full"])
        for h, share in enumerate(shares)
    ]
    labels = [
        f'<text x="28" y="{height * layer + height}" text-anchor="end" font-size="9" '
        f'style="fill: var(--quiet)">{blocks[layer]}</text>'
        for layer in range(0, len(blocks), 5)
    ]
    size = f'width="{34 + width * len(row["full"][0])}" height="{height * len(blocks) + 2}"'
    return (
        f'<div class="map"><h3>{report_page.escaped(row["task"])}</h3>'
        f"<p>{row['length']:,} tokens, {100 * row['msr']:.0f} % sparse</p>"
        f"<svg {size}>{''.join(labels)}{''.join(cells)}</svg></div>"
    )
