"""Chunk and head routing together: a document's first chunks commit heads to the memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, rms
from mixer_cases import CHUNK, ROUTED, build, inputs, positions

from jhybrid import routing
from jhybrid.config import HeadProbe
from jhybrid.mixers import Context

LENGTH = 6 * CHUNK + 3
PROBED = dataclasses.replace(ROUTED, num_heads=4, head_probe=HeadProbe(chunks=2, margin=0.05))
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")


def by_hand(free, mean):
    """What the chunks of one document do: `free` [N, H] decisions without a probe."""
    expected = np.array(free)
    expected[2:] &= np.asarray(mean) >= PROBED.head_probe.margin
    return expected


def mean_of_first(scores):
    """Of the first two chunks of one document's scores [N, H, 2]."""
    return np.mean(scores[:2, :, 0] - scores[:2, :, 1], 0)


def free_of_probe(case, config=PROBED):
    """The same parameters without a probe."""
    other = build(dataclasses.replace(config, head_probe=None))
    return dataclasses.replace(other, params=case.params)


@pytest.mark.slow
def test_the_first_chunks_commit_heads_for_the_rest():
    case, x = build(PROBED), inputs(LENGTH, batch=6)
    report = case(x, None, positions(x))[2]
    free = free_of_probe(case)(x, None, positions(x))[2]
    assert_close(report["scores"], free["scores"], 0)
    expected = [
        by_hand(row, mean_of_first(np.asarray(scores)))
        for row, scores in zip(free["decisions"], free["scores"], strict=True)
    ]
    np.testing.assert_array_equal(report["decisions"], expected)
    later = report["decisions"][:, 2:]
    assert later.any()  # some heads stay free,
    assert (np.asarray(free["decisions"])[:, 2:] & ~np.asarray(later)).any()  # some are committed


def test_forced_chunks_are_not_overruled():
    case, x = build(PROBED), inputs(LENGTH, batch=2)
    routes = jnp.ones((2, 7, 4), bool)
    report = case(x, None, positions(x, routes=routes))[2]
    assert report["decisions"].all()


def test_the_gradient_is_that_of_both_gates():
    random = np.random.default_rng(0)
    scores, weight = (jnp.asarray(random.normal(size=(3, 5, 4, n))) for n in (2, 1))
    free = (jnp.arange(5) < 2)[None, :, None]

    def gate_sum(scores):
        mean = jnp.mean(scores[:, :2, :, 0] - scores[:, :2, :, 1], 1, keepdims=True)
        mean = jnp.broadcast_to(mean, (3, 5, 4))
        decision = routing.commit_heads(routing.decide(scores), mean, 0.1, free)
        return (weight[..., 0] * routing.gate(decision)).sum(), decision

    def relaxed_sum(scores, chunk, head):
        """With the other gate of each product held at its hard value."""
        difference = scores[..., 0] - scores[..., 1]
        mean = jnp.mean(difference[:, :2], 1, keepdims=True)
        c, a = jax.nn.sigmoid(difference), jax.nn.sigmoid(mean - 0.1)
        both = jnp.where(free, c, head * c + chunk * a)
        return (weight[..., 0] * both).sum()

    grad, decision = jax.grad(gate_sum, has_aux=True)(scores)
    _, plain = gate_sum(scores)
    assert_close(routing.write_mask(plain, counterfactual=True), 1.0 - plain.softmax, 0)
    difference = scores[..., 0] - scores[..., 1]
    head = jnp.mean(difference[:, :2], 1, keepdims=True) >= 0.1
    np.testing.assert_array_equal(decision.softmax, (difference >= 0) & (head | free))
    assert_close(grad, jax.grad(relaxed_sum)(scores, difference >= 0, head), 1e-12)


@pytest.mark.slow
def test_the_router_learns_from_committing():
    case, x = build(PROBED), inputs(LENGTH, batch=4)

    def gradient(of):
        def total(params):
            return jnp.sum(of.apply(params, x, None, positions(x))[0] ** 2)

        return jax.grad(total)(of.params)

    ours, free = (
        dict(jax.tree_util.tree_leaves_with_path(gradient(of)))
        for of in (case, free_of_probe(case))
    )
    (path,) = [path for path in ours if "score_weight" in jax.tree_util.keystr(path)]
    assert np.isfinite(ours[path]).all()
    assert rms(ours[path] - free[path]) > 1e-3 * rms(free[path])


@pytest.mark.slow
def test_packed_documents_are_as_alone():
    case, x = build(PROBED), inputs(9 * CHUNK, batch=1)
    ids = np.full((1, 9 * CHUNK), -1)
    spans = [(0, 3 * CHUNK + 5), (4 * CHUNK, 5 * CHUNK), (5 * CHUNK, 9 * CHUNK - 2)]
    places = np.zeros_like(ids)
    for number, (start, stop) in enumerate(spans):
        ids[:, start:stop] = number
        places[:, start:stop] = np.arange(stop - start)
    y, _, report = case(
        x, None, Context(positions=jnp.asarray(places), segment_ids=jnp.asarray(ids))
    )
    for start, stop in spans:
        alone = x[:, start:stop]
        expected, _, own = case(alone, None, positions(alone))
        assert_close(y[:, start:stop], expected, 1e-11)
        first, last = start // CHUNK, -(-stop // CHUNK)
        np.testing.assert_array_equal(report["decisions"][:, first:last], own["decisions"])


def test_a_row_in_pieces_equals_the_whole_row():
    case, x = build(PROBED), inputs(LENGTH, batch=6)
    full = case(x, None, positions(x))
    assert 0 < full[2]["decisions"][:, 2:].mean() < 1
    state, start = case.mixer.initial_state(6, LENGTH), 0
    for length in (10, *(1,) * 11, 10, 10, 10):  # token by token out of the probed chunks
        places = jnp.broadcast_to(start + jnp.arange(length), (6, length))
        y, state, _ = case(x[:, start : start + length], state, Context(positions=places))
        assert_close(y, full[0][:, start : start + length], 1e-11)
        start += length
    assert start == LENGTH
    np.testing.assert_array_equal(state.kept, full[2]["decisions"][:, :6].sum(1))


def test_rows_of_unequal_lengths_keep_their_own_probe():
    case, x = build(PROBED), inputs(LENGTH, batch=6)
    full = case(x, None, positions(x))[0]
    lengths = jnp.array([0, 3, CHUNK, 2 * CHUNK + 1, 5 * CHUNK, LENGTH - 1])
    _, state, _ = case(x, case.mixer.initial_state(6, LENGTH), positions(x, lengths=lengths))
    for _ in range(3):
        index = jnp.minimum(state.length, LENGTH - 1)[:, None]
        going = (state.length < LENGTH).astype(int)
        token = jnp.take_along_axis(x, index[..., None], 1)
        y, state, _ = case(token, state, Context(positions=index, lengths=going))
        expected = jnp.take_along_axis(full, index[..., None], 1)
        assert_close(jnp.where(going[:, None, None], y - expected + 1, 1), jnp.ones_like(y), 1e-11)
