"""Rows of the model benchmark: as a table, as JSON, and from there again."""

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from jhybrid import commandline
from jhybrid.commandline import cell
from jhybrid.errors import UserError

TRANSFORMER = "softmax"  # the family that others are compared with


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One model in one use; `note` says why a number is missing."""

    name: str  # of the experiment, and what was varied in it
    parameters: int
    mode: str
    rows: int
    tokens: int  # of each row
    softmax_fraction: float | None = None  # of (chunk, head) pairs; None: nothing is routed
    ms: float | None = None  # of a step; of one token of every row in `decode`
    tokens_per_second: float | None = None
    mfu: float | None = None  # `train` only, formula in jhybrid.model.flops_per_token
    peak_bytes: int | None = None  # arguments, results and temporaries of the compiled program
    state_bytes: int | None = None  # of the decoding state, all rows
    note: str = ""


def table(rows: Sequence[Row]) -> str:
    """One line a row; its speed over that of the Transformer of `--families` in the same use."""
    transformer = {
        (row.mode, row.rows, row.tokens): row.tokens_per_second
        for row in rows
        if row.name == TRANSFORMER
    }
    lines = [
        f"{'model':<24} {'use':<8} {'shape':>10} {'softmax':>8} {'ms':>10} {'tokens/s':>11} "
        f"{'x softmax':>9} {'MFU':>6} {'peak GiB':>9} {'state MiB':>10}"
    ]
    for row in rows:
        shape = f"{row.rows}x{row.tokens}"
        speed, base = row.tokens_per_second, transformer.get((row.mode, row.rows, row.tokens))
        ratio = speed / base if speed and base else None
        lines.append(
            f"{row.name:<24} {row.mode:<8} {shape:>10} {cell(row.softmax_fraction, '8.3f')} "
            f"{cell(row.ms, '10.3f')} {cell(row.tokens_per_second, '11.0f')} "
            f"{cell(ratio, '9.2f')} {cell(row.mfu, '6.3f')} "
            f"{cell(_over(row.peak_bytes, 2**30), '9.2f')} "
            f"{cell(_over(row.state_bytes, 2**20), '10.1f')} {row.note}".rstrip()
        )
    return "\n".join(lines)


def _over(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def kept(path: Path | None, device: str) -> list[Row]:
    """The rows without a note of an earlier command's --json; none if it has not written it."""
    if path is None:
        raise UserError("--resume: --json says where the rows are")
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found["rows"]]
        made = (found["jax"], found["device"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {path}: these are no rows of this command") from None
    if made != (jax.__version__, device):
        raise UserError(f"--json {path}: its rows are of another device or JAX ({made[1]})")
    return [row for row in rows if not row.note]


def write(path: Path, rows: Sequence[Row], device: str) -> None:
    found = {
        "jax": jax.__version__,
        "device": device,
        "python": platform.python_version(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    commandline.write_text(path, json.dumps(found, indent=1) + "\n", "--json")
