"""What every command line shares: one-line errors, config files, the cache of compiled programs."""

import argparse
import math
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from jhybrid.config import Experiment
from jhybrid.errors import UserError
from jhybrid.serialization import override
from pallas_kernels.dispatch import UnsupportedError


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line on stderr, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def positive(text: str) -> int:
    """An argument type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def rows_and_tokens(text: str) -> tuple[int, int]:
    """ "8x4096" as (rows, tokens)."""
    rows, cross, tokens = text.partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows x tokens, as 8x4096")
    return positive(rows), positive(tokens)


def minutes(text: str) -> float:
    """An argument type: a time above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of minutes above 0")
    return found


def load_config(path: str, assignments: Sequence[str] = ()) -> Experiment:
    """The Experiment of a Python config file after its "a.b=c" overrides."""
    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file")
    try:
        build = runpy.run_path(path).get("config")
        if not callable(build):
            raise UserError(f"--config {path}: it must define config() -> Experiment")
        experiment = build()
    except UserError:
        raise
    except Exception as error:  # the file is the user's program: whatever it raises is its fault
        raise UserError(f"--config {path}: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise UserError(f"--config {path}: config() must return an Experiment")
    return override(experiment, assignments)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """--set a.b=c, repeated, for commands that read a checkpoint."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        help="change the checkpoint's config, as model.blocks.*.mixer.kv_capacity=0.3",
    )


def cell(value: float | None, form: str) -> str:
    """A number of a table, formatted; a dash as wide as `form` says where there is none."""
    return f"{value:>{form}}" if value is not None else "-".rjust(int(form.split(".")[0]))


def read_text(path: Path, flag: str) -> str:
    """The whole of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8 text") from None


def write_text(path: Path, text: str, flag: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def use_compile_cache(folder: Path | None) -> None:
    """Keeps compiled programs in `folder`; default: where JAX was told to, else ~/.cache."""
    if folder is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(folder or cache / "jhybrid" / "compiled"))


def draw_by_kernel() -> None:
    """Random numbers of a GPU by a ready kernel: the same, but not unrolled wherever one is drawn.

    For programs that are compiled more often than they draw.
    """
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)


def run(main: Callable[[], int]) -> NoReturn:
    """Exits with what `main` returns; bad input becomes one line on stderr and status 2."""
    try:
        status = main()
    except (UserError, UnsupportedError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    sys.exit(status)
