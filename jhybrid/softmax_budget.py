"""Finds the softmax bias at which a checkpoint keeps a given fraction of chunks, and what it costs.

python -m jhybrid.softmax_budget --checkpoint runs/default --text book.txt --fractions 0.1,0.25,0.5

For each fraction prints the bias, the fraction reached on the text, the text's loss at that bias
and the bytes of keys and values that are kept per token. A bias found here is a setting of every
command: --set model.blocks.*.mixer.softmax_bias=-0.2. Exit code 2: bad input, in one line.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import commandline
from jhybrid.checkpoint import load_model
from jhybrid.config import ChunkRoutedConfig, ModelConfig
from jhybrid.data import check_vocabulary, load_tokenizer
from jhybrid.errors import UserError
from jhybrid.losses import next_token_loss
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from pallas_kernels.array_types import Int

MAX_TOKENS = 1 << 16
HALVINGS = 20


class Point(NamedTuple):
    """What one bias does to a text."""

    bias: float | None  # None: as the checkpoint's config says
    fraction: float  # of chunks sent to softmax
    loss: float  # nats per token


def measure(model: HybridLM, windows: Int[np.ndarray, "W L"]) -> Callable[[float | None], Point]:
    """The point of a bias over windows of L - 1 predicted tokens, each read from nothing."""
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights: Any, window: Any, bias: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, weights)
        positions = jnp.arange(window.shape[1] - 1)[None]
        output = model(window[:, :-1], Context(positions=positions, softmax_bias=bias))
        total, _ = next_token_loss(model, output.hidden, window[:, 1:])
        fractions = [r["softmax_fraction"] for r in output.reports.values() if "scores" in r]
        return jnp.concatenate(fractions).mean(), total

    def point(bias: float | None) -> Point:
        traced = None if bias is None else jnp.float32(bias)
        results = [run(weights, window[None], traced) for window in windows]
        fractions, totals = np.array(jax.device_get(results)).T
        return Point(bias, float(fractions.mean()), float(totals.sum() / windows[:, 1:].size))

    return point


def find_bias(
    point: Callable[[float], Point],
    fraction: float,
    option: str = "--fractions",
    halvings: int = HALVINGS,
) -> Point:
    """The highest bias found by bisection at which no more than `fraction` is kept.

    Deeper layers see what earlier ones made of their own routing, so the fraction need not be
    monotone in the bias; what comes back was measured, not interpolated.
    """
    low, high = -1.0, 1.0
    while point(low).fraction > fraction:
        low *= 2
        if low < -1e6:
            raise UserError(f"{option}: no bias keeps a fraction of {fraction} or less")
    while (most := point(high)).fraction <= fraction:
        if most.fraction == 1 or high > 1e6:
            return most
        high *= 2
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if point(middle).fraction > fraction else (middle, high)
    return point(low)


def bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of all routed blocks, of one token that every head keeps."""
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    mixers = [b.mixer for b in config.blocks if isinstance(b.mixer, ChunkRoutedConfig)]
    return sum(m.num_heads * (m.key_dim + m.value_dim) for m in mixers) * itemsize


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.softmax_budget", description="Trade softmax chunks for loss."
    )
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--fractions", default="0.1,0.25,0.5,0.75", help="to keep, at most")
    parser.add_argument("--length", type=int, help="tokens per window; default: as in training")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of the text's start")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    commandline.add_set_option(parser)
    return parser


def main() -> int:
    arguments = parser().parse_args()
    fractions = parse_fractions(arguments.fractions)
    text = commandline.read_text(arguments.text, "--text")
    commandline.use_compile_cache(None)
    experiment, model = load_model(arguments.checkpoint, arguments.set)
    width = bytes_per_token(experiment.model)
    if not width:
        raise UserError(f"--checkpoint {arguments.checkpoint}: no block routes chunks")
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    check_vocabulary(tokenizer, experiment.model)
    length = arguments.length or experiment.data.sequence_length
    tokens = np.array(tokenizer.encode(text)[: arguments.max_tokens], np.int32)
    if length < 1 or len(tokens) <= length:
        raise UserError(f"--text {arguments.text}: {len(tokens)} tokens, need more than {length}")
    windows = np.stack([tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)])
    point = measure(model, windows)
    rows = [{"wanted": None, **_row(point(None), width)}]
    rows += [{"wanted": f, **_row(find_bias(point, f), width)} for f in fractions]
    print(table(rows))
    if arguments.out is not None:
        commandline.write_text(arguments.out, json.dumps(rows, indent=1) + "\n", "--out")
    return 0


def parse_fractions(text: str, option: str = "--fractions") -> list[float]:
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= f <= 1 for f in found):
        raise UserError(f"{option} {text}: expected numbers from 0 to 1, as 0.1,0.25")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'wanted':>8} {'kept':>7} {'bias':>9} {'loss':>8} {'perplexity':>11} {'B/token':>9}"]
    for row in rows:
        wanted = "as is" if row["wanted"] is None else f"{row['wanted']:.3f}"
        bias = "-" if row["bias"] is None else f"{row['bias']:.4f}"
        lines.append(
            f"{wanted:>8} {row['fraction']:>7.3f} {bias:>9} {row['loss']:>8.4f} "
            f"{row['perplexity']:>11.2f} {row['bytes_per_token']:>9.1f}"
        )
    return "\n".join(lines)


def _row(point: Point, width: int) -> dict[str, Any]:
    perplexity = math.exp(min(point.loss, 700.0))
    kept = point.fraction * width
    return {**point._asdict(), "perplexity": perplexity, "bytes_per_token": kept}


if __name__ == "__main__":
    commandline.run(main)
