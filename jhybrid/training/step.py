"""The pure training and evaluation steps, compiled for a mesh with explicit shardings.

Nothing here reads a file, a clock or a global: `Program` is what the loop runs and what
`--dry-run` and `--plan` compile without running.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhybrid import routing, sparsity
from jhybrid.block_groups import find_groups
from jhybrid.config import ChunkRoutedConfig, Experiment, HeadRoutedConfig, ModelConfig
from jhybrid.losses import token_log_likelihoods
from jhybrid.mixers import Report
from jhybrid.model import HybridLM, training_context
from jhybrid.optimizer import adamw, ascent, learning_rate
from jhybrid.parameters import (
    flatten,
    matrix_paths,
    path_of,
    split_trainable,
    unflatten,
)
from jhybrid.sharding import batch_sharding, parameter_shardings
from pallas_kernels.array_types import Array, Float, Int, Shaped

BATCH_FIELDS = ("tokens", "targets", "segment_ids", "positions")
TASK_FIELDS = ("prompt", "task")  # of a batch besides, where the sparsity of heads is trained
STATISTICS = ("softmax_fraction", "score_margin")  # the entries of a mixer's report that are logged

NOTHING: Mapping[str, Any] = MappingProxyType({})

Batch = dict[str, Int[Array, "B T"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that changes from step to step; a batch iterator is the only other state."""

    step: Int[Array, ""]  # steps taken, skipped ones included
    params: dict[str, Array]  # trainable, by path
    frozen: dict[str, Array]  # never updated, no gradient, no optimizer state
    opt_state: optax.OptState
    multipliers: sparsity.Multipliers  # of the sparsity penalty; empty without one
    multiplier_state: optax.OptState
    rng: Array  # raw key data; step n uses fold_in(rng, n)
    skipped: Int[Array, ""]  # steps skipped for a non-finite loss or gradient
    skipped_in_row: Int[Array, ""]  # of which up to now


class Program:
    """The compiled functions of one experiment on one mesh.

    Attributes:
        state: abstract TrainState, shapes with shardings.
        batch: abstract Batch, shapes with shardings.
        init: (raw key data, loaded={}) -> TrainState; takes over loaded parameters (by path).
        train_step: (TrainState, Batch) -> (TrainState, metrics); donates the state.
        eval_step: (params, frozen, Batch) -> (sum of losses, number of targets).
    """

    def __init__(self, experiment: Experiment, mesh: Mesh):
        self.experiment = experiment
        self.mesh = mesh
        abstract = nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0)))
        self.graphdef, self.template = nnx.split(abstract, nnx.Param)
        self.schedule = learning_rate(experiment.optimizer, experiment.training.steps)
        self.optimizer = adamw(experiment.optimizer, self.schedule, matrix_paths(self.template))
        if experiment.sparsity is not None:
            rate = experiment.sparsity.multiplier_learning_rate
            climbing = dataclasses.replace(experiment.optimizer, learning_rate=rate)
            steps = experiment.training.steps
            self.multiplier_optimizer = ascent(climbing, learning_rate(climbing, steps))
            self.temperature = sparsity.temperature(experiment.sparsity, steps)

        replicated = NamedSharding(mesh, PartitionSpec())
        by_path = flatten(parameter_shardings(self.template, mesh))
        shapes = jax.eval_shape(self._init, jax.ShapeDtypeStruct((2,), jnp.uint32))
        # Moments are dicts by the same paths as the parameters; anything else is small.
        shardings = jax.tree_util.tree_map_with_path(
            lambda keys, _: by_path.get(path_of(keys), replicated), shapes
        )
        self.state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )
        rows = (experiment.data.batch_size, experiment.data.sequence_length)
        labels = () if experiment.sparsity is None else TASK_FIELDS
        self.batch = {
            name: jax.ShapeDtypeStruct(rows, jnp.int32, sharding=batch_sharding(mesh))
            for name in (*BATCH_FIELDS, *labels)
        }
        self._param_shardings = shardings.params
        batch_shardings = {name: x.sharding for name, x in self.batch.items()}
        self.init = jax.jit(self._init, out_shardings=shardings, donate_argnames="loaded")
        self.train_step = jax.jit(
            self._train_step,
            in_shardings=(shardings, batch_shardings),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        self.eval_step = jax.jit(
            self._eval_step,
            in_shardings=(shardings.params, shardings.frozen, batch_shardings),
            out_shardings=(replicated, replicated),
        )

    def _init(self, rng: Array, loaded: Mapping[str, Array] = NOTHING) -> TrainState:
        init_key, rng = jax.random.split(jax.random.wrap_key_data(rng))
        model = HybridLM(self.experiment.model, rngs=nnx.Rngs(init_key))
        leaves = flatten(nnx.state(model, nnx.Param)) | dict(loaded)
        settings = self.experiment.optimizer
        params, frozen = split_trainable(leaves, settings.trainable)
        if settings.frozen_dtype is not None:
            frozen = {path: leaf.astype(settings.frozen_dtype) for path, leaf in frozen.items()}
        multipliers, multiplier_state = {}, ()
        if self.experiment.sparsity is not None:
            key = jax.random.fold_in(init_key, 1)
            multipliers = sparsity.initial_multipliers(self.experiment.sparsity, key)
            multiplier_state = self.multiplier_optimizer.init(multipliers)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            step=zero,
            params=params,
            frozen=frozen,
            opt_state=self.optimizer.init(params),
            multipliers=multipliers,
            multiplier_state=multiplier_state,
            rng=jax.random.key_data(rng),
            skipped=zero,
            skipped_in_row=zero,
        )

    def _forward(
        self,
        params: dict,
        frozen: dict,
        batch: Batch,
        key: Array | None = None,
        temperature: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T"], dict[str, Report]]:
        """-log p of every target, 0 where there is none; what each mixer reports, by block."""
        model = self._model(params, frozen)
        context = dataclasses.replace(training_context(batch), rng=key, temperature=temperature)
        output = model(batch["tokens"], context)
        losses = -token_log_likelihoods(model, output.hidden, batch["targets"])
        return losses, output.reports

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[dict, dict, dict]:
        """The gradient of {params, multipliers} in fp32, the loss's parts, and statistics.

        Losses are means over the whole batch. Accumulation divides by the counts of the whole
        batch, not of its parts, so that parts with fewer targets (packing, answers only) weigh no
        more than in one big batch.
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        count = jnp.maximum(jnp.sum(batch["targets"] >= 0), 1).astype(jnp.float32)
        settings, names = self.experiment.sparsity, self.experiment.data.tasks
        temperature = None
        if settings is not None:
            temperature = self.temperature(state.step)
            tasks = sparsity.document_tasks(batch, routed_block_size(self.experiment.model))
            weights = sparsity.document_weights(tasks, len(names))
            batch = {**batch, "tasks": tasks, "weights": weights}

        def part_loss(trained: dict, part: Batch, key: Array) -> tuple[Float[Array, ""], tuple]:
            losses, reports = self._forward(trained["params"], state.frozen, part, key, temperature)
            total = losses.sum() / count
            sums: dict[str, Any] = {"loss": total}
            if settings is not None:
                shares = sparsity.sparse_shares(reports)
                multipliers = trained["multipliers"]
                each = sparsity.penalty(settings, names, shares, part["tasks"], multipliers)
                sums["penalty"] = (part["weights"] * each).sum()
                sums["tasks"] = sparsity.sums_by_task(len(names), shares, losses, part)
                total += sums["penalty"]
            return total, (sums, _statistics(reports))

        gradient = jax.grad(part_loss, has_aux=True)
        trained = {"params": state.params, "multipliers": state.multipliers}

        def add_part(total: dict, part_and_index: tuple) -> tuple[dict, tuple]:
            part, index = part_and_index
            grads, found = gradient(trained, part, jax.random.fold_in(key, index))
            total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
            shardings = self._param_shardings
            placed = jax.lax.with_sharding_constraint(total["params"], shardings)
            return {**total, "params": placed}, found

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
        parts = self.experiment.optimizer.accumulation_steps
        if parts == 1:
            grads, (sums, statistics) = add_part(zeros, (batch, 0))
        else:
            split = jax.tree.map(functools.partial(_split_rows, parts=parts), batch)
            grads, found = jax.lax.scan(add_part, zeros, (split, jnp.arange(parts)))
            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), found[0])
            statistics = jax.tree.map(lambda x: jnp.mean(x, axis=0), found[1])
        return grads, sums, statistics

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        grads, sums, statistics = self._gradients(state, batch)
        norm = optax.tree.norm(grads["params"])
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        updates, opt_state = self.optimizer.update(grads["params"], state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        params |= _next_score_biases(self.experiment.model, state.params, statistics)
        multipliers, multiplier_state = self._climb(state, grads["multipliers"])

        def keep_if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        skipped = jnp.where(finite, 0, 1).astype(jnp.int32)
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=keep_if_finite(params, state.params),
            opt_state=keep_if_finite(opt_state, state.opt_state),
            multipliers=keep_if_finite(multipliers, state.multipliers),
            multiplier_state=keep_if_finite(multiplier_state, state.multiplier_state),
            skipped=state.skipped + skipped,
            skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1).astype(jnp.int32),
        )
        metrics = {
            "loss": sums["loss"],
            "gradient_norm": norm,
            "learning_rate": self.schedule(state.step - state.skipped),
            "targets": jnp.sum(batch["targets"] >= 0),
            "skipped": new.skipped,
            "skipped_in_row": new.skipped_in_row,
            "routing": statistics,
        }
        if self.experiment.sparsity is not None:
            names = self.experiment.data.tasks
            metrics["sparsity"] = {
                "penalty": sums["penalty"],
                "temperature": self.temperature(state.step),
                "tasks": sparsity.by_task(names, sums["tasks"], state.multipliers),
            }
        return new, metrics

    def _climb(self, state: TrainState, grads: dict) -> tuple[dict, Any]:
        """The multipliers after a step up, no lower than 0, and their optimizer's state."""
        if self.experiment.sparsity is None:
            return state.multipliers, state.multiplier_state
        updates, climbing = self.multiplier_optimizer.update(
            grads, state.multiplier_state, state.multipliers
        )
        higher: Any = optax.apply_updates(state.multipliers, updates)
        return jax.tree.map(jax.nn.relu, higher), climbing

    def _eval_step(
        self, params: dict, frozen: dict, batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        parts = self.experiment.optimizer.accumulation_steps  # no more rows at once than training
        split = jax.tree.map(functools.partial(_split_rows, parts=parts), batch)
        totals = jax.lax.map(lambda part: self._forward(params, frozen, part)[0].sum(), split)
        return jnp.sum(totals), jnp.sum(batch["targets"] >= 0, dtype=jnp.float32)

    def model(self, state: TrainState) -> HybridLM:
        """The model of a state, which shares its arrays: they go with the next step."""
        return self._model(state.params, state.frozen)

    def _model(self, params: dict[str, Array], frozen: dict[str, Array]) -> HybridLM:
        return nnx.merge(self.graphdef, unflatten(self.template, params | frozen))

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """This process's rows of the batch as global arrays."""
        return {
            name: jax.make_array_from_process_local_data(like.sharding, batch[name])
            for name, like in self.batch.items()
        }

    def put_whole_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """A batch that every process holds whole, as global arrays."""
        return {
            name: jax.make_array_from_callback(
                batch[name].shape, like.sharding, batch[name].__getitem__
            )
            for name, like in self.batch.items()
        }


def routed_block_size(model: ModelConfig) -> int:
    """Tokens per block of the head-routed mixers, which all have the same."""
    mixers = (block.mixer for block in model.blocks)
    return next(mixer.block_size for mixer in mixers if isinstance(mixer, HeadRoutedConfig))


def _statistics(reports: Mapping[str, Report]) -> dict[str, Report]:
    """What is logged of the routing, by block."""
    found = {
        block: {name: report[name] for name in STATISTICS if name in report}
        for block, report in reports.items()
    }
    return {block: statistics for block, statistics in found.items() if statistics}


def _next_score_biases(
    model: ModelConfig, params: dict[str, Array], statistics: dict[str, dict[str, Array]]
) -> dict[str, Array]:
    """The biases that hold softmax budgets, by path, after a step with these statistics."""
    biases = {}
    for g, group in enumerate(find_groups(model.blocks)):
        for position, block in enumerate(group.pattern):
            path = f"groups.{g}.{position}.mixer.score_bias"
            if path not in params or not isinstance(block.mixer, ChunkRoutedConfig):
                continue
            assert block.mixer.softmax_budget is not None
            names = (f"blocks.{group.block(r, position)}" for r in range(group.repeats))
            fraction = jnp.stack([statistics[name]["softmax_fraction"] for name in names])
            bias = routing.next_bias(block.mixer.softmax_budget, params[path], fraction)
            biases[path] = bias.astype(params[path].dtype)
    return biases


def _split_rows(x: Shaped[Array, "B n"], parts: int) -> Shaped[Array, "P R n"]:
    """x in P = parts equal parts of R = B / P rows, for a scan over parts.

    Part i takes rows i, i + P, ...: every device keeps its own rows and nothing is moved.
    """
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
