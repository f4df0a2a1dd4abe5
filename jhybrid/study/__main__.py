"""Runs a study.

    python -m jhybrid.study --plan configs/studies/mini.py --workdir studies/mini

Run the same command again to go on; `--shard i/n` takes every n-th cell from the i-th on;
`--minutes m` stops at the first log, evaluation or cell after m minutes. The table and the report
are written at the end from all results the workdir holds, whoever made them, and with
`--report-only` without running anything. Exit codes: 0 everything of this shard is measured or
diverged, or it was stopped (SIGTERM, Ctrl-C, --minutes) with everything saved; 1 a run failed; 2
bad input, in one line on stderr.
"""

import argparse
import math
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

from absl import flags

from jhybrid import commandline
from jhybrid.checkpoint import write_whole
from jhybrid.errors import UserError
from jhybrid.study import report, table
from jhybrid.study.plan import Cell, Study
from jhybrid.study.runner import Runner
from jhybrid.study.together import Interrupted


def load_study(path: Path) -> Study:
    """The Study of a plan file."""
    if not path.is_file():
        raise UserError(f"--plan {path}: no such file")
    try:
        build = runpy.run_path(str(path)).get("study")
        if not callable(build):
            raise UserError(f"--plan {path}: it must define study() -> Study")
        study = build()
    except UserError:
        raise
    except Exception as error:  # the file is the user's program: whatever it raises is its fault
        raise UserError(f"--plan {path}: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise UserError(f"--plan {path}: study() must return a Study")
    return study


def shard(text: str) -> tuple[int, int]:
    """ "i/n": cells i, i + n, i + 2 n, ..."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I from 0 to N - 1")
    return int(found[1]), int(found[2])


def chosen(study: Study, names: str | None, part: tuple[int, int]) -> tuple[Cell, ...]:
    """The cells of `names`, or all, of which `part` is this process's."""
    cells = study.cells
    if names is not None:
        known = {cell.name: cell for cell in study.cells}
        for name in (wanted := names.split(",")):
            if name not in known:
                raise UserError(f"--cells {name}: unknown; known: {', '.join(known)}")
        cells = tuple(known[name] for name in wanted)
    index, count = part
    return cells[index::count]


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="python -m jhybrid.study", description="Run a study.")
    parser.add_argument("--plan", required=True, type=Path, help="file with study()")
    parser.add_argument("--workdir", type=Path, help="default: studies/<study name>")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="of the cells")
    parser.add_argument(
        "--minutes", type=commandline.minutes, help="stop after so many, with all saved"
    )
    parser.add_argument("--cells", help="only these, by name and comma, as gla_3-1,hgrn2_pure")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--report-only", action="store_true", help="train and measure nothing")
    parser.add_argument("--compile-cache", type=Path, help="folder of compiled programs")
    return parser


def main() -> int:
    began = time.monotonic()
    arguments = parser().parse_args()
    study = load_study(arguments.plan)
    cells = chosen(study, arguments.cells, arguments.shard)
    if arguments.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    commandline.use_compile_cache(arguments.compile_cache)
    commandline.draw_by_kernel()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: signals.append(received))
    limit = 60 * (arguments.minutes or math.inf)
    workdir = arguments.workdir or Path("studies") / study.name
    runner = Runner(
        study,
        workdir,
        announce=lambda line: print(line, flush=True),
        stop=lambda: bool(signals) or time.monotonic() - began > limit,
    )
    try:
        if not arguments.report_only:
            runner.run(cells)
    except Interrupted:
        print("stopped; the same command goes on from there")
    results = runner.results()
    rows = table.tidy(results)
    write_whole(workdir / "table.csv", table.to_csv(rows))
    write_whole(workdir / "table.json", table.to_json(rows))
    write_whole(workdir / "report.html", report.render(study, results))
    failed = [result["run"] for result in results if result["status"] == "failed"]
    print(f"{len(results)} of {len(study.cells) * len(study.seeds)} runs have a result; {workdir}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def prefer_short_compilation() -> None:
    """Tells XLA not to tune the kernels of a GPU: small models compile for longer than they train.

    Matrix products go to cuBLAS, which nobody has to compile. Flags that XLA_FLAGS names stay.
    """
    given = os.environ.get("XLA_FLAGS", "")
    ours = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "false"}
    ours = (f"--{name}={value}" for name, value in ours.items() if name not in given)
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()


if __name__ == "__main__":
    prefer_short_compilation()  # before anything starts a backend
    flags.FLAGS(sys.argv[:1])  # Grain reads absl flags, which have to be parsed
    commandline.run(main)
