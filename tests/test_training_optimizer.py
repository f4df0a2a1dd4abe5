"""Learning-rate schedules, AdamW with its masks, and which parameters train."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jhybrid.config import OptimizerConfig
from jhybrid.errors import UserError
from jhybrid.optimizer import adamw, learning_rate
from jhybrid.parameters import flatten, matrix_paths, split_trainable, unflatten


def rates(config, steps):
    return np.asarray(learning_rate(config, steps)(jnp.arange(steps)))


def test_cosine_warms_up_to_the_peak_and_ends_at_the_final_fraction():
    config = OptimizerConfig(learning_rate=2.0, final_fraction=0.1, warmup_steps=10)
    found = rates(config, 110)
    np.testing.assert_allclose(found[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[59], 2.0 * (0.1 + 0.9 / 2), rtol=1e-5)
    np.testing.assert_allclose(found[-1], 0.2, rtol=1e-5)
    assert np.all(np.diff(found[9:]) < 0)


def test_warmup_stable_decay_is_flat_until_the_last_decay_steps():
    config = OptimizerConfig(
        learning_rate=2.0,
        final_fraction=0.25,
        schedule="warmup_stable_decay",
        warmup_steps=4,
        decay_steps=8,
    )
    found = rates(config, 32)
    np.testing.assert_allclose(found[3:24], 2.0, rtol=1e-6)
    np.testing.assert_allclose(found[24:], 2.0 * (1 - 0.75 * np.arange(1, 9) / 8), rtol=1e-5)


def test_warmup_stable_decay_without_decay_steps_stays_at_the_peak():
    config = OptimizerConfig(learning_rate=2.0, schedule="warmup_stable_decay", warmup_steps=0)
    np.testing.assert_array_equal(rates(config, 5), 2.0)


def test_first_update_is_adamw_with_decay_on_matrices_only():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip_norm=1e9, eps=1e-8)
    params = {"w": jnp.full((2, 2), 3.0), "norm": jnp.full((2,), 3.0)}
    grads = {"w": jnp.full((2, 2), 0.7), "norm": jnp.full((2,), -0.7)}
    optimizer = adamw(config, lambda count: jnp.float32(0.1), {"w"})
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # bias correction makes the first Adam direction the sign of the gradient
    np.testing.assert_allclose(updates["w"], -0.1 * (1 + 0.5 * 3), rtol=1e-5)
    np.testing.assert_allclose(updates["norm"], 0.1, rtol=1e-5)


def test_decay_all_reaches_vectors_too():
    config = OptimizerConfig(weight_decay=0.5, decay_all=True)
    params = {"norm": jnp.full((2,), 3.0)}
    optimizer = adamw(config, lambda count: jnp.float32(1.0), set())
    updates, _ = optimizer.update({"norm": jnp.zeros(2)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["norm"], -1.5, rtol=1e-6)


def test_gradients_are_clipped_to_the_global_norm():
    config = OptimizerConfig(clip_norm=1.0, weight_decay=0.0, beta1=0.0, eps=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    optimizer = adamw(config, lambda count: jnp.float32(1.0), set())
    grads = {"a": jnp.array([3e3]), "b": jnp.array([4e3])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # with eps = 1 the first direction is g / (|g| + 1), so the clipped size shows
    np.testing.assert_allclose(updates["a"], -0.6 / 1.6, rtol=1e-5)
    np.testing.assert_allclose(updates["b"], -0.8 / 1.8, rtol=1e-5)


def test_moments_of_bfloat16_parameters_are_float32():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    optimizer = adamw(OptimizerConfig(), lambda count: jnp.float32(0.1), {"w"})
    state = optimizer.init(params)
    grads = {"w": jnp.ones((2, 2), jnp.float32)}
    _, after = optimizer.update(grads, state, params)
    assert state[1].mu["w"].dtype == state[1].nu["w"].dtype == jnp.float32
    assert after[1].nu["w"].dtype == jnp.float32


class Stack(nnx.Module):
    def __init__(self):
        self.embed = nnx.Param(jnp.zeros((4, 2)), axes=("vocab", "embed"))
        self.layers = nnx.List(
            [
                nnx.Dict(
                    scale=nnx.Param(jnp.zeros((3, 2)), axes=("layers", "embed")),
                    kernel=nnx.Param(jnp.ones((3, 2, 2)), axes=("layers", "embed", "mlp")),
                )
            ]
        )


def test_a_stack_of_vectors_is_no_matrix():
    state = nnx.state(Stack(), nnx.Param)
    assert matrix_paths(state) == {"embed", "layers.0.kernel"}


def test_parameters_survive_flatten_and_unflatten():
    state = nnx.state(Stack(), nnx.Param)
    leaves = flatten(state)
    assert set(leaves) == {"embed", "layers.0.kernel", "layers.0.scale"}
    doubled = flatten(unflatten(state, {path: leaf + 1 for path, leaf in leaves.items()}))
    np.testing.assert_array_equal(doubled["layers.0.kernel"], 2.0)
    np.testing.assert_array_equal(doubled["embed"], 1.0)


def test_trainable_is_found_anywhere_in_the_path():
    trainable, frozen = split_trainable({"a.router.w": 1, "a.kernel": 2}, "router|scale")
    assert (trainable, frozen) == ({"a.router.w": 1}, {"a.kernel": 2})


@pytest.mark.parametrize("pattern", ["nothing", "("])
def test_a_pattern_that_cannot_work_names_the_field(pattern):
    with pytest.raises(UserError, match=r"optimizer\.trainable="):
        split_trainable({"a.kernel": 2}, pattern)
