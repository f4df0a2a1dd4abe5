"""Finds the threshold at which learned head masks make a given share of all heads sparse.

python -m jhybrid.head_masks --checkpoint runs/masks --sparse 0.5,0.7

DuoAttention's quantile and PruLong's final rounding: the heads of all layers together, those with
the smallest weights sparse. The threshold found is a setting of every command that reads the
checkpoint: --set model.blocks.*.mixer.route_threshold=0.37. Exit code 2: bad input, in one line.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jhybrid import commandline
from jhybrid.checkpoint import StoredParameters
from jhybrid.errors import UserError
from jhybrid.mixers.head_masks import eval_weight
from pallas_kernels.array_types import Float

LEARNED = (".mask.alpha", ".mask.log_alpha")


class Threshold(NamedTuple):
    route_threshold: float
    sparse: float  # the share of heads that do not exceed it: near what was asked


def weights(stored: StoredParameters) -> dict[str, Float[np.ndarray, "*L G"]]:
    """By path; UserError when the checkpoint has no learned masks."""
    paths = [path for path in stored.specs if path.endswith(LEARNED)]
    if not paths:
        raise UserError("--checkpoint: no head masks in it (mixer.route=alpha or hard_concrete)")
    found = {path: jnp.asarray(stored.read(path)) for path in paths}
    return {
        path: np.asarray(eval_weight(path.rpartition(".")[2], value))
        for path, value in found.items()
    }


def threshold(weights: Float[np.ndarray, "n"], sparse: float) -> Threshold:
    """Between the weights that leave the share `sparse` below it; equal weights stay together."""
    values = np.unique(weights)
    # any cut below the first value keeps all heads, one at the last value keeps none
    cuts = [values[0] / 2, *((values[1:] + values[:-1]) / 2)]
    cuts += [(values[-1] + 1) / 2] if values[-1] < 1 else []
    shares = [float(np.mean(weights <= cut)) for cut in cuts]
    best = int(np.argmin(np.abs(np.array(shares) - sparse)))
    return Threshold(float(cuts[best]), shares[best])


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="python -m jhybrid.head_masks", description="Cut head masks.")
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--sparse", default="0.5", help="shares of heads, comma-separated")
    parser.add_argument("--out", type=Path, help="also write JSON: weights and thresholds")
    return parser


def parse_shares(text: str) -> Sequence[float]:
    try:
        shares = [float(item) for item in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise UserError(f"--sparse {text}: must be numbers from 0 to 1")
    return shares


def main() -> int:
    arguments = parser().parse_args()
    shares = parse_shares(arguments.sparse)
    by_path = weights(StoredParameters(arguments.checkpoint))
    every = np.concatenate([value.ravel() for value in by_path.values()])
    found = [threshold(every, share) for share in shares]
    for asked, cut in zip(shares, found, strict=True):
        print(
            f"sparse {asked:g}: {cut.sparse:.3f} of {every.size} heads with "
            f"--set 'model.blocks.*.mixer.route_threshold={cut.route_threshold:.6g}'"
        )
    if arguments.out is not None:
        content = {
            "weights": {path: value.tolist() for path, value in by_path.items()},
            "thresholds": [cut._asdict() for cut in found],
        }
        commandline.write_text(arguments.out, json.dumps(content, indent=1) + "\n", "--out")
    return 0


if __name__ == "__main__":
    commandline.run(main)
