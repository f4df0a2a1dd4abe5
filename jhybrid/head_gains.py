"""Ranks a backbone's heads by what full attention gains them, without training anything.

    python -m jhybrid.head_gains --config configs/elastic_smollm2_135m.py --out masks
    python -m jhybrid.head_masks --checkpoint masks --sparse 0.5

Every head mixes both modes by halves. Its gain is how fast a document's loss falls as its weight w
of the full mode rises, in nats:

    gain = -d/dw sum over the document's targets of -log p        at w = 1/2 of all heads

The config says what sparse heads see (`mode` and windows), the backbone (`training.init_from`) and
the documents. Means over a task's documents; tasks count alike, their gains divided by the sum of
their sizes. `--out` is an export with static masks (`route="alpha"`) whose weights are the heads'
ranks, from 0 for the least gain to 1: what `jhybrid.head_masks` cuts and eval.py measures, so that
one sees before a router is trained what a window costs. Exit code 2: bad input, in one line.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import commandline, data
from jhybrid.block_groups import block_paths, find_groups
from jhybrid.checkpoint import write_export
from jhybrid.config import Experiment, HeadRoutedConfig
from jhybrid.errors import UserError
from jhybrid.losses import token_log_likelihoods
from jhybrid.model import HybridLM, training_context
from jhybrid.parameters import flatten, unflatten
from jhybrid.training.backbone import Backbone
from pallas_kernels.array_types import Float

MASK = ".mask.alpha"


def with_masks(experiment: Experiment) -> Experiment:
    """The experiment whose routed heads have a weight each in place of a router."""
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, route="alpha"))
        if isinstance(block.mixer, HeadRoutedConfig)
        else block
        for block in experiment.model.blocks
    )
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, blocks=blocks),
        optimizer=dataclasses.replace(experiment.optimizer, trainable="mask"),
        sparsity=None,
    )


class Masked:
    """A backbone with masks: its parameters by path, and the gains of its heads."""

    def __init__(self, experiment: Experiment):
        self.experiment = with_masks(experiment)
        abstract = nnx.eval_shape(lambda: HybridLM(self.experiment.model, rngs=nnx.Rngs(0)))
        graphdef, template = nnx.split(abstract)
        specs = flatten(template)
        self.masks = {path: spec for path, spec in specs.items() if path.endswith(MASK)}
        if not self.masks:
            raise UserError("--config: no block of model.blocks is head-routed")
        path = experiment.training.init_from
        if path is None:
            raise UserError("--config: training.init_from must name a backbone")
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=here)
            for name, spec in specs.items()
        }
        self.params = Backbone(path, self.experiment.model, places).read()

        def loss(weights: dict, params: dict, batch: dict) -> Float[jax.Array, ""]:
            model = nnx.merge(graphdef, unflatten(template, {**params, **weights}))
            # a key makes heads mix
            context = dataclasses.replace(training_context(batch), rng=jax.random.key(0))
            hidden = model(batch["tokens"], context).hidden
            return -token_log_likelihoods(model, hidden, batch["targets"]).sum()

        self.gradient = jax.jit(jax.value_and_grad(loss))

    def gains(self, source: Any, documents: int) -> tuple[float, dict[str, np.ndarray]]:
        """Mean loss of a row's targets, and mean gain of each head, over rows of one source."""
        config = dataclasses.replace(self.experiment.data, sources=(source,), batch_size=1)
        batches = data.train_batches(config)
        half = {path: jnp.full(spec.shape, 0.5, spec.dtype) for path, spec in self.masks.items()}
        total, losses = {path: np.zeros(spec.shape) for path, spec in self.masks.items()}, []
        for _ in range(documents):
            batch = next(batches)
            value, slope = jax.device_get(self.gradient(half, self.params, batch))
            losses.append(float(value) / max(int((batch["targets"] >= 0).sum()), 1))
            total = {path: total[path] - slope[path] / documents for path in total}
        return float(np.mean(losses)), total


def together(gains: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The mean of gains that are each divided by the sum of their sizes."""
    sizes = [sum(np.abs(value).sum() for value in each.values()) or 1.0 for each in gains]
    return {
        path: np.mean([each[path] / size for each, size in zip(gains, sizes, strict=True)], axis=0)
        for path in gains[0]
    }


def ranks(gains: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From 0 for the least of all heads to 1, equally spaced."""
    every = np.concatenate([value.ravel() for value in gains.values()])
    place = np.argsort(np.argsort(every, kind="stable")) / max(len(every) - 1, 1)
    ends = np.cumsum([value.size for value in gains.values()])
    parts = np.split(place, ends[:-1])
    return {
        path: part.reshape(value.shape).astype(np.float32)
        for (path, value), part in zip(gains.items(), parts, strict=True)
    }


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="python -m jhybrid.head_gains", description="Rank heads.")
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--tasks", help="of data.tasks, comma-separated; default: all sources")
    parser.add_argument("--documents", type=commandline.positive, default=6, help="of each source")
    parser.add_argument("--out", type=Path, required=True, help="the export with static masks")
    parser.add_argument("--json", type=Path, help="also write the gains by block")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    experiment = commandline.load_config(arguments.config, arguments.set)
    sources = {
        f"{i}: {getattr(source, 'task', type(source).__name__)}": source
        for i, source in enumerate(experiment.data.sources)
    }
    if arguments.tasks is not None:
        asked = set(arguments.tasks.split(","))
        known = {getattr(source, "task", None) for source in sources.values()}
        if unknown := asked - known:
            raise UserError(f"--tasks {min(unknown)}: no source of data.sources asks it")
        sources = {n: s for n, s in sources.items() if getattr(s, "task", None) in asked}
    if arguments.out.exists():
        raise UserError(f"--out {arguments.out} already exists")
    masked = Masked(experiment)
    found = {}
    for name, source in sources.items():
        loss, found[name] = masked.gains(source, arguments.documents)
        size = sum(value.sum() for value in found[name].values())
        print(f"{name}: loss {loss:.4f} per target at halves, gains sum to {size:.4f}", flush=True)
    gains = together(list(found.values()))
    groups = find_groups(masked.experiment.model.blocks)
    by_block = {
        block.removesuffix(MASK): value.tolist()
        for path, values in gains.items()
        for block, value in zip(block_paths(path, groups) or [], values, strict=True)
    }
    for block, values in by_block.items():
        print(f"{block}: {' '.join(f'{value:.5f}' for value in values)}")
    weights = {path: jnp.asarray(value) for path, value in ranks(gains).items()}
    write_export(masked.experiment, {**masked.params, **weights}, arguments.out)
    if arguments.json is not None:
        commandline.write_text(arguments.json, json.dumps(by_block, indent=1) + "\n", "--json")
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    commandline.run(main)
