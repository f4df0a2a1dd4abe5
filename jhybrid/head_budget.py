"""Finds what head routing costs a checkpoint at given shares of sparse heads.

python -m jhybrid.head_budget --checkpoint runs/elastic --text book.txt --sparse 0.5,0.7

The text is read in windows of --length tokens, each from nothing. For every share a bias on the
scores of full attention is found, by bisection on the first windows, and all windows are read with
it: their share of sparse heads, loss and perplexity, and how far that is from all heads attending
fully, window by window. With --documents also the held-out documents of the run's own tasks: their
share of sparse heads, loss, and how many answers the model would have given to the letter. Works
for routers and for learned masks; prints the setting that has the same effect in every command.
Exit code 2: bad input, in one line.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import commandline, data, head_map
from jhybrid.checkpoint import load_model
from jhybrid.config import Experiment
from jhybrid.errors import UserError
from jhybrid.losses import likeliest_and_likelihoods
from jhybrid.mixers import Context
from jhybrid.model import HybridLM, training_context
from jhybrid.softmax_budget import Point, find_bias, parse_fractions
from pallas_kernels.array_types import Bool, Float, Int

EVERYTHING = 1e9  # a bias with which all heads attend fully
ROWS = 8  # windows or documents at a time
HALVINGS = 10
MAX_TOKENS = 1 << 16

Batch = Mapping[str, np.ndarray]


class Reading(NamedTuple):
    """What a model made of some rows."""

    full: float  # the share of full heads, over documents and layers
    likeliest: Bool[np.ndarray, "B T"]  # whether the target was
    losses: Float[np.ndarray, "B T"]  # 0 without a target


class Reader:
    """A head-routed model that reads rows with any bias. One program for rows of a size."""

    def __init__(self, model: HybridLM):
        graphdef, self._weights = nnx.split(model)

        @jax.jit
        def run(weights: Any, batch: Any, bias: Any) -> tuple[Any, Any, Any]:
            model = nnx.merge(graphdef, weights)
            packed = "segment_ids" in batch
            plain = training_context(batch) if packed else Context(positions=batch["positions"])
            context = dataclasses.replace(plain, softmax_bias=bias)
            output = model(batch["tokens"], context)
            shares = [r["softmax_fraction"] for r in output.reports.values() if "gate" in r]
            found = likeliest_and_likelihoods(model, output.hidden, batch["targets"])
            return jnp.concatenate(shares).mean(), *found

        self._run = run

    def __call__(self, batch: Batch, bias: float | None) -> Reading:
        """`bias` None: as the checkpoint's config says."""
        told = None if bias is None else jnp.float32(bias)
        full, likeliest, likelihoods = jax.device_get(self._run(self._weights, batch, told))
        return Reading(float(full), likeliest, -likelihoods)


def windows(tokens: Int[np.ndarray, "n"], length: int) -> list[Batch]:
    """Whole batches of windows of `length` predicted tokens."""
    count = (len(tokens) - 1) // length
    rows = min(ROWS, count)
    starts = length * np.arange(count // rows * rows)[:, None] + np.arange(length)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return [
        {"tokens": tokens[part], "targets": tokens[part + 1], "positions": positions}
        for part in np.split(starts, len(starts) // rows)
    ]


def read_text(reader: Reader, batches: Sequence[Batch], bias: float | None) -> dict[str, Any]:
    """Share of sparse heads and mean loss of each window."""
    readings = [reader(batch, bias) for batch in batches]
    return {
        "bias": bias,
        "sparse": 1 - float(np.mean([reading.full for reading in readings])),
        "losses": np.concatenate([r.losses.mean(1, np.float64) for r in readings]),
    }


def against(losses: Float[np.ndarray, "W"], base: Float[np.ndarray, "W"]) -> dict[str, Any]:
    """Loss and perplexity, and how much higher than the base's, as a share of it.

    The standard error is that of a mean of differences by window.
    """
    gap = losses - base
    higher = math.exp(gap.mean())
    error = higher * gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else None
    mean = float(losses.mean())
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "higher": higher - 1,
        "standard_error": error,
    }


def right(batch: Batch, likeliest: Bool[np.ndarray, "B T"]) -> Iterator[bool]:
    """Of every document, whether each token of its answer was the likeliest after the others."""
    for row in range(len(likeliest)):
        ids = batch["segment_ids"][row]
        for segment in range(ids.max() + 1):
            (here,) = np.nonzero(ids == segment)
            answer = here[max(int(batch["prompt"][row][here].sum()) - 1, 0) :]
            answer = answer[batch["targets"][row][answer] >= 0]
            yield bool(likeliest[row][answer].all())


def read_documents(
    reader: Reader, held_out: Mapping[str, Sequence[Batch]], bias: float | None
) -> dict[str, dict[str, float]]:
    """By source: share of sparse heads, loss per target, share of right answers."""
    found = {}
    for name, batches in held_out.items():
        readings = [reader(batch, bias) for batch in batches]
        pairs = list(zip(batches, readings, strict=True))
        answers = [[*right(batch, reading.likeliest)] for batch, reading in pairs]
        targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
        weights = [len(each) for each in answers]
        found[name] = {
            "documents": sum(weights),
            "sparse": 1 - float(np.average([r.full for r in readings], weights=weights)),
            "loss": float(sum(r.losses.sum() for r in readings)) / max(targets, 1),
            "right": float(np.mean(np.concatenate(answers))),
        }
    return found


def held_out_documents(
    experiment: Experiment, length: int, documents: int
) -> dict[str, list[Batch]]:
    """By task, the first batches of each source that asks one."""
    config = head_map.at_length(experiment, length)
    found: dict[str, list[Batch]] = {}
    for index, source in enumerate(config.sources):
        task = getattr(source, "task", None)
        if task is None:
            continue
        batches = found.setdefault(task, [])
        seen = 0
        for batch in data.validation_batches(config, sources=[index]):
            if seen >= documents:
                break
            names = ("tokens", "targets", "positions", "segment_ids", "prompt")
            batches.append({name: batch[name] for name in names})
            seen += int((batch["segment_ids"].max(1) + 1).sum())
    return found


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.head_budget", description="Trade full heads for loss."
    )
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--sparse", default="0.5,0.6,0.7", help="shares of heads, at least")
    parser.add_argument("--length", type=int, help="tokens per window; default: as in training")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of the text's start")
    parser.add_argument("--documents", type=int, default=0, help="held-out ones of each task")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    commandline.add_set_option(parser)
    return parser


def main() -> int:
    arguments = parser().parse_args()
    shares = parse_fractions(arguments.sparse, "--sparse")
    text = commandline.read_text(arguments.text, "--text")
    commandline.use_compile_cache(None)
    experiment, model = load_model(arguments.checkpoint, arguments.set)
    routed = head_map.routed_blocks(experiment)
    if not routed:
        raise UserError(f"--checkpoint {arguments.checkpoint}: no block routes heads")
    mixer = next(iter(routed.values()))
    if mixer.route in ("retrieval", "sparse"):
        raise UserError(f"--checkpoint: mixer.route={mixer.route} leaves nothing to choose")
    tokenizer = data.load_tokenizer(experiment.data.tokenizer)
    data.check_vocabulary(tokenizer, experiment.model)
    length = arguments.length or experiment.data.sequence_length
    tokens = np.array(tokenizer.encode(text)[: arguments.max_tokens], np.int32)
    if length < 1 or len(tokens) <= length:
        raise UserError(f"--text {arguments.text}: {len(tokens)} tokens, need more than {length}")
    batches, reader = windows(tokens, length), Reader(model)

    def first(bias: float) -> Point:
        reading = reader(batches[0], bias)
        return Point(bias, reading.full, float(reading.losses.mean()))

    biases = {f"{s:g}": find_bias(first, 1 - s, "--sparse", HALVINGS).bias for s in shares}
    held_out = held_out_documents(experiment, length, arguments.documents)
    rows, base = [], None
    for wanted, bias in {"full": EVERYTHING, "as is": None, **biases}.items():
        row = read_text(reader, batches, bias)
        losses = row.pop("losses")
        base = losses if base is None else base
        rows.append({"wanted": wanted, **row, **against(losses, base), "windows": len(losses)})
        if mixer.route != "router" and bias is not None:
            rows[-1]["route_threshold"] = mixer.route_threshold - bias
        if held_out:
            rows[-1]["tasks"] = read_documents(reader, held_out, bias)
        print(line(rows[-1]), flush=True)
    if arguments.out is not None:
        commandline.write_text(arguments.out, json.dumps(rows, indent=1) + "\n", "--out")
    return 0


def line(row: Mapping[str, Any]) -> str:
    error = row["standard_error"]
    setting = "softmax_bias", row["bias"]
    if "route_threshold" in row:
        setting = "route_threshold", row["route_threshold"]
    named = "" if row["wanted"] in ("full", "as is") else f", mixer.{setting[0]}={setting[1]:.6g}"
    tasks = "; ".join(
        f"{name} sparse {x['sparse']:.3f} loss {x['loss']:.4f} right {x['right']:.3f}"
        for name, x in row.get("tasks", {}).items()
    )
    return (
        f"{row['wanted']}: sparse {row['sparse']:.3f}, loss {row['loss']:.4f}, perplexity "
        f"{row['perplexity']:.3f}, {100 * row['higher']:+.2f}"
        + ("" if error is None else f" +- {100 * error:.2f}")
        + f" % against full{named}"
        + (f"\n  {tasks}" if tasks else "")
    )


if __name__ == "__main__":
    commandline.run(main)
