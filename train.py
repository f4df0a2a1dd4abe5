"""Trains the model of a config file.

    python train.py --config configs/default.py --set training.steps=200 --workdir runs/default

Run the same command again to go on from the last checkpoint. Exit codes: 0 finished, or stopped by
SIGTERM or Ctrl-C with everything saved; 1 the run failed; 2 bad input, in one line on stderr.
"""

import argparse
import os
import sys
from pathlib import Path

import jax
from absl import flags

from jhybrid import commandline
from jhybrid.training import distributed, loop, plan


def _window(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected START:STOP, two rising step numbers")
    return int(start), int(stop)


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="train.py", description="Train the model of a config file.")
    parser.add_argument("--config", default="configs/default.py", help="file with config()")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="changes")
    parser.add_argument("--workdir", type=Path, help="default: runs/<config name>")
    parser.add_argument("--resume", action="store_true", help="fail if there is no checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="compile, report, do not train")
    parser.add_argument("--plan", metavar="TOPOLOGY", help="compile for a TPU slice, as v5e:2x2")
    parser.add_argument("--profile", type=_window, metavar="START:STOP", help="trace these steps")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of a multi-process run")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--compile-cache", type=Path, help="folder of compiled programs")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    experiment = commandline.load_config(arguments.config, arguments.changes)
    commandline.use_compile_cache(arguments.compile_cache)
    if arguments.plan is not None:
        jax.config.update("jax_platforms", "cpu")  # libtpu compiles; it must not look for a TPU
        print(*plan.plan_tpu(experiment, arguments.plan).lines(), sep="\n")
        return 0
    distributed.initialize(
        os.environ, arguments.coordinator, arguments.num_processes, arguments.process_id
    )
    if jax.device_count() == 1:  # several would each draw all of what is divided among them
        commandline.draw_by_kernel()
    if arguments.dry_run:
        print(*plan.plan_here(experiment).lines(), sep="\n")
        return 0
    workdir = arguments.workdir or Path("runs") / experiment.name
    options = loop.Options(workdir=workdir, resume=arguments.resume, profile=arguments.profile)
    try:
        loop.run(experiment, options)
    except loop.TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])  # Grain's worker processes read absl flags, which have to be parsed
    commandline.run(main)
