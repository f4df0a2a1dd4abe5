"""Compiles a function for a TPU that is not here, and reads the schedule its compiler wrote down.

libtpu compiles ahead of time on any host. Asked to (`dump_to`), it leaves the final VLIW program
of every kernel as text: one line a bundle, loops marked by nesting, and the units each bundle uses.
Everything here is the compiler's word about a program, not a time that anybody measured.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What JAX calls a device: a chip, or one of the two halves of a TPU7x."""

    topology: str  # the smallest slice, as libtpu names it
    cores: int  # that share the parallel axes of a kernel's grid
    flops: float  # bf16, per second
    bandwidth: float  # of HBM, bytes per second
    clock: float  # Hz


# Rates: jax's own table (jax._src.tpu_info), there by core. Clocks: v5e and v5p from their rates,
# four arrays of 128 x 128 products a cycle; v6e and TPU7x likewise, two arrays of 256 x 256 that
# take two rows a cycle.
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip("v5e:2x2", 1, 197e12, 820e9, 1.50e9),
    "v5p": Chip("v5p:2x2x1", 2, 459e12, 2460e9, 1.75e9),
    "v6e": Chip("v6e:2x2", 1, 920e12, 1640e9, 1.75e9),
    "tpu7x": Chip("tpu7x:2x2x1", 1, 1155e12, 3700e9, 2.20e9),
}

# What libtpu would otherwise ask of a metadata server, log at length for want of an answer, or
# lock. The accelerator type has no bearing on the topology it compiles for.
LIBTPU_ALONE: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def topology_devices(topology: str) -> list[jax.Device]:
    """The devices of a TPU slice named as libtpu does ("v6e:2x2"), on a host without one.

    Raises RuntimeError when libtpu is missing or does not know the name.
    """
    for name, value in LIBTPU_ALONE.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(topology, "tpu").devices)


def libtpu_version() -> str:
    """The installed libtpu's, or "missing"."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def dump_to(folder: str | Path) -> None:
    """Makes libtpu write its schedules to `folder`; only before it is first loaded."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def compile_for(
    chip: str, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[Any, Any]:
    """(jaxpr, compiled) of jitted `function` for one core of `chip`, a name of `CHIPS`.

    `arguments` are trees of arrays or shapes, those at `donate` given away. While tracing,
    `jax.default_backend` answers "tpu": packages ask it whether to interpret their kernels.
    """
    device = topology_devices(CHIPS[chip].topology)[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with jax.set_mesh(mesh), _default_backend("tpu"), no_compilation_cache():
        traced = jax.jit(function, donate_argnums=donate).trace(*shapes)
        return traced.jaxpr, traced.lower(lowering_platforms=("tpu",)).compile()


@contextlib.contextmanager
def _default_backend(name: str) -> Iterator[None]:
    real = jax.default_backend
    jax.default_backend = lambda: name
    try:
        yield
    finally:
        jax.default_backend = real


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """For programs of other machines: JAX can write them to its cache, but not read them back."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once, when it first compiles
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel: the grid's is at depth 1. `trips` is None where it is not a constant."""

    depth: int
    trips: int | None
    bundles: int  # of one trip, without the loops inside


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One Pallas kernel of a compiled program."""

    name: str
    steps: int | None  # of the grid; None where the grid is not static
    bundles: float  # of one grid step, loops inside multiplied by their trips
    loops: tuple[Loop, ...]
    units: Mapping[str, float]  # unit or spill slot -> uses per bundle, weighted by trips
    capacity: Mapping[str, int]
    vmem_bytes: int

    @property
    def total(self) -> float:
        """Bundles of the whole grid."""
        return self.bundles * (self.steps or 1)

    @property
    def spills(self) -> float:
        """Spill stores and fills of one grid step, loops inside multiplied by their trips."""
        return self.bundles * (self.units["VSTORE:SPILL"] + self.units["VLOAD:FILL"])


_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(.*)")
_EXIT = re.compile(r"(%p\w+) = ([^;]*?) /\* loop exit test")
_TRIPS = re.compile(r"scmp\.\w+\.s32\.totalorder (?:\(\S+\), )?\S+, (\d+)$")
_VMEM = re.compile(r"#allocation\d+ \[shape = .*?space=vmem, size = (0x[0-9a-f]+)")


def read_loops(program: str) -> tuple[list[int], list[Loop]]:
    """For each bundle of a `final_bundles` text the index of its loop (-1 outside), and the loops.

    The exit test of a counted loop compares with its number of trips. A loop lasts to the branch
    on its exit test and the bundles of its depth after it: bundles before it may be marked with
    less depth, for holding only what the compiler moved up from behind the loop.
    """
    owners: list[int] = []
    depths: list[int] = []
    trips: list[int | None] = []
    tests: list[str] = []  # the predicate that ends the loop, then "" once it was branched on
    inside: list[int] = []
    for line in program.splitlines():
        match = _BUNDLE.match(line)
        if match:
            tag, nesting, body = match.groups()
            depth = nesting.count(">")
            if tag == "LB":
                inside = [*inside[: depth - 1], len(depths)]
                depths.append(depth)
                trips.append(None)
                tests.append("?")
            elif not body.startswith("}"):  # an empty bundle carries no nesting
                while len(inside) > depth and not tests[inside[-1]]:
                    inside.pop()
            owners.append(inside[-1] if inside else -1)
        if inside and (test := _EXIT.search(line)):
            predicate, comparison = test.groups()
            count = _TRIPS.search(comparison)
            trips[inside[-1]] = int(count.group(1)) if count else None
            tests[inside[-1]] = predicate
        for loop in inside:
            if f"sbr.rel (!{tests[loop]})" in line:
                tests[loop] = ""
    loops = [
        Loop(depth, count, owners.count(i))
        for i, (depth, count) in enumerate(zip(depths, trips, strict=True))
    ]
    return owners, loops


def read_utilisation(text: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of the units, capacity of each, and [bundles, units] of a utilisation text."""
    lines = text.splitlines()
    rows = [[int(x) for x in line.split()] for line in lines[4:] if line[:1].isdigit()]
    names = [name.strip() for name in lines[1].split(",")]
    return names, np.array(lines[2].split(), int), np.array(rows, int)


def weights(owners: Sequence[int], loops: Sequence[Loop]) -> np.ndarray:
    """How often each bundle runs in one step of the grid: outside the grid's loop never.

    A loop whose trips are not a constant counts once.
    """
    runs = []
    open_loops: list[int] = []
    for i, loop in enumerate(loops):
        open_loops = [*open_loops[: loop.depth - 1], i]
        runs.append(math.prod(loops[j].trips or 1 for j in open_loops[1:]))
    outside = 0 if loops else 1
    return np.array([runs[i] if i >= 0 else outside for i in owners], float)


def read_kernels(folder: str | Path, jaxpr: Any) -> list[Kernel]:
    """The Pallas kernels whose schedules are in `folder`, in the order they were compiled."""
    grids = dict(pallas_grids(jaxpr))
    kernels = []
    for path in sorted(Path(folder).glob("*-final_bundles.txt")):
        match = re.fullmatch(r"(\d+-(.+))-\d+-final_bundles\.txt", path.name)
        if match is None or "schedule-analysis" in path.name:
            continue
        stem, name = match.groups()
        # jax.vjp wraps the name a kernel was given: jvp_NAME_.1
        given = max((g for g in grids if g in name), key=len, default=None)
        if given is None:
            continue

        def other(ending: str, stem=stem) -> str:
            # Kernel names may hold brackets, which `glob` would read as its own.
            found = [p for p in Path(folder).iterdir() if p.name.startswith(f"{stem}-")]
            return max((p for p in found if p.name.endswith(ending)), key=str).read_text()

        owners, loops = read_loops(path.read_text())
        units, capacity, used = read_utilisation(
            other("final_hlo-static-per-bundle-utilization.txt")
        )
        if len(used) != len(owners):
            raise RuntimeError(f"{name}: {len(owners)} bundles, utilisation of {len(used)}")
        runs = weights(owners, loops)
        kernels.append(
            Kernel(
                name=name,
                steps=grids[given],
                bundles=float(runs.sum()),
                loops=tuple(loops),
                units=dict(zip(units, (runs @ used / runs.sum()).tolist(), strict=True)),
                capacity=dict(zip(units, capacity.tolist(), strict=True)),
                vmem_bytes=sum(int(size, 16) for size in _VMEM.findall(other("post-ra.txt"))),
            )
        )
    return kernels


def pallas_grids(jaxpr: Any) -> Iterator[tuple[str, int | None]]:
    """(name, grid steps) of every `pallas_call` under `jaxpr`; None for a dynamic grid."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "pallas_call":
            grid = eqn.params["grid_mapping"].grid
            static = all(isinstance(size, int) for size in grid)
            yield eqn.params["name"] or "pallas_call", math.prod(grid) if static else None
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from pallas_grids(value)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")
