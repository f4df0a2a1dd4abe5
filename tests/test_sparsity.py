"""The sparsity objective: temperature, whose documents count how much, penalty and multipliers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from jhybrid import sparsity
from jhybrid.config import OptimizerConfig, SparsityConfig, SparsityTarget
from jhybrid.errors import UserError
from jhybrid.optimizer import ascent, learning_rate

NAMES = ("qa", "code", "prose")
CONFIG = SparsityConfig(
    targets=(
        SparsityTarget(task="prose", low=0.2, high=0.4),
        SparsityTarget(task="qa", low=0.6, high=0.6),
        SparsityTarget(task="code", low=1.0, high=1.0),
    )
)
MULTIPLIERS = {"linear": jnp.array([0.1, 0.2, 0.3]), "quadratic": jnp.array([0.5, 0.6, 0.7])}


def test_the_temperature_falls_as_it_did_in_the_release():
    at = sparsity.temperature(CONFIG, 300)
    assert [float(at(step)) for step in (0, 90, 180, 299)] == pytest.approx([1.5, 1.25, 1.0, 1.0])
    falling = [float(at(step)) for step in range(181)]
    assert falling == sorted(falling, reverse=True)


def test_the_papers_own_temperature_falls_within_a_step_or_two():
    at = sparsity.temperature(dataclasses.replace(CONFIG, temperature_schedule="exponential"), 300)
    assert [float(at(step)) for step in range(3)] == pytest.approx([1.5, 1.0, 1.0])


def test_every_task_weighs_the_same_and_within_it_every_document():
    tasks = jnp.array([[0, -1, 0], [2, -1, 0]])
    np.testing.assert_allclose(
        sparsity.document_weights(tasks, 3), [[1 / 6, 0, 1 / 6], [1 / 2, 0, 1 / 6]], rtol=1e-6
    )
    assert not sparsity.document_weights(jnp.full((2, 3), -1), 3).any()


def test_a_document_has_its_task_in_the_block_where_it_starts():
    ids = np.repeat([[0, 0, 1, -1], [0, 1, 1, 2]], 4, axis=1)
    positions = np.where(ids >= 0, np.tile(np.arange(16), (2, 1)), 0)
    positions[0, 8:12] = np.arange(4)
    positions[1, 4:12], positions[1, 12:] = np.arange(8), np.arange(4)
    task = np.select([ids == 0, ids == 1, ids == 2], [2, -1, 1], -1)
    batch = {"positions": positions, "segment_ids": ids, "task": task}
    found = sparsity.document_tasks(batch, 4)
    np.testing.assert_array_equal(found, [[2, -1, -1, -1], [2, -1, -1, 1]])


def test_the_penalty_is_zero_within_the_bounds_and_grows_on_both_sides():
    shares = jnp.array([[0.5, 0.9, 0.3, 0.1, 0.7]])
    tasks = jnp.array([[0, 1, 2, 2, 0]])
    d = np.array([-0.1, -0.1, 0.0, -0.1, 0.1])
    a, b = np.array([0.1, 0.2, 0.3, 0.3, 0.1]), np.array([0.5, 0.6, 0.7, 0.7, 0.5])
    found = sparsity.penalty(CONFIG, NAMES, shares, tasks, MULTIPLIERS)
    assert_close(found[0], a * np.abs(d) + b * d**2, 1e-5)
    signed = dataclasses.replace(CONFIG, signed=True)
    found = sparsity.penalty(signed, NAMES, shares, tasks, MULTIPLIERS)
    assert_close(found[0], a * d + b * d**2, 1e-5)


def test_documents_without_a_task_are_not_penalised():
    found = sparsity.penalty(CONFIG, NAMES, jnp.zeros((1, 2)), jnp.array([[-1, 1]]), MULTIPLIERS)
    assert found[0, 0] == 0 and found[0, 1] > 0


def test_shares_are_those_of_hard_decisions_with_the_gradient_of_the_relaxed():
    def shares(p):  # as HeadRouted reports
        gate = (p > 0.5) + (p - jax.lax.stop_gradient(p))
        reports = {"blocks.0": {"gate": gate[..., :2]}, "blocks.1": {}}
        return sparsity.sparse_shares({**reports, "blocks.2": {"gate": gate[..., 2:]}})

    p = jnp.array([[[0.9, 0.1, 0.2], [0.7, 0.8, 0.6]]])
    np.testing.assert_allclose(shares(p), [[2 / 3, 0.0]], atol=1e-6)
    gradient = jax.grad(lambda p: shares(p).sum())(p)
    np.testing.assert_allclose(gradient, jnp.full_like(p, -1 / 3), rtol=1e-6)


def climb(gradients, steps=300):
    config = OptimizerConfig(
        learning_rate=1e-3, warmup_steps=60, final_fraction=1e-7, weight_decay=0.0
    )
    optimizer = ascent(config, learning_rate(config, steps))
    values = [jnp.float32(0.25)]
    state = optimizer.init(values[0])
    for gradient in gradients:
        update, state = optimizer.update(jnp.float32(gradient), state, values[-1])
        values.append(values[-1] + update)
    return np.array(values)


def test_multipliers_only_rise_and_by_no_more_than_the_sum_of_rates():
    violations = 0.5 * 0.99 ** np.arange(300)  # |d|, shrinking as the routers learn
    values = climb(violations)
    assert np.all(np.diff(values) >= 0)
    assert 0.1 < values[-1] - values[0] <= 0.1501


def test_the_multipliers_weight_decay_pulls_towards_zero():
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1)
    optimizer = ascent(config, lambda count: 1e-3)
    update, _ = optimizer.update(jnp.float32(0.0), optimizer.init(jnp.float32(1)), jnp.float32(0.5))
    assert float(update) == pytest.approx(-1e-3 * 0.1 * 0.5)


def test_multipliers_start_within_the_published_range_or_where_they_are_told():
    drawn = sparsity.initial_multipliers(CONFIG, jax.random.key(0))
    both = np.concatenate([drawn["linear"], drawn["quadratic"]])
    assert both.shape == (6,) and len(set(both.tolist())) == 6
    assert np.all((both >= 0) & (both < 0.5))
    told = dataclasses.replace(CONFIG, multiplier_start=0.25)
    told = sparsity.initial_multipliers(told, jax.random.key(0))
    assert all(np.all(value == 0.25) for value in told.values())


def test_sums_by_task_of_parts_add_up_and_a_task_without_documents_has_no_mean():
    rng = np.random.default_rng(0)
    shares, losses = rng.random((4, 2)), rng.random((4, 8))
    batch = {
        "tasks": np.array([[0, -1], [1, 0], [0, -1], [1, 1]]),
        "task": np.repeat([[0, 0], [1, 0], [0, -1], [1, 1]], 4, axis=1),
        "targets": np.where(rng.random((4, 8)) < 0.5, 1, -1),
    }
    losses = np.where(batch["targets"] >= 0, losses, 0)
    whole = sparsity.sums_by_task(3, shares, losses, batch)
    halves = [
        sparsity.sums_by_task(3, shares[i], losses[i], {k: v[i] for k, v in batch.items()})
        for i in (slice(0, 2), slice(2, 4))
    ]
    for name, value in whole.items():
        assert_close(sum(half[name] for half in halves), value, 1e-6, name)
    found = sparsity.by_task(NAMES, whole, MULTIPLIERS)
    assert float(found["qa"]["sparse"]) == pytest.approx(shares[[0, 1, 2], [0, 1, 0]].mean())
    mine = (batch["task"] == 1) & (batch["targets"] >= 0)
    assert float(found["code"]["loss"]) == pytest.approx(losses[mine].mean())
    assert np.isnan(found["prose"]["sparse"]) and found["prose"]["documents"] == 0
    assert float(found["prose"]["linear"]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SparsityTarget(task="qa", low=0.7, high=0.6), "low=0.7 and high=0.6"),
        (lambda: SparsityTarget(task="qa", low=0.7, high=1.6), "within"),
        (lambda: SparsityConfig(targets=()), "sparsity.targets must not be empty"),
        (lambda: SparsityConfig(targets=CONFIG.targets[:1] * 2), "must be distinct"),
        (
            lambda: dataclasses.replace(CONFIG, temperature_end=0.0),
            "sparsity.temperature_end=0.0 must be positive",
        ),
        (
            lambda: dataclasses.replace(CONFIG, multiplier_start=-1.0),
            "sparsity.multiplier_start=-1.0",
        ),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()
