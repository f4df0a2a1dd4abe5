"""What an evaluation is asked to do, checked before anything is loaded."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jhybrid.errors import UserError
from jhybrid.evals.ruler import suite
from jhybrid.evals.ruler.task import SEED

SHORTEST, LONGEST = 2, 1 << 20


def default_cache() -> Path:
    return Path.home() / ".cache" / "jhybrid" / "ruler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    checkpoint: str
    tasks: tuple[str, ...]  # "perplexity", "ruler:NAME" and "lm:NAME"
    lengths: tuple[int, ...]
    num_samples: int
    out: Path
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    text: str | None = None
    limit: int | None = None  # documents of each lm: task; None: all
    include_path: str | None = None  # a folder of task files for lm_eval
    batch_size: int | None = None  # None: by length
    cache: Path | None = dataclasses.field(default_factory=default_cache)
    seed: int = SEED
    faithful: bool = True

    def __post_init__(self):
        for name in ("num_samples", "batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise UserError(f"--include-path {self.include_path}: no such folder")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must not be negative")
        for flag in ("essays", "squad", "hotpotqa", "text"):
            path = getattr(self, flag)
            if path is not None and not Path(path).is_file():
                raise UserError(f"--{flag} {path}: no such file")

    @property
    def ruler_tasks(self) -> list[str]:
        return self._of("ruler:")

    @property
    def harness_tasks(self) -> list[str]:
        return self._of("lm:")

    def _of(self, kind: str) -> list[str]:
        return [name.removeprefix(kind) for name in self.tasks if name.startswith(kind)]


def parse_tasks(text: str, *, with_squad: bool, with_hotpotqa: bool) -> tuple[str, ...]:
    """ "perplexity,ruler,ruler:vt" as single tasks, each once.

    `ruler` stands for the tasks that need no data and for the question sets that were given. Names
    after `lm:` are lm_eval's, which knows best.
    """
    given = {"qa_1": with_squad, "qa_2": with_hotpotqa}
    available = [name for name in suite.TASKS if given.get(name, True)]
    names: dict[str, None] = {}
    for item in _items(text, "--tasks"):
        if item == "ruler":
            names |= dict.fromkeys(f"ruler:{name}" for name in available)
        elif item.removeprefix("lm:") not in (item, ""):
            names[item] = None
        elif item == "perplexity" or item.removeprefix("ruler:") in available:
            names[item if item == "perplexity" else f"ruler:{item.removeprefix('ruler:')}"] = None
        elif (needed := suite.NEEDS.get(item.removeprefix("ruler:"))) is not None:
            raise UserError(f"--tasks {item}: needs {needed} FILE")
        else:
            known = ", ".join(
                ["perplexity", "ruler", *(f"ruler:{n}" for n in suite.TASKS), "lm:NAME"]
            )
            raise UserError(f"--tasks {item}: unknown task; known: {known}")
    return tuple(names)


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "1024,2048" as distinct integers in the order given."""
    return tuple(
        dict.fromkeys(parse_length(item, "--lengths") for item in _items(text, "--lengths"))
    )


def parse_length(item: str, flag: str) -> int:
    if not (item.isascii() and item.isdigit()) or not SHORTEST <= int(item) <= LONGEST:
        raise UserError(f"{flag} {item}: expected a whole number from {SHORTEST} to {LONGEST}")
    return int(item)


def parse_prompt(text: str) -> tuple[str, int, int]:
    """ "niah_single_1:1024:0" as task, length, sample."""
    task, _, rest = text.removeprefix("ruler:").partition(":")
    length, _, index = rest.partition(":")
    if task not in suite.TASKS or not (index.isascii() and index.isdigit()):
        raise UserError(f"--print-prompt {text}: expected TASK:LENGTH:SAMPLE, as vt:1024:0")
    return task, parse_length(length, "--print-prompt"), int(index)


def _items(text: str, flag: str) -> Sequence[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UserError(f"{flag}: nothing given")
    return items
