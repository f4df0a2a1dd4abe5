"""Times every implementation of an op that runs on this machine, and checks it first.

    python -m pallas_kernels.benchmark --op gated_delta_rule --json out.json

For each case of the op's `cases.py` (tag `bench`, or `quick` on a CPU) it prints the forward and
forward+backward medians, the worst closeness of outputs and of gradients to the reference
(rms(out - ref) / rms(ref), on one row cut to `--gate-tokens` tokens, reference in fp32 or wider),
and the compiled memory of forward+backward at T, 2T and 4T; for cases with `memory_bounds` also
what is kept from forward to backward and the temporaries beside, with their bounds. An
implementation that is not close enough is not timed.

With `--peers` also the kernels of the op's `gpu_peers.py`, checked on what they compute, and with
`--parts` the op's own kernels one by one, in every shape of its `gpu_parts.py`. Cases of a decoding
step, whose output replaces an argument (`carried`) or must be there for the next step's
(`repeated`), are timed per step of a loop; those that are `forward_only` have no gradients.

Times are host clock over back-to-back calls of a compiled function, synchronised once per batch, so
they include launch gaps; the median is over batches.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.memory import Memory, compiled_bytes, describe, kept_bytes

OPS = (
    "gated_delta_rule",
    "gated_delta_step",
    "gated_linear_attention",
    "simple_linear_attention",
    "block_sparse_attention",
    "decode_attention",
)
_BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12}  # bytes per second, by the data sheets (SXM)


_STEPS = 64  # of a case that carries a state, in one timed call
_LONG_SECONDS = 5.0  # what takes longer is timed once


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One implementation on one case; None where it was not measured, `note` says why."""

    case: str
    shape: str
    dtype: str
    implementation: str
    closeness_outputs: float | None = None
    closeness_gradients: float | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    peak_bytes: tuple[int, ...] | None = None  # at T, 2T, 4T
    memory: Memory | None = None  # of forward+backward
    memory_bounds: Memory | None = None
    note: str = ""


class Bound:
    """An op with one implementation chosen: forward, and forward+backward, as jitted functions."""

    def __init__(self, op: Callable, case, implementation: str):
        def forward(arguments, integers):
            return op(**arguments, **integers, **case.options, implementation=implementation)

        def forward_backward(arguments, integers, cotangents):
            outputs, pullback = jax.vjp(lambda a: forward(a, integers), arguments)
            return outputs, pullback(cotangents)[0]

        self.forward = jax.jit(forward)
        self.forward_backward = jax.jit(forward_backward)


def forward_ms(bound: Bound, case, arguments, integers) -> float:
    """`median_ms` of the forward pass; of one of `_STEPS` steps, where the case is one of many."""
    carried = getattr(case, "carried", None)
    if (name := getattr(case, "repeated", None)) is not None:

        def repeat(arguments, integers):
            def again(_, outputs):
                # 0, but XLA does not know (it could be NaN), so no step leaves the loop
                zero = 0 * outputs[0].ravel()[0]
                late = jax.tree.map(lambda x: x + zero.astype(x.dtype), integers)
                x = arguments[name]
                return bound.forward({**arguments, name: x + zero.astype(x.dtype)}, late)

            return jax.lax.fori_loop(1, _STEPS, again, bound.forward(arguments, integers))

        many = jax.jit(repeat)
        return median_ms(lambda: many(arguments, integers)) / _STEPS
    if carried is None:
        return median_ms(lambda: bound.forward(arguments, integers))

    def steps(arguments):
        def step(_, carry):
            *outputs, state = bound.forward({**arguments, carried: carry[1]}, integers)
            return outputs, state

        *outputs, state = bound.forward(arguments, integers)
        return jax.lax.fori_loop(1, _STEPS, step, (outputs, state))

    loop = jax.jit(steps)
    return median_ms(lambda: loop(arguments)) / _STEPS


def held_bytes(op: Callable, case, dtype: str, implementation: str) -> tuple[int, Memory | None]:
    """Arguments, results and temporaries of compiled forward+backward, of the forward pass where
    there is no other; and of both passes what is kept between them. Nothing is run."""
    shapes = jax.eval_shape(lambda key: case.draw(key, dtype), jax.random.key(0))
    bound = Bound(op, case, implementation)
    if _forward_only(case):
        return compiled_bytes(bound.forward.lower(*shapes[:2]).compile())[0], None
    peak, temporaries = compiled_bytes(bound.forward_backward.lower(*shapes).compile())
    kept, own = kept_bytes(lambda arguments: bound.forward(arguments, shapes[1]), shapes[0])
    return peak, Memory(kept, max(0, temporaries - own))


def _forward_only(case) -> bool:
    return getattr(case, "forward_only", False)


def closeness(op: Callable, case, dtype: str, implementation: str) -> dict[str, float]:
    """rms(out - ref) / rms(ref) of every output and gradient against the reference in fp32."""
    arguments, integers, cotangents = case.draw(jax.random.key(1), dtype)

    def run(name, arguments, cotangents):
        bound = Bound(op, case, name)
        if _forward_only(case):
            return bound.forward(arguments, integers), {}
        return bound.forward_backward(arguments, integers, cotangents)

    def widen(x):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    actual = run(implementation, arguments, cotangents)
    expected = run("reference", *jax.tree.map(widen, (arguments, cotangents)))

    def ratio(x, y):
        x, y = widen(x), widen(y)
        error, size = jnp.sqrt(jnp.mean((x - y) ** 2)), jnp.sqrt(jnp.mean(y**2))
        return float(jnp.where(size > 0, error / size, error))

    outputs, gradients = jax.tree.map(ratio, actual, expected)
    return dict(zip(case.outputs, outputs, strict=True)) | {
        f"d{name}": x for name, x in gradients.items()
    }


def median_ms(run: Callable[[], Any], batches: int = 7, batch_seconds: float = 0.05) -> float:
    """Median over batches of the mean time of one call; the first calls compile and warm up.

    What takes longer than `_LONG_SECONDS` is timed once, on its second call.
    """
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - start
    if once > _LONG_SECONDS:
        return 1e3 * once
    calls = max(1, min(100, int(batch_seconds / once)))
    batches = batches if once < 1 else 3
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def measure(op, case, dtype, implementation, accepted, *, gate_tokens, memory) -> Row:
    """The row of one implementation on one case; checks closeness and memory before timing."""
    row = Row(case.name, case.shape, dtype, implementation)
    ratios = closeness(op, case.cut(gate_tokens), dtype, implementation)
    row = dataclasses.replace(
        row,
        closeness_outputs=max(ratios[name] for name in case.outputs),
        closeness_gradients=max(
            (x for name, x in ratios.items() if name not in case.outputs), default=None
        ),
    )
    far = [f"{name} {x:.1e} > {accepted[name]:g}" for name, x in ratios.items()]
    far = [
        text for text, (name, x) in zip(far, ratios.items(), strict=True) if not x <= accepted[name]
    ]
    if far:
        return dataclasses.replace(row, note=f"not close to the reference: {', '.join(far)}")
    peak, held = held_bytes(op, case, dtype, implementation)
    peaks = [peak]
    if held is not None and (bounds := getattr(case, "memory_bounds", None)) is not None:
        row = dataclasses.replace(row, memory=held, memory_bounds=bounds(dtype))
    available = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if available and peaks[0] > available:
        needs = f"does not fit: needs {peaks[0] / 2**30:.1f} GiB of {available / 2**30:.1f}"
        return dataclasses.replace(row, peak_bytes=tuple(peaks), note=needs)
    if memory:
        peaks += [held_bytes(op, case.times(n), dtype, implementation)[0] for n in (2, 4)]
    arguments, integers, cotangents = case.draw(jax.random.key(0), dtype)
    bound = Bound(op, case, implementation)
    row = dataclasses.replace(
        row, peak_bytes=tuple(peaks), forward_ms=forward_ms(bound, case, arguments, integers)
    )
    if _forward_only(case):
        return row
    both = median_ms(lambda: bound.forward_backward(arguments, integers, cotangents))
    return dataclasses.replace(row, forward_backward_ms=both)


def rates(case, dtype: str, row: Row) -> Row:
    """The row with its rates in the note, for cases that count their work: GB/s of a decoding step,
    which memory bounds, and their share of the device's, TFLOP/s of both passes of others."""
    if row.forward_ms is None or not hasattr(case, "work"):
        return row
    if hasattr(case, "carried") or hasattr(case, "repeated"):
        moved = 1e3 * case.work(dtype, False).bytes / row.forward_ms
        kind = dispatch.Target.current().device_kind
        shares = (
            f"{moved / bandwidth:.0%} of {bandwidth / 1e12:g} TB/s"
            for chip, bandwidth in _BANDWIDTH.items()
            if chip in kind
        )
        note = " ".join(filter(None, (f"{moved / 1e9:.0f} GB/s", *shares, row.note)))
        return dataclasses.replace(row, note=note)
    times = ((row.forward_ms, False), (row.forward_backward_ms, True))
    found = [
        f"{case.work(dtype, backward).flops / ms / 1e9:.0f}"
        for ms, backward in times
        if ms is not None
    ]
    note = " ".join(filter(None, (f"{' / '.join(found)} TFLOP/s", row.note)))
    return dataclasses.replace(row, note=note)


def measure_peer(name: str, peers, case, dtype: str, gate_tokens: int) -> Row:
    """The row of another package's kernel; closeness is that of o to the peer's own reference."""
    row = Row(case.name, case.shape, dtype, name)
    peer, reason = peers.PEERS[name](case)
    if peer is None:
        return dataclasses.replace(row, note=reason)
    arguments, _, _ = case.cut(gate_tokens).draw(jax.random.key(1), dtype)
    expected = peers.exact(arguments)
    error = peer.forward(arguments).astype(jnp.float32) - expected
    ratio = float(jnp.sqrt(jnp.mean(error**2) / jnp.mean(expected**2)))
    row = dataclasses.replace(row, closeness_outputs=ratio)
    if not ratio <= 1e-2:
        return dataclasses.replace(row, note="not close to its reference")
    arguments, _, (do, *_) = case.draw(jax.random.key(0), dtype)
    forward = median_ms(lambda: peer.forward(arguments))
    row = dataclasses.replace(row, forward_ms=forward, note=peers.NOTE)
    if peer.forward_backward is None:
        return row

    def with_backward():
        both = median_ms(lambda: peer.forward_backward(arguments, do))
        return dataclasses.replace(row, forward_backward_ms=both)

    return or_reason(row, with_backward)


def comparisons(cases, rows: list[Row]) -> list[str]:
    """A line for every row whose case names another to stand `beside`, if both were timed."""
    timed = {
        (row.case, row.dtype, row.implementation): (row.forward_ms, row.forward_backward_ms)
        for row in rows
        if row.forward_ms is not None and row.forward_backward_ms is not None
    }
    lines = []
    for (name, dtype, implementation), times in timed.items():
        beside = str(getattr(cases.get(name), "beside", None))
        if others := timed.get((beside, dtype, implementation)):
            forward, both = (x / y for x, y in zip(times, others, strict=True))
            lines.append(
                f"{name} takes the time of {beside} times {forward:.2f} forward, {both:.2f} "
                f"forward+backward ({implementation}, {dtype})"
            )
    return lines


def measure_parts(parts, case, dtype: str) -> list[Row]:
    """A row for each kernel and shape; one that does not compile or run leaves its reason."""
    rows = []
    for label, call in parts.parts(case, dtype):
        row = Row(case.name, case.shape, dtype, label)
        timed = functools.partial(median_ms, call)
        rows.append(
            or_reason(
                row, lambda row=row, timed=timed: dataclasses.replace(row, forward_ms=timed())
            )
        )
        print(_table_line(rows[-1]), flush=True)
    return rows


def or_reason(row: Row, measured: Callable[[], Row]) -> Row:
    """What was measured; where it does not compile or run, the row with the reason."""
    try:
        return measured()
    except Exception as error:  # whatever it is, the rest is still to be timed
        return dataclasses.replace(row, note=(str(error) or repr(error)).splitlines()[0][:200])


def _optional(op: str, module: str) -> Any:
    """A module of the op's package, None where it has none."""
    name = f"pallas_kernels.{op}.{module}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _table_line(row: Row) -> str:
    def number(x, form):
        return "-" if x is None else format(x, form)

    peaks = " ".join(f"{x / 2**20:.0f}" for x in row.peak_bytes or ())
    held = ""
    if row.memory is not None and row.memory_bounds is not None:
        held = f"\n    {describe(row.memory, row.memory_bounds)}"
    return (
        f"{row.case:22} {row.shape:34} {row.dtype:9} {row.implementation:20} "
        f"{number(row.closeness_outputs, '9.1e'):>9} {number(row.closeness_gradients, '9.1e'):>9} "
        f"{number(row.forward_ms, '9.3f'):>9} {number(row.forward_backward_ms, '9.3f'):>9} "
        f" {peaks or '-'}  {row.note}{held}"
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--op", choices=OPS, required=True)
    parser.add_argument("--case", action="append", help="case name (repeat); default by tag")
    parser.add_argument("--tag", help="`bench`, or `quick` on a CPU, by default")
    parser.add_argument("--implementation", action="append", help="default: all that run here")
    parser.add_argument("--dtype", action="append", help="default: bfloat16")
    parser.add_argument("--gate-tokens", type=int, default=2048)
    parser.add_argument("--no-memory", action="store_true", help="skip compiling 2T and 4T")
    parser.add_argument("--peers", action="store_true", help="time other packages' kernels too")
    parser.add_argument("--parts", action="store_true", help="time our kernels one by one too")
    parser.add_argument("--json", help="write the rows and versions here")
    options = parser.parse_args(arguments)

    if options.json:
        try:
            open(options.json, "a").close()
        except OSError as error:
            parser.error(f"--json {options.json}: {error.strerror}")

    op = getattr(importlib.import_module(f"pallas_kernels.{options.op}"), options.op)
    table = importlib.import_module(f"pallas_kernels.{options.op}.api").IMPLEMENTATIONS
    cases = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    target = dispatch.Target.current()
    tag = options.tag or ("quick" if target.platform == "cpu" else "bench")
    chosen = [case for case in cases.CASES if tag in case.tags]
    if options.case:
        unknown = set(options.case) - {case.name for case in cases.CASES}
        if unknown:
            parser.error(f"--case {sorted(unknown)}: choose from {[c.name for c in cases.CASES]}")
        chosen = [case for case in cases.CASES if case.name in options.case]

    peers, parts = (
        _optional(options.op, f"gpu_{name}") if given else None
        for name, given in (("peers", options.peers), ("parts", options.parts))
    )
    for name, given, found in (("peers", options.peers, peers), ("parts", options.parts, parts)):
        if given and found is None:
            parser.error(f"--{name}: {options.op} has none")

    machine = {
        "device": target.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": "python -m pallas_kernels.benchmark " + " ".join(arguments or sys.argv[1:]),
    }
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n")
    print(
        f"{'case':22} {'shape':34} {'dtype':9} {'runs':20} {'close o':>9} {'close d':>9} "
        f"{'fwd ms':>9} {'f+b ms':>9}  MiB at T 2T 4T"
    )
    rows = []
    for case in chosen:
        for dtype in options.dtype or ["bfloat16"]:
            for name in options.implementation or table:
                reason = table[name].unsupported(case.problem(dtype), target)
                if reason is None:
                    row = measure(
                        op,
                        case,
                        dtype,
                        name,
                        cases.accepted(dtype),
                        gate_tokens=options.gate_tokens,
                        memory=not options.no_memory,
                    )
                else:
                    row = Row(case.name, case.shape, dtype, name, note=reason)
                row = rates(case, dtype, row)
                rows.append(row)
                print(_table_line(row), flush=True)
            for name in peers.PEERS if peers else ():
                timed = functools.partial(
                    measure_peer, name, peers, case, dtype, options.gate_tokens
                )
                rows.append(or_reason(Row(case.name, case.shape, dtype, name), timed))
                print(_table_line(rows[-1]), flush=True)
            if parts:
                rows += measure_parts(parts, case, dtype)
    for line in comparisons({case.name: case for case in chosen}, rows):
        print(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {**machine, "rows": [dataclasses.asdict(row) for row in rows]}, file, indent=1
            )
    return rows


if __name__ == "__main__":
    main()
