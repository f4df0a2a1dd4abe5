"""Times training, reading and decoding of whole models with random weights, side by side.

    python -m jhybrid.benchmark --config configs/nats_l_hybrid_380m.py --config configs/gdn_380m.py
        --train 8x4096 --forward 1x131072 --decode 1x131072 --softmax-fraction 0.25 --json out.json

A shape is rows x tokens. `train` is a whole step (loss, gradients, AdamW), `forward` reads rows
from nothing to the last token's logits, `prefill` reads them into a decoding state, piece by piece,
`decode` adds one token to rows of that many tokens (caches of zeros). Weights are random and, but
for `train`, in the compute dtype.

Routers with random weights decide at random, so the work is set instead: `--softmax-fraction` of
the chunks of every head (of the heads of all blocks together, where heads are routed), drawn at
random, in `forward`, `prefill` and `decode`; in `train` the routers decide, and the fraction that
they chose is reported. With several fractions routed models are timed at each. Times are medians
by the host's clock, launches included.

`--decode mostx131072` takes as many rows as all of the models have room for, a power of two.
`--vary model.remat=none,block` times every config once with each of these settings.
`--families all` (or gla,retnet,...) times the Transformer and each of the hybrid study's mixers in
the place of a config's model, and compares them; `--resume` keeps the rows of `--json`:

    python -m jhybrid.benchmark --config configs/hybrid_340m.py --families all --train 8x4096
        --decode 1x4096 --decode 64x4096 --json mixers.json --minutes 8 --resume
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jhybrid import commandline
from jhybrid.benchmark import rows as benchmark_rows
from jhybrid.benchmark.models import measure, most_rows
from jhybrid.benchmark.rows import TRANSFORMER, table
from jhybrid.config import ChunkRoutedConfig, Experiment, HeadRoutedConfig, ModelConfig
from jhybrid.errors import UserError
from jhybrid.model_families import FAMILIES, like
from jhybrid.softmax_budget import parse_fractions

MODES = ("train", "forward", "prefill", "decode")


def shape_or_most(text: str) -> tuple[int | None, int]:
    """`commandline.rows_and_tokens`, or None for "most" rows."""
    most, cross, tokens = text.partition("mostx")
    return (
        (None, commandline.positive(tokens))
        if cross and not most
        else commandline.rows_and_tokens(text)
    )


def variants(path: str, settings: Sequence[str], vary: str | None) -> list[Experiment]:
    """The config with `settings`, once for each value of `vary` ("a.b=c,d") and named by it."""
    if vary is None:
        return [commandline.load_config(path, settings)]
    field, _, values = vary.partition("=")
    found = []
    for value in values.split(","):
        experiment = commandline.load_config(path, [*settings, f"{field}={value}"])
        found.append(dataclasses.replace(experiment, name=f"{experiment.name}.{value}"))
    return found


def routes(model: ModelConfig, mode: str) -> bool:
    """Whether a softmax fraction changes what is timed."""
    routed = (ChunkRoutedConfig, HeadRoutedConfig)
    return mode != "train" and any(isinstance(block.mixer, routed) for block in model.blocks)


def _most_here(mode: str, models: Sequence[tuple[ModelConfig, float]], tokens: int) -> int:
    stats = jax.devices()[0].memory_stats()
    if mode != "decode" or not stats:
        raise UserError(f"--{mode} mostx{tokens}: for --decode, on devices that know their memory")
    return most_rows(models, tokens, stats["bytes_limit"])


def of_families(experiment: Experiment, names: str) -> list[Experiment]:
    """The experiment with models of each family, as deep, and first with the Transformer."""
    chosen = FAMILIES if names == "all" else names.split(",")
    old, depth = experiment.model, len(experiment.model.blocks)
    return [
        dataclasses.replace(experiment, name=name, model=like(old, name, "pure", depth=depth))
        for name in dict.fromkeys((TRANSFORMER, *chosen))
    ]


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.benchmark", description="Time whole models with random weights."
    )
    parser.add_argument("--config", action="append", required=True, metavar="FILE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="in each config"
    )
    for mode in MODES:
        parser.add_argument(
            f"--{mode}", action="append", default=[], type=shape_or_most, metavar="BxT"
        )
    parser.add_argument("--vary", metavar="a.b=c,d", help="each config with each of these settings")
    parser.add_argument("--softmax-fraction", default="0.25", help="of chunks or heads; or several")
    parser.add_argument("--families", metavar="NAMES", help="all, or as gla,retnet")
    parser.add_argument("--json", type=Path, help="also write the rows")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json")
    parser.add_argument("--minutes", type=commandline.minutes, help="time no row after so many")
    return parser


def main() -> int:
    began = time.monotonic()
    arguments = parser().parse_args()
    fractions = parse_fractions(arguments.softmax_fraction, "--softmax-fraction")
    experiments = [
        experiment
        for path in arguments.config
        for experiment in variants(path, arguments.set, arguments.vary)
    ]
    if arguments.families is not None:
        found = [of_families(experiment, arguments.families) for experiment in experiments]
        experiments = [experiment for of_config in found for experiment in of_config]
    if arguments.resume and len(fractions) > 1:
        raise UserError("--resume: with one --softmax-fraction")
    commandline.use_compile_cache(None)
    commandline.draw_by_kernel()
    work = list(_work(arguments, experiments, fractions))
    if not work:
        raise UserError(f"nothing to time: name a shape by --{', --'.join(MODES)}")
    device = jax.devices()[0].device_kind
    rows = benchmark_rows.kept(arguments.json, device) if arguments.resume else []
    done = {(row.name, row.mode, (row.rows, row.tokens)) for row in rows}
    print(f"jax {jax.__version__}, {jax.device_count()} x {device}", flush=True)
    print(table(rows), flush=True)
    for experiment, mode, shape, fraction in work:
        if (experiment.name, mode, shape) in done:
            continue
        if time.monotonic() - began > 60 * (arguments.minutes or math.inf):
            print("stopped after --minutes; --resume times the rest", flush=True)
            break
        rows.append(measure(experiment, mode, shape, fraction))
        print(table(rows).splitlines()[-1], flush=True)
        if arguments.json is not None:
            benchmark_rows.write(arguments.json, rows, device)
    return 0


def _work(
    arguments: argparse.Namespace, experiments: Sequence[Experiment], fractions: Sequence[float]
) -> Iterator[tuple[Experiment, str, tuple[int, int], float]]:
    """What `measure` is asked for, in order."""
    for mode in MODES:
        models = [
            (experiment, fraction)
            for experiment in experiments
            for fraction in (fractions if routes(experiment.model, mode) else fractions[:1])
        ]
        for count, tokens in getattr(arguments, mode):
            if count is None:
                count = _most_here(mode, [(e.model, f) for e, f in models], tokens)
            for experiment, fraction in models:
                yield experiment, mode, (count, tokens), fraction


if __name__ == "__main__":
    commandline.run(main)
