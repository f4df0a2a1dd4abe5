"""The static schedule of an op's TPU kernels, from libtpu's ahead-of-time compiler; no TPU needed.

    python -m pallas_kernels.tpu_schedule --op gated_delta_rule --target v6e

Compiles every benchmark case of the op's `cases.py` (tag `bench`) with `implementation=pallas_tpu`
for one core of the named chip, forward and forward+backward, and prints for each kernel the VLIW
bundles of a grid step (loops inside multiplied by their trips, which are printed), the grid's
steps, the share of the matrix unit's slots in use, spills and VMEM; for each pass the bundles per
unit of work, microseconds at the chip's clock, HBM temporaries, and two floors: operations over
the chip's rate and bytes over its bandwidth. Packages listed in the op's `tpu_peers.py` are
compiled in the same way where installed. XLA's own operations around the kernels are not counted.

It is a compiler's estimate of instruction issue, not a measured time: it knows nothing of waits
for memory. deltanet-tpu 0.3.0 takes 1.4 times as long on a v6e, by its published times, as its
bundles would at 1.75 GHz.

An op takes part with a `cases.py` that has `CASES`, each with `name`, `tags`, `shape`, `options`,
`draw(key, dtype) -> (differentiable, integer, cotangents)` and `work(dtype, backward) -> Work`.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.benchmark import OPS, Bound
from pallas_kernels.dispatch import Target
from pallas_kernels.tpu_compiler import (
    CHIPS,
    Chip,
    Kernel,
    compile_for,
    dump_to,
    libtpu_version,
    read_kernels,
    topology_devices,
)
from pallas_kernels.work import Work

NOTICE = (
    "Static estimates of libtpu's compiler, not measured times. "
    "Bundles are issue slots: waits for memory are not in them."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One pass of one implementation on one case."""

    case: str
    shape: str
    dtype: str
    target: str
    implementation: str
    backward: bool
    unit: str = ""
    bundles_per_unit: float | None = None
    microseconds: float | None = None
    flops_floor_us: float | None = None
    bytes_floor_us: float | None = None
    temporary_bytes: int | None = None
    kernels: tuple[Kernel, ...] = ()
    note: str = ""


def measure(
    function: Callable, arguments: Any, work: Work, chip_name: str, folder: str, row: Row
) -> Row:
    """`row` with the schedule of `function` on `arguments`; compiler errors become its note."""
    chip: Chip = CHIPS[chip_name]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        jaxpr, compiled = compile_for(chip_name, function, *arguments)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dataclasses.replace(row, note=f"does not compile: {lines[0][:300]}")
    kernels = tuple(read_kernels(folder, jaxpr))
    shutil.rmtree(folder, ignore_errors=True)
    bundles = sum(kernel.total for kernel in kernels)
    dynamic = [k.name for k in kernels if k.steps is None or any(x.trips is None for x in k.loops)]
    return dataclasses.replace(
        row,
        unit=work.unit,
        bundles_per_unit=bundles / work.units,
        microseconds=1e6 * bundles / chip.clock / chip.cores,
        flops_floor_us=1e6 * work.flops / chip.flops,
        bytes_floor_us=1e6 * work.bytes / chip.bandwidth,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        kernels=kernels,
        note=f"counts a data-dependent loop or grid once: {', '.join(dynamic)}" if dynamic else "",
    )


def report(row: Row) -> str:
    """The row and its kernels as text."""
    what = "forward+backward" if row.backward else "forward"
    lines = [f"{row.case} {row.shape} {row.dtype} {row.target} {row.implementation} {what}"]
    for kernel in row.kernels:
        used = kernel.units["MXU"] / kernel.capacity["MXU"]
        loops = ", ".join(f"{x.bundles} x {x.trips or '?'}" for x in kernel.loops if x.depth > 1)
        lines.append(
            f"    {kernel.name}: {kernel.bundles:.0f} bundles a step, {kernel.steps or '?'} steps, "
            f"MXU {used:.0%}, spill stores and fills {kernel.spills:.0f} a step, "
            f"VMEM {kernel.vmem_bytes / 2**20:.1f} MiB, loops inside (bundles x trips): "
            f"{loops or 'none'}"
        )
    if row.bundles_per_unit is not None:
        lines.append(
            f"  = {row.bundles_per_unit:.0f} bundles per {row.unit}, {row.microseconds:.0f} us at "
            f"the chip's clock; floors {row.flops_floor_us:.0f} us (operations), "
            f"{row.bytes_floor_us:.0f} us (bytes); HBM temporaries "
            f"{(row.temporary_bytes or 0) / 1e6:.0f} MB"
        )
    if row.note:
        lines.append(f"  {row.note}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--op", choices=OPS, required=True)
    parser.add_argument("--target", choices=CHIPS, action="append", required=True)
    parser.add_argument("--case", action="append", help="case name (repeat); default: tag bench")
    parser.add_argument("--dtype", action="append", help="default: bfloat16")
    parser.add_argument("--pass", choices=("forward", "backward"), dest="which", help="only one")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", help="write the rows and versions here")
    options = parser.parse_args(arguments)

    op = getattr(importlib.import_module(f"pallas_kernels.{options.op}"), options.op)
    table = importlib.import_module(f"pallas_kernels.{options.op}.api").IMPLEMENTATIONS
    if "pallas_tpu" not in table:
        parser.error(f"--op {options.op}: it has no pallas_tpu implementation")
    cases = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    names = [case.name for case in cases.CASES]
    if unknown := set(options.case or ()) - set(names):
        parser.error(f"--case {sorted(unknown)}: choose from {names}")
    chosen = [
        case
        for case in cases.CASES
        if (case.name in options.case if options.case else "bench" in case.tags)
    ]
    peers = {} if options.no_peers else _peers(options.op)

    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/schedules"
        dump_to(folder)
        try:
            devices = {name: topology_devices(CHIPS[name].topology)[0] for name in options.target}
        except RuntimeError as error:
            parser.error(f"--target: {str(error).splitlines()[0]}; needs libtpu, extra `tpu`")
        machine = {
            "jax": jax.__version__,
            "libtpu": libtpu_version(),
            "python": platform.python_version(),
            "command": "python -m pallas_kernels.tpu_schedule "
            + " ".join(arguments or sys.argv[1:]),
        }
        print(NOTICE, *(f"{name}: {value}" for name, value in machine.items()), sep="\n")
        rows = []
        for (target, device), case, dtype in itertools.product(
            devices.items(), chosen, options.dtype or ["bfloat16"]
        ):
            reason = table["pallas_tpu"].unsupported(
                case.problem(dtype), Target("tpu", device.device_kind)
            )
            runs = {"pallas_tpu": (Bound(op, case, "pallas_tpu"), reason)}
            runs |= {name: bind(case, dtype) for name, bind in peers.items()}
            shapes = jax.eval_shape(functools.partial(case.draw, dtype=dtype), jax.random.key(0))
            passes = {"forward": (False,), "backward": (True,)}.get(options.which, (0, 1))
            if getattr(case, "forward_only", False):
                passes = (False,)
            for (name, (bound, why_not)), backward in itertools.product(runs.items(), passes):
                row = Row(case.name, case.shape, dtype, target, name, bool(backward))
                if why_not is not None:
                    row = dataclasses.replace(row, note=why_not)
                else:
                    function = bound.forward_backward if backward else bound.forward
                    inputs = shapes if backward else shapes[:2]
                    work = case.work(dtype, bool(backward))
                    row = measure(function, inputs, work, target, folder, row)
                rows.append(row)
                print(report(row), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**machine, "rows": [dataclasses.asdict(x) for x in rows]}, file, indent=1)
    return rows


def _peers(op: str) -> dict[str, Callable]:
    """Name -> (case, dtype) -> (benchmark.Bound or the like, why not), of those installed."""
    name = f"pallas_kernels.{op}.tpu_peers"
    if importlib.util.find_spec(name) is None:
        return {}
    return importlib.import_module(name).installed()


if __name__ == "__main__":
    main()
