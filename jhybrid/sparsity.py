"""Training head routers towards a sparsity for each task: temperature, multipliers, penalty.

Elastic Attention, arXiv 2601.17367, equation 8, as its released code ran it. A document is named by
the row and the block in which it starts; everything by document is [B, N] with N blocks to a row.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jhybrid.mixers import Report
from jhybrid.sparsity_config import SparsityConfig
from pallas_kernels.array_types import Array, Float, Int

Multipliers = dict[str, Float[Array, "tasks"]]  # "linear" and "quadratic"


def temperature(config: SparsityConfig, steps: int) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    """Of the relaxed decision at each step 0, 1, ...

    With a the start, z the end and r the decay:
      cosine        z + (a - z) (1 + cos(pi n / N)) / 2 until step N = ceil(r steps), then z
      exponential   max(z, a exp(-r n))
    """
    start, end = config.temperature_start, config.temperature_end

    def at(step: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        if config.temperature_schedule == "exponential":
            return jnp.maximum(end, start * jnp.exp(-config.temperature_decay * step))
        last = math.ceil(config.temperature_decay * steps)
        turn = jnp.pi * jnp.minimum(step / max(last, 1), 1.0)
        return end + (start - end) * (1.0 + jnp.cos(turn)) / 2.0

    return at


def initial_multipliers(config: SparsityConfig, key: Array) -> Multipliers:
    shape = (2, len(config.targets))
    drawn = jax.random.uniform(key, shape, jnp.float32, 0.0, 0.5)
    if config.multiplier_start is not None:
        drawn = jnp.full(shape, config.multiplier_start, jnp.float32)
    return {"linear": drawn[0], "quadratic": drawn[1]}


def document_tasks(batch: Mapping[str, Int[Array, "B T"]], block_size: int) -> Int[Array, "B N"]:
    """The task of the document that starts in each block; -1 where none starts, or none asks."""
    first = {name: batch[name][:, ::block_size] for name in ("positions", "segment_ids", "task")}
    starts = (first["positions"] == 0) & (first["segment_ids"] >= 0)
    return jnp.where(starts, first["task"], -1)


def one_hot(tasks: Int[Array, "*n"], num_tasks: int) -> Float[Array, "*n tasks"]:
    """Zeros where the task is negative."""
    return jax.nn.one_hot(tasks, num_tasks, dtype=jnp.float32)


def document_weights(tasks: Int[Array, "B N"], num_tasks: int) -> Float[Array, "B N"]:
    """1 / (tasks present * documents of the task): a mean over tasks of means over documents."""
    member = one_hot(tasks, num_tasks)
    documents = member.sum((0, 1))
    present = jnp.maximum((documents > 0).sum(), 1)
    return member @ (1.0 / (present * jnp.maximum(documents, 1.0)))


def sparse_shares(reports: Mapping[str, Report]) -> Float[Array, "B N"]:
    """The share of (layer, head) pairs that attend sparsely in each document.

    Straight-through: the value of hard decisions, the gradient of relaxed ones.
    """
    gates = [report["gate"] for report in reports.values() if "gate" in report]
    return 1.0 - jnp.concatenate(gates, axis=2).mean(2)


def penalty(
    config: SparsityConfig,
    names: Sequence[str],
    shares: Float[Array, "B N"],
    tasks: Int[Array, "B N"],
    multipliers: Multipliers,
) -> Float[Array, "B N"]:
    """a |d| + b d^2 for each document with a task, d its distance from the task's bounds."""
    bounds = {target.task: (target.low, target.high) for target in config.targets}
    low, high = jnp.asarray([bounds[name] for name in names], jnp.float32).T
    member = one_hot(tasks, len(names))
    d = jax.nn.relu(shares - member @ high) - jax.nn.relu(member @ low - shares)
    linear = d if config.signed else jnp.abs(d)
    of_task = {name: member @ value for name, value in multipliers.items()}
    return of_task["linear"] * linear + of_task["quadratic"] * d**2


def sums_by_task(
    num_tasks: int,
    shares: Float[Array, "B N"],
    losses: Float[Array, "B T"],
    batch: Mapping[str, Array],
) -> dict[str, Float[Array, "tasks"]]:
    """What `by_task` averages; `batch` holds `tasks` of documents, `task` and `targets` of tokens.

    Sums over the parts of a batch add up to the whole batch's.
    """
    documents = one_hot(batch["tasks"], num_tasks)
    tokens = one_hot(batch["task"], num_tasks)
    return {
        "documents": documents.sum((0, 1)),
        "sparse": jnp.einsum("bn,bnk->k", shares, documents),
        "targets": jnp.einsum("bt,btk->k", batch["targets"] >= 0, tokens),
        "loss": jnp.einsum("bt,btk->k", losses, tokens),
    }


def by_task(
    names: Sequence[str], sums: Mapping[str, Array], multipliers: Multipliers
) -> dict[str, dict[str, Array]]:
    """What is logged of each task; NaN for the means of a task that a batch lacks."""
    means = {
        "documents": sums["documents"],
        "sparse": sums["sparse"] / sums["documents"],
        "loss": sums["loss"] / sums["targets"],
        **multipliers,
    }
    return {name: {key: value[i] for key, value in means.items()} for i, name in enumerate(names)}
