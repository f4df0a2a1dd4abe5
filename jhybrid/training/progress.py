"""What a person sees of a run: a progress bar on a terminal, plain lines anywhere else."""

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def duration(seconds: float) -> str:
    """Seconds as 45s, 2m05s or 3h20m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


class Reporter:
    """Shows loss, tokens/s, MFU and the time left; says nothing when not `enabled`."""

    def __init__(self, steps: int, first_step: int, *, enabled: bool, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._steps = steps
        self._enabled = enabled
        self._bar: Progress | None = None
        if enabled and self._stream.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(
                "train", total=steps, completed=first_step, numbers="compiling"
            )
            self._bar.start()

    def say(self, message: str) -> None:
        """One line that stays."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(message, highlight=False, markup=False)
        else:
            print(message, file=self._stream, flush=True)

    def warn(self, message: str) -> None:
        """One line on stderr."""
        if self._enabled:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        mfu: float | None,
        seconds_left: float,
    ) -> None:
        utilization = "-" if mfu is None else f"{mfu:.1%}"
        numbers = (
            f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  MFU {utilization}  "
            f"ETA {duration(seconds_left)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        else:
            self.say(f"step {step}/{self._steps}  {numbers}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
