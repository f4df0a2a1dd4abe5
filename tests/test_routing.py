"""Routing decisions as pure functions: hard forwards, the chosen operation's gradient backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from jhybrid import routing
from jhybrid.config import SoftmaxBudget

SCORES = jnp.array([[[[1.0, 0.5], [-0.3, 0.2]], [[0.1, 0.1], [-2.0, 1.0]]]])  # [1, 2, 2, 2]


def multipliers(scores, **options):
    """Both multipliers and their sum against fixed derivatives, as a loss would see them."""
    decision = routing.decide(scores, **options)
    return routing.block_bias(decision), routing.write_mask(decision, counterfactual=False)


def test_the_larger_score_wins_and_ties_go_to_softmax():
    decision = routing.decide(SCORES)
    np.testing.assert_array_equal(decision.softmax, [[[True, False], [True, False]]])
    bias, mask = multipliers(SCORES)
    np.testing.assert_array_equal(bias, 0)
    np.testing.assert_array_equal(mask, [[[0, 1], [0, 1]]])


@pytest.mark.parametrize("counterfactual", [False, True])
def test_scores_receive_the_gradient_of_the_chosen_operation(counterfactual, key):
    d = jax.random.normal(key, (*SCORES.shape[:-1], 2))

    def loss(scores):
        decision = routing.decide(scores)
        mask = routing.write_mask(decision, counterfactual=counterfactual)
        return (d[..., 0] * routing.block_bias(decision) + d[..., 1] * mask).sum()

    softmax = routing.decide(SCORES).softmax
    felt = jnp.stack(
        [jnp.where(softmax, d[..., 0], 0), jnp.where(softmax & (not counterfactual), 0, d[..., 1])],
        -1,
    )
    p = jax.nn.softmax(SCORES)
    expected = p * (felt - (p * felt).sum(-1, keepdims=True))
    assert_close(jax.grad(loss)(SCORES), expected, 1e-6)


def test_a_bias_moves_the_decision_and_its_gradient_together():
    for bias, expected in ((-0.6, [[0, 0], [0, 0]]), (0.6, [[1, 1], [1, 0]]), (3.1, [[1, 1]] * 2)):
        decision = routing.decide(SCORES, bias=bias)
        np.testing.assert_array_equal(decision.softmax[0], np.array(expected, bool))
        shifted = routing.decide(SCORES + jnp.array([bias, 0.0]))
        assert_close(decision.scores, shifted.scores, 1e-6)

        def loss(scores, **options):
            bias, mask = multipliers(scores, **options)
            return (3 * bias + mask).sum()

        assert_close(
            jax.grad(loss)(SCORES, bias=bias),
            jax.grad(loss)(SCORES + jnp.array([bias, 0.0])),
            1e-6,
        )


def test_the_bias_of_a_budget_falls_while_too_many_chunks_are_kept():
    at_most = SoftmaxBudget(fraction=0.25, rate=0.4)
    exactly = SoftmaxBudget(fraction=0.25, rate=0.4, limit="exactly")
    bias, fraction = jnp.array([0.0, 0.0, -1.0, -1.0]), jnp.array([0.75, 0.0, 0.25, jnp.nan])
    assert_close(routing.next_bias(exactly, bias, fraction), jnp.array([-0.2, 0.1, -1, -1]), 1e-6)
    assert_close(routing.next_bias(at_most, bias, fraction), jnp.array([-0.2, 0, -1, -1]), 1e-6)


def test_temperature_scales_the_gradient_and_not_the_decision():
    def loss(scores, temperature):
        bias, mask = multipliers(scores, temperature=temperature)
        return (bias + mask).sum()

    for temperature in (jnp.array(0.5), jnp.array(2.0)):
        value, gradient = jax.value_and_grad(loss)(SCORES, temperature)
        assert value == 2
        expected = jax.grad(loss)(SCORES / temperature, jnp.array(1.0)) / temperature
        assert_close(gradient, expected, 1e-6)


def test_forced_decisions_are_constants():
    forced = jnp.array([[[False, True], [False, True]]])

    def loss(scores):
        bias, mask = multipliers(scores, forced=forced)
        return (bias * 3 + mask).sum()

    value, gradient = jax.value_and_grad(loss)(SCORES)
    assert value == 2
    np.testing.assert_array_equal(gradient, 0)


def test_gumbel_noise_samples_from_the_softmax_of_the_scores(key):
    scores = jnp.broadcast_to(jnp.array([0.4, -0.5]), (1, 20_000, 1, 2))
    fraction = routing.decide(scores, rng=key).softmax.mean()
    assert abs(float(fraction) - float(jax.nn.sigmoid(0.9))) < 0.01


def test_chunk_means_count_valid_tokens_only():
    x = jnp.arange(14.0).reshape(1, 7, 2).astype(jnp.bfloat16)
    valid = jnp.array([[True, True, True, True, False, True, False]])
    means = routing.chunk_means(x, valid, 4)
    assert means.dtype == jnp.float32
    np.testing.assert_array_equal(means, [[[3, 4], [10, 11]]])
    nothing = routing.chunk_means(x, jnp.zeros_like(valid), 4)
    np.testing.assert_array_equal(nothing, 0)


def test_statistics_ignore_padding_chunks():
    decision = routing.decide(SCORES)
    report = routing.statistics(decision, jnp.array([[False, True]]))
    np.testing.assert_array_equal(report["softmax_fraction"], [1, 0])
    assert_close(report["score_margin"], jnp.array([0.0, 3.0]), 1e-6)
    empty = routing.statistics(decision, jnp.array([[False, False]]))
    assert np.isnan(empty["softmax_fraction"]).all()
