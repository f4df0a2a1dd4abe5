"""How many heads of a head-routed model should attend sparsely, by task. Imports no JAX."""

from typing import Literal

from jhybrid.config_fields import frozen, require, require_positive


@frozen
class SparsityTarget:
    """The share of (layer, head) pairs that attend sparsely in a document of `task`.

    Nothing is asked for between `low` and `high`; equal bounds are the paper's single target.
    """

    task: str  # one of data.tasks
    low: float
    high: float

    def __post_init__(self):
        require(
            0 <= self.low <= self.high <= 1,
            f"target {self.task!r}: low={self.low} and high={self.high} must rise within [0, 1]",
        )


@frozen
class SparsityConfig:
    """Elastic Attention's training of head routers (arXiv 2601.17367, equation 8; as released).

    loss = L_LM + mean over tasks of mean over documents of (a_task |d| + b_task d^2), where d is
    how far the document's sparsity lies outside its task's bounds. The routers minimise it, the
    multipliers a and b maximise it by an AdamW of their own.
    """

    targets: tuple[SparsityTarget, ...]
    signed: bool = False  # a_task d instead of a_task |d|: the paper's text, not its runs
    multiplier_learning_rate: float = 1e-3  # at its peak; warm-up and decay as the optimizer's
    multiplier_start: float | None = None  # of every a and b; None: each drawn from U(0, 0.5)
    # Of the relaxed decision. cosine: from start to end over the first `temperature_decay` of the
    # steps. exponential: start * exp(-temperature_decay * step), no lower than end.
    temperature_start: float = 1.5
    temperature_end: float = 1.0
    temperature_decay: float = 0.6
    temperature_schedule: Literal["cosine", "exponential"] = "cosine"

    def __post_init__(self):
        names = [target.task for target in self.targets]
        require(len(names) > 0, "sparsity.targets must not be empty")
        require(len(set(names)) == len(names), f"sparsity.targets: {names} must be distinct")
        require_positive(
            "sparsity",
            self,
            "multiplier_learning_rate",
            "temperature_start",
            "temperature_end",
            "temperature_decay",
        )
        require(
            self.multiplier_start is None or self.multiplier_start >= 0,
            f"sparsity.multiplier_start={self.multiplier_start} must not be negative",
        )
