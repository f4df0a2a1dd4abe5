"""Draws what a model routed: chunks of a text by layer and head, or heads by task.

python -m jhybrid.routing_report --checkpoint runs/default --text book.txt --out report.html
python -m jhybrid.routing_report --checkpoint runs/elastic_smollm2_135m --out report.html

With --text: which chunks each head sent to softmax, over the text itself. Without, for models that
route heads: which heads attend fully in held-out documents of the run's own sources, by task.
Writes one HTML file that needs nothing else, and its numbers beside it as report.json. Exit code 2:
bad input, in one line on stderr.
"""

import argparse
import html
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import commandline, head_map, report_page
from jhybrid.checkpoint import load_model
from jhybrid.config import ChunkRoutedConfig, Experiment, ModelConfig
from jhybrid.data import Tokenizer, check_vocabulary, load_tokenizer
from jhybrid.errors import UserError
from jhybrid.mixers import Context, Report
from jhybrid.model import HybridLM
from jhybrid.routing import RECURRENT, SOFTMAX

MAX_TOKENS = 8192


def routes(model: HybridLM, tokens: Sequence[int]) -> dict[int, Report]:
    """By block: `decisions` [N, H] (True for softmax) and `scores` [N, H, 2] of every chunk."""

    @jax.jit
    def run(weights: Any, tokens: Any) -> dict[str, Report]:
        model = nnx.merge(graphdef, weights)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model(tokens, Context(positions=positions)).reports

    graphdef, weights = nnx.split(model)
    reports = run(weights, jnp.asarray(tokens, jnp.int32)[None])
    return {
        int(name.removeprefix("blocks.")): {
            key: np.asarray(report[key])[0] for key in ("decisions", "scores")
        }
        for name, report in reports.items()
        if "decisions" in report
    }


def numbers(config: ModelConfig, found: dict[int, Report], length: int) -> dict[str, Any]:
    """The report as JSON: per layer and head, of the chunks that `length` tokens complete.

    `margin` is the softmax score minus the state's. Bytes are those of keys and values in the
    compute dtype: of every token, and of the tokens that are kept.
    """
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    layers = []
    for block, report in found.items():
        mixer = config.blocks[block].mixer
        assert isinstance(mixer, ChunkRoutedConfig)
        whole = length // mixer.chunk_size
        scores = report["scores"][:whole].astype(np.float64)
        margin = scores[..., SOFTMAX] - scores[..., RECURRENT]
        softmax = report["decisions"][:whole]
        width = mixer.num_softmax_heads * (mixer.softmax_key_dim + mixer.softmax_value_dim)
        layers.append(
            {
                "block": block,
                "chunk_size": mixer.chunk_size,
                "softmax_fraction": float(softmax.mean()),
                "bytes_per_token": width * itemsize,
                "kept_bytes_per_token": float(softmax.mean()) * width * itemsize,
                "heads": [
                    {
                        "softmax_fraction": float(softmax[:, h].mean()),
                        "softmax": softmax[:, h].astype(int).tolist(),
                        "margin": np.round(margin[:, h], 6).tolist(),
                    }
                    for h in range(mixer.num_heads)
                ],
            }
        )
    margins = np.abs(np.concatenate([head["margin"] for x in layers for head in x["heads"]]))
    return {
        "tokens": length,
        "piece_tokens": math.gcd(*(layer["chunk_size"] for layer in layers)),
        "softmax_fraction": float(np.mean([layer["softmax_fraction"] for layer in layers])),
        "bytes_per_token": sum(layer["bytes_per_token"] for layer in layers),
        "kept_bytes_per_token": sum(layer["kept_bytes_per_token"] for layer in layers),
        "margin_scale": float(np.quantile(margins, 0.9)) or 1.0,
        "layers": layers,
    }


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], size: int) -> list[str]:
    """The text of every `size` tokens; together they are the text of all of them.

    A character that a boundary cuts belongs to the piece it begins in.
    """
    ids = np.asarray(tokens)
    text = tokenizer.decode(ids).encode()
    ends = np.cumsum(tokenizer.byte_lengths[ids])[size - 1 :: size].tolist()
    if int(tokenizer.byte_lengths[ids].sum()) != len(text):  # the vocabulary does not spell bytes
        return [tokenizer.decode(ids[i : i + size]) for i in range(0, len(ids), size)]
    bounds = [0]
    for end in [*ends, len(text)][: -(-len(ids) // size)]:
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end += 1
        bounds.append(end)
    bounds[-1] = len(text)
    return [text[a:b].decode(errors="replace") for a, b in itertools.pairwise(bounds)]


def render(name: str, source: str, report: dict[str, Any], texts: Sequence[str]) -> str:
    """The page."""
    tokens, layers = report["tokens"], report["layers"]
    kept, every = report["kept_bytes_per_token"], report["bytes_per_token"]
    facts = (
        (f"{100 * report['softmax_fraction']:.1f} %", "of chunks kept for softmax"),
        (f"{kept:,.0f} B", f"of keys and values per token, of {every:,} B"),
        (f"{tokens:,}", "tokens"),
        (f"{len(layers)}", "routed layers"),
        (f"{sum(len(layer['heads']) for layer in layers)}", "routing heads"),
    )
    sizes = ", ".join(map(str, sorted({layer["chunk_size"] for layer in layers})))
    lead = (
        f"Every chunk of {sizes} tokens goes, for each layer and head, one of two ways once it is "
        "complete: later tokens see its keys and values by softmax attention, or they find it only "
        "in a recurrent state."
    )
    return report_page.page(
        title=f"Where {name} attends, and where it remembers",
        lead=lead,
        facts=facts,
        body=report_page.fill(
            "chunk_routing.html",
            {"text": "".join(f"<span>{html.escape(text)}</span>" for text in texts)},
        ),
        footer=f"{source}, by python -m jhybrid.routing_report",
        data=report,
    )


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.routing_report", description="Draw the routing of a text."
    )
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text, to route chunks of")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument(
        "--max-tokens",
        type=commandline.positive,
        default=MAX_TOKENS,
        help="of the text, from its start",
    )
    parser.add_argument("--lengths", help="heads: tokens per document; default: as trained")
    parser.add_argument(
        "--documents",
        type=commandline.positive,
        default=16,
        help="heads: of each source and length",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="heads: the curves as SVG files")
    commandline.add_set_option(parser)
    return parser


def main() -> int:
    arguments = parser().parse_args()
    if arguments.out.suffix != ".html":
        raise UserError(f"--out {arguments.out}: expected a name that ends in .html")
    text = None if arguments.text is None else commandline.read_text(arguments.text, "--text")
    commandline.use_compile_cache(None)
    experiment, model = load_model(arguments.checkpoint, arguments.set)
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    check_vocabulary(tokenizer, experiment.model)
    if text is not None:
        report, page, summary = _of_text(arguments, experiment, model, tokenizer, text)
    elif head_map.routed_blocks(experiment):
        report, page, summary = _of_documents(arguments, experiment, model)
    else:
        raise UserError(f"--text FILE is needed to show what {experiment.name} routes")
    numbers_out = arguments.out.with_suffix(".json")
    commandline.write_text(numbers_out, json.dumps(report, indent=1) + "\n", "--out")
    commandline.write_text(arguments.out, page, "--out")
    print(f"{summary}; written to {arguments.out} and {numbers_out}")
    return 0


Made = tuple[dict[str, Any], str, str]  # numbers, page, one line


def _of_text(
    arguments: argparse.Namespace,
    experiment: Experiment,
    model: HybridLM,
    tokenizer: Tokenizer,
    text: str,
) -> Made:
    sizes = _chunk_sizes(experiment, arguments.checkpoint)
    everything = tokenizer.encode(text)
    tokens = everything[: arguments.max_tokens]
    if len(tokens) < max(sizes):
        raise UserError(
            f"--text {arguments.text}: {len(tokens)} tokens are less than a chunk of {max(sizes)}"
        )
    report = numbers(experiment.model, routes(model, tokens), len(tokens))
    report = {"checkpoint": arguments.checkpoint, "text": str(arguments.text), **report}
    texts = pieces(tokenizer, tokens, report["piece_tokens"])
    part = "" if len(tokens) == len(everything) else f", the first of {len(everything):,} tokens"
    page = render(experiment.name, f"{arguments.text.name}{part}", report, texts)
    summary = (
        f"{100 * report['softmax_fraction']:.1f} % of chunks to softmax, "
        f"{report['kept_bytes_per_token']:,.0f} of {report['bytes_per_token']:,} bytes per token"
    )
    return report, page, summary


def _of_documents(arguments: argparse.Namespace, experiment: Experiment, model: HybridLM) -> Made:
    lengths = [experiment.data.sequence_length]
    if arguments.lengths is not None:
        texts = arguments.lengths.split(",")
        if not all(text.isdecimal() and int(text) > 0 for text in texts):
            raise UserError(f"--lengths {arguments.lengths}: expected numbers, as 512,1024")
        lengths = [int(text) for text in texts]
    groups = head_map.collect(experiment, model, lengths, arguments.documents)
    report = {"checkpoint": arguments.checkpoint, **head_map.numbers(experiment, groups)}
    svgs = head_map.charts(report, head_map.curves(Path(arguments.checkpoint)))
    if arguments.plots is not None:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        for name, svg in svgs.items():
            commandline.write_text(arguments.plots / name, svg, "--plots")
    shares = ", ".join(
        f"{row['task']} {100 * row['msr']:.0f} % at {row['length']}" for row in report["groups"]
    )
    return report, head_map.render(experiment.name, report, svgs), f"sparse heads: {shares}"


def _chunk_sizes(experiment: Experiment, checkpoint: str) -> list[int]:
    mixers = [block.mixer for block in experiment.model.blocks]
    sizes = [mixer.chunk_size for mixer in mixers if isinstance(mixer, ChunkRoutedConfig)]
    if not sizes:
        raise UserError(f"--checkpoint {checkpoint}: no block of {experiment.name} routes chunks")
    return sizes


if __name__ == "__main__":
    commandline.run(main)
