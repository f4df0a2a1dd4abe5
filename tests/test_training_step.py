"""The compiled step: accumulation, sharding, frozen parameters, and steps that are not finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
import tiny
from closeness import assert_close

from jhybrid.config import MeshConfig, SoftmaxBudget
from jhybrid.sharding import make_mesh
from jhybrid.training.step import Program

pytestmark = pytest.mark.usefixtures("quick_compile")

SEED = np.asarray([0, 3], np.uint32)


@functools.cache
def program(experiment):
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        return Program(experiment, mesh)


def steps(experiment, count=1, poison=None):
    """State and metrics after `count` steps of random batches."""
    built = program(experiment)
    with jax.set_mesh(built.mesh):
        state = built.init(SEED)
        if poison is not None:
            state = poison(state)
        for seed in range(count):
            batch = built.put_batch(tiny.batch(experiment, seed))
            state, metrics = built.train_step(state, batch)
    return jax.device_get(state), jax.device_get(metrics)


def start_of(experiment):
    built = program(experiment)
    with jax.set_mesh(built.mesh):
        return jax.device_get(built.init(SEED))


def assert_same_training(actual, expected, ratio):
    assert_close(actual[1]["loss"], expected[1]["loss"], ratio, "loss")
    assert_close(actual[1]["gradient_norm"], expected[1]["gradient_norm"], ratio, "gradient norm")
    for path, moment in expected[0].opt_state[1].mu.items():
        assert_close(actual[0].opt_state[1].mu[path], moment, ratio, path)


@pytest.mark.slow
def test_a_budget_holds_each_head_at_its_fraction_of_softmax_chunks():
    budget = SoftmaxBudget(fraction=0.25, rate=0.3, limit="exactly")
    experiment = tiny.config()
    softmax, routed = experiment.model.blocks
    routed = dataclasses.replace(
        routed, mixer=dataclasses.replace(routed.mixer, softmax_budget=budget)
    )
    experiment = tiny.change(
        experiment, model={"blocks": (softmax, routed)}, training={"steps": 60}
    )
    built = program(experiment)
    path = "groups.0.1.mixer.score_bias"
    with jax.set_mesh(built.mesh):
        state, kept = built.init(SEED), []
        everything = state.params | {path: state.params[path] + 3}  # every chunk to softmax
        state = dataclasses.replace(state, params=everything)
        for seed in range(60):
            before = jax.device_get(state.params[path])
            state, metrics = built.train_step(state, built.put_batch(tiny.batch(experiment, seed)))
            kept.append(jax.device_get(metrics["routing"]["blocks.1"]["softmax_fraction"]))
            expected = before - 0.3 * (kept[-1] - 0.25)
            assert_close(jax.device_get(state.params[path]), expected, 1e-5, "bias", floor=1e-6)
    assert np.min(kept[:5]) > 0.9
    assert np.all(np.abs(np.mean(kept[30:], 0) - 0.25) < 0.06)
    assert not np.any(state.opt_state[1].mu[path])  # no gradient reaches it


def test_a_few_steps_lower_the_loss_of_a_repeated_batch():
    experiment = plain.config()
    built = program(experiment)
    with jax.set_mesh(built.mesh):
        state, batch = built.init(SEED), built.put_batch(tiny.batch(experiment))
        losses = []
        for _ in range(6):
            state, metrics = built.train_step(state, batch)
            losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(experiment.model.vocab_size)) < 0.5
    assert losses[-1] < losses[0] - 0.1


def test_accumulation_equals_one_big_batch_however_uneven_the_parts():
    whole = steps(plain.config())
    parts = steps(tiny.change(plain.config(), optimizer={"accumulation_steps": 2}))
    assert_same_training(parts, whole, 1e-5)


def test_accumulation_sums_in_float32_when_parameters_are_bfloat16():
    experiment = tiny.change(
        plain.config(), model={"param_dtype": "bfloat16"}, optimizer={"accumulation_steps": 2}
    )
    state, metrics = steps(experiment)
    assert np.isfinite(metrics["loss"])
    for path, moment in state.opt_state[1].mu.items():
        assert moment.dtype == np.float32, path
        assert state.params[path].dtype == jnp.bfloat16, path


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), id="data2_fsdp2_tensor2"),
        pytest.param(MeshConfig(fsdp=4, tensor=2), id="fsdp4_tensor2", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_take_the_same_step_as_one(mesh):
    one = steps(tiny.config())
    eight = steps(dataclasses.replace(tiny.config(), mesh=mesh))
    assert_same_training(eight, one, 1e-4)


def test_parameters_and_moments_are_split_over_the_mesh():
    experiment = dataclasses.replace(tiny.config(), mesh=MeshConfig(fsdp=4, tensor=2))
    built = program(experiment)
    with jax.set_mesh(built.mesh):
        state = built.init(SEED)
    split = {p for p, x in state.params.items() if not x.sharding.is_fully_replicated}
    assert "embed" in split
    for path, x in state.params.items():
        assert x.sharding == state.opt_state[1].mu[path].sharding, path
    assert state.params["embed"].addressable_shards[0].data.size * 8 == state.params["embed"].size


def test_frozen_parameters_stay_and_have_no_moments():
    experiment = tiny.change(plain.config(), optimizer={"trainable": "channel_mixer"})
    start = start_of(experiment)
    state, _ = steps(experiment, 2)
    assert state.frozen and all("channel_mixer" not in path for path in state.frozen)
    assert set(state.opt_state[1].mu) == set(state.params)
    for path, x in state.frozen.items():
        np.testing.assert_array_equal(x, start.frozen[path], err_msg=path)
    for path, x in state.params.items():
        assert np.any(x != start.params[path]), path


def test_frozen_parameters_cost_no_gradient_memory():
    def temporary(trainable):
        experiment = tiny.change(plain.config(), optimizer={"trainable": trainable})
        built = program(experiment)
        with jax.set_mesh(built.mesh):
            compiled = built.train_step.lower(built.state, built.batch).compile()
        gradients = [x for x in jax.tree.leaves(built.state.opt_state) if x.shape]
        return compiled.memory_analysis().argument_size_in_bytes, sum(x.size for x in gradients)

    all_arguments, all_moments = temporary(".*")
    some_arguments, some_moments = temporary("channel_mixer")
    assert all_arguments - some_arguments == 4 * (all_moments - some_moments)


def test_frozen_parameters_can_be_kept_in_bfloat16():
    experiment = tiny.change(
        plain.config(), optimizer={"trainable": "channel_mixer", "frozen_dtype": "bfloat16"}
    )
    state, metrics = steps(experiment)
    assert np.isfinite(metrics["loss"])
    assert all(x.dtype == jnp.bfloat16 for x in state.frozen.values())
    assert all(x.dtype == np.float32 for x in state.params.values())


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    experiment = plain.config()
    built = program(experiment)

    def poison(state):
        bad = state.params["embed"].at[7, 0].set(jnp.inf)
        return dataclasses.replace(state, params=state.params | {"embed": bad})

    with jax.set_mesh(built.mesh):
        before = jax.device_get(poison(built.init(SEED)))
    after, metrics = steps(experiment, 2, poison)
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["gradient_norm"])
    assert (after.step, after.skipped, after.skipped_in_row) == (2, 2, 2)
    assert metrics["skipped_in_row"] == 2
    for name in ("params", "opt_state"):
        for a, b in zip(
            jax.tree.leaves(getattr(after, name)),
            jax.tree.leaves(getattr(before, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_a_finite_step_ends_the_row_of_skipped_ones():
    def limp(state):
        return dataclasses.replace(
            state, skipped=state.skipped + 5, skipped_in_row=state.skipped_in_row + 5
        )

    state, _ = steps(plain.config(), 1, limp)
    assert (state.skipped, state.skipped_in_row) == (5, 0)


def test_routing_statistics_come_out_per_block_and_head():
    _, metrics = steps(tiny.config())
    assert set(metrics["routing"]) == {"blocks.1"}
    fraction = metrics["routing"]["blocks.1"]["softmax_fraction"]
    assert fraction.shape == (2,)


def test_evaluation_sums_losses_over_the_targets_alone():
    experiment = plain.config()
    built = program(experiment)
    with jax.set_mesh(built.mesh):
        state, batch = built.init(SEED), built.put_whole_batch(tiny.batch(experiment))
        total, count = built.eval_step(state.params, state.frozen, batch)
        _, metrics = built.train_step(state, batch)
    assert int(count) == np.sum(tiny.batch(experiment)["targets"] >= 0)
    assert_close(total / count, metrics["loss"], 1e-6, "loss")
