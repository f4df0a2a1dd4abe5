"""Chunk routing against its definition: outputs, every gradient, and the edges of the design."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunk_routed_oracle import branches, layer, rms_norm, score_gradient, scores
from closeness import assert_close
from flax import nnx
from jaxprs import equations
from mixer_cases import CHUNK, ROUTED, Case, build, by_name, inputs, positions

from jhybrid import routing
from jhybrid.config import GatedDeltaNetConfig
from jhybrid.layers import l2_normalise
from jhybrid.mixers import Context
from pallas_kernels import gated_delta_rule

LENGTH = 28  # three chunks and a half
N = 4
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")

VARIANTS = {
    "published": ROUTED,
    "delta": dataclasses.replace(ROUTED, memory="delta"),
    "mamba2": dataclasses.replace(ROUTED, memory="mamba2"),
    "no_decay_counterfactual": dataclasses.replace(
        ROUTED, decay_softmax_chunks=False, gdn_counterfactual_grad=True, softmax_conv=False
    ),
    "rotary_plain": dataclasses.replace(
        ROUTED,
        num_softmax_heads=2,
        conv_width=None,
        rope_theta=50.0,
        qk_norm=False,
        fusion_weights=False,
    ),
}
FIRST = ("published", "rotary_plain")  # the rest: slow tier


def gradients(case, x, cotangent):
    """(y, report), parameter gradients by name, input gradient, of sum(y * cotangent)."""

    @jax.jit
    def run(params, x):
        def loss(params, x):
            y, _, report = case.apply(params, x, None, positions(x))
            return (y * cotangent).sum(), (y, report)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (_, outputs), (grads, dx) = run(case.params, x)
    return outputs, by_name(grads), dx


def forced(routes):
    """A context with decisions [N, H] for one row of LENGTH tokens."""
    return Context(positions=jnp.arange(LENGTH)[None], routes=jnp.asarray(routes, bool)[None])


def without(case, *parts):
    """The layer with the norm weights of a branch set to 0, which removes the branch."""
    return case.with_params(lambda name, p: 0 * p if name.split(".")[0] in parts else p)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name in FIRST else pytest.mark.slow)
        for name, config in VARIANTS.items()
    ],
)
def test_outputs_and_gradients_equal_the_definition(config):
    case, x, cotangent = build(config), inputs(LENGTH), inputs(LENGTH, seed=8)
    (y, report), grads, dx = gradients(case, x, cotangent)

    @jax.jit
    def oracle(p, x):
        def loss(p, x):
            y, _ = layer(p, config, x)
            return (y * cotangent[0]).sum(), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(p, x)

    (_, expected), (expected_grads, expected_dx) = oracle(by_name(case.params), x[0])
    assert 0 < np.mean(report["softmax_fraction"]) < 1, "the test needs both kinds of chunk"
    assert_close(y[0], expected, 1e-10, "y")
    assert_close(dx[0], expected_dx, 1e-10, "dx")
    for name, gradient in expected_grads.items():
        assert_close(grads[name], gradient, 1e-10, name)


def test_the_reference_ops_give_the_same_layer_and_gradients():
    case, x, cotangent = build(ROUTED), inputs(LENGTH), inputs(LENGTH, seed=8)
    mixer = case.mixer
    mixer.implementation = "reference"
    literal = Case(*nnx.split(mixer))
    (y, _), grads, dx = gradients(case, x, cotangent)
    (expected, _), expected_grads, expected_dx = gradients(literal, x, cotangent)
    assert_close(y, expected, 1e-12, "y")
    assert_close(dx, expected_dx, 1e-11, "dx")
    for name, gradient in expected_grads.items():
        assert_close(grads[name], gradient, 1e-10, name)


def test_score_gradients_have_their_closed_form_and_the_last_chunk_has_none():
    case, x, cotangent = build(ROUTED), inputs(LENGTH), inputs(LENGTH, seed=8)
    _, grads, _ = gradients(case, x, cotangent)
    p = by_name(case.params)
    expected = jax.jit(lambda p, x: score_gradient(p, ROUTED, x, cotangent[0]))(p, x[0])
    # dW = means^T ds, and N < D independent means: ds can be read back from dW.
    valid = jnp.ones((1, LENGTH), bool)
    means = routing.chunk_means(x, valid, CHUNK)[0]
    actual = jnp.linalg.lstsq(means.T, grads["score_weight"])[0].reshape(N, -1, 2)
    assert_close(actual, expected, 1e-10, "score gradient")
    assert float(jnp.abs(expected[:-1]).min()) > 0
    np.testing.assert_array_equal(expected[-1], 0)
    assert float(jnp.abs(actual[-1]).max()) < 1e-10


def test_all_chunks_to_the_memory_is_gated_delta_net():
    config = dataclasses.replace(ROUTED, num_softmax_heads=2, fusion_weights=False)
    case, x = without(build(config), "softmax_norm"), inputs(LENGTH)
    delta_net = build(GatedDeltaNetConfig(num_heads=2, key_dim=8, value_dim=16))
    shared = by_name(case.params)
    shared["o_norm.weight"] = shared["memory_norm.weight"]
    delta_net = delta_net.with_params(lambda name, p: shared[name])
    y, _, _ = case(x, None, forced(np.zeros((N, 2))))
    assert_close(y, delta_net.row(x), 1e-12)


@pytest.mark.parametrize("heads", [2, 4])
def test_all_chunks_to_the_memory_is_the_delta_rule_with_its_norm_by_softmax_head(heads):
    config = dataclasses.replace(ROUTED, num_softmax_heads=heads, fusion_weights=False)
    case, x = without(build(config), "softmax_norm"), inputs(LENGTH)
    p = by_name(case.params)
    q, k, v, g, beta = (a[None] for a in branches(p, config, x[0]))
    q, k, v = (a.reshape(1, LENGTH, config.num_heads, -1) for a in (q, k, v))
    q, k = l2_normalise(q), l2_normalise(k)
    o, _ = gated_delta_rule(q, k, v, g, beta, implementation="reference")
    o = rms_norm(o.reshape(1, LENGTH, heads, -1), p["memory_norm.weight"])
    gate = jax.nn.silu(x @ p["g_proj.weight"])
    expected = (gate * o.reshape(gate.shape)) @ p["o_proj.weight"]
    y, _, _ = case(x, None, forced(np.zeros((N, 2))))
    assert_close(y, expected, 1e-12)


@pytest.mark.parametrize("heads", [2, 4])
def test_all_chunks_to_softmax_is_causal_attention(heads):
    config = dataclasses.replace(
        ROUTED, num_softmax_heads=heads, qk_norm=False, fusion_weights=False
    )
    case, x = without(build(config), "memory_norm"), inputs(LENGTH)
    p = by_name(case.params)
    q, k, v, _, _ = branches(p, config, x[0])
    q, k, v = (a.reshape(1, LENGTH, config.num_softmax_heads, -1) for a in (q, k, v))
    logits = jnp.einsum("bihd,bjhd->bhij", q, k) * config.softmax_key_dim**-0.5
    logits = jnp.where(jnp.tri(LENGTH, dtype=bool), logits, -jnp.inf)
    o = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits), v)
    o = rms_norm(o, p["softmax_norm.weight"])
    gate = jax.nn.silu(x @ p["g_proj.weight"])
    expected = (gate * o.reshape(gate.shape)) @ p["o_proj.weight"]
    y, _, _ = case(x, None, forced(np.ones((N, 2))))
    assert_close(y, expected, 1e-12)


def test_a_chunks_route_changes_nothing_up_to_its_end():
    case, x = build(ROUTED), inputs(LENGTH)
    routes = np.array([[0, 1], [1, 0], [0, 1], [1, 0]], bool)
    before, _, _ = case(x, None, forced(routes))
    for n in range(N):
        for h in range(2):
            flipped = routes.copy()
            flipped[n, h] ^= True
            after, _, _ = case(x, None, forced(flipped))
            end = (n + 1) * CHUNK
            np.testing.assert_array_equal(before[:, :end], after[:, :end])
            assert n == N - 1 or not np.array_equal(before[:, end:], after[:, end:])


@pytest.mark.parametrize("decays", [True, False])
def test_a_run_of_softmax_chunks_only_decays_the_memory(decays):
    config = dataclasses.replace(ROUTED, decay_softmax_chunks=decays)
    case, x = build(config), inputs(LENGTH)
    state = case.mixer.initial_state(1, 32)
    routes = np.array([[0, 0], [1, 1], [1, 1], [1, 1]])
    context = dataclasses.replace(forced(routes), lengths=jnp.array([CHUNK]))
    _, first, _ = case(x, state, context)
    context = dataclasses.replace(context, lengths=jnp.array([3 * CHUNK]))
    _, later, _ = case(x, state, context)
    g = branches(by_name(case.params), config, x[0])[3]
    decay = jnp.exp(g[CHUNK : 3 * CHUNK].sum(0)) if decays else jnp.ones(2)
    assert float(jnp.abs(first.memory_start).max()) > 0.1
    expected = decay[:, None, None] * first.memory_start[0]
    assert_close(later.memory_start[0], expected, 1e-12)


def test_slots_hold_the_kept_chunks_in_order_and_the_open_chunk_after_them():
    case, x = build(ROUTED), inputs(LENGTH)
    routes = np.array([[1, 0], [0, 0], [1, 1], [0, 0]], bool)
    _, state, report = case(x, case.mixer.initial_state(1, 32), forced(routes))
    np.testing.assert_array_equal(state.kept, [[2, 1]])
    np.testing.assert_array_equal(report["counted"][0], [True, True, True, False, False])
    values = branches(by_name(case.params), ROUTED, x[0])[2].reshape(LENGTH, 2, 2, -1)
    for h, kept in enumerate([(0, 2, 3), (2, 3)]):
        for slot, chunk in enumerate(kept):
            expected = values[chunk * CHUNK : (chunk + 1) * CHUNK, h]
            actual = jnp.moveaxis(state.values[0, h, :, slot, : len(expected)], 0, 1)
            assert_close(actual, expected, 1e-12, f"head {h} slot {slot}")


def test_a_chunk_without_room_goes_to_the_memory_in_prefill_and_decoding():
    config = dataclasses.replace(ROUTED, kv_capacity=0.5, kv_overflow="linear")
    case, x = build(config), inputs(LENGTH)  # room for two of four chunks
    wanted = np.array([[1, 1], [1, 0], [1, 1], [0, 0]], bool)
    granted = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], bool)
    expected, _, _ = case(x, None, forced(granted))
    context = forced(wanted)
    y, state, report = case(x, case.mixer.initial_state(1, LENGTH), context)
    assert_close(y, expected, 1e-12, "one prefill")
    np.testing.assert_array_equal(report["decisions"][0, :3], granted[:3])
    np.testing.assert_array_equal(state.kept, [[2, 2]])
    np.testing.assert_array_equal(state.refused, [[1, 0]])
    assert state.keys.shape[3] == 3  # and the open chunk
    state = case.mixer.initial_state(1, LENGTH)
    for t in range(LENGTH):
        step = Context(positions=jnp.array([[t]]), routes=context.routes)
        y, state, _ = case(x[:, t : t + 1], state, step)
        assert_close(y[:, 0], expected[:, t], 1e-12, f"token {t}")
    np.testing.assert_array_equal(state.kept, [[2, 2]])
    np.testing.assert_array_equal(state.refused, [[1, 0]])


def test_decisions_agree_between_training_prefill_and_decoding():
    case, x = build(ROUTED), inputs(LENGTH)
    _, _, report = case(x, None, positions(x))
    expected = np.asarray(scores(by_name(case.params), ROUTED, x[0]))
    assert_close(report["scores"][0], expected, 1e-12, "scores")
    decisions = np.asarray(report["decisions"])[0]
    np.testing.assert_array_equal(decisions, expected[..., 0] >= expected[..., 1])
    state = case.mixer.initial_state(1, 32)
    context = dataclasses.replace(positions(x), lengths=jnp.array([CHUNK + 5]))
    _, state, prefill = case(x, state, context)
    found = [np.asarray(prefill["decisions"])[0][np.asarray(prefill["counted"])[0]]]
    for t in range(CHUNK + 5, LENGTH):
        context = Context(positions=jnp.array([[t]]))
        _, state, report = case(x[:, t : t + 1], state, context)
        found.append(np.asarray(report["decisions"])[0][np.asarray(report["counted"])[0]])
    np.testing.assert_array_equal(np.concatenate(found), decisions[:3])


def test_forced_routes_follow_the_row_through_prefill_and_decoding():
    case, x = build(ROUTED), inputs(LENGTH)
    routes = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
    expected, _, _ = case(x, None, forced(routes))
    state = case.mixer.initial_state(1, 32)
    context = dataclasses.replace(forced(routes), lengths=jnp.array([CHUNK + 5]))
    y, state, _ = case(x, state, context)
    assert_close(y[:, : CHUNK + 5], expected[:, : CHUNK + 5], 1e-12, "prefill")
    for t in range(CHUNK + 5, LENGTH):
        context = Context(positions=jnp.array([[t]]), routes=forced(routes).routes)
        y, state, _ = case(x[:, t : t + 1], state, context)
        assert_close(y[:, 0], expected[:, t], 1e-12, f"token {t}")


def test_training_and_decoding_never_ask_the_host():
    case, x = build(ROUTED), inputs(LENGTH)
    state = case.mixer.initial_state(1, 32)

    def train(x):
        return case.apply(case.params, x, None, positions(x))[0].sum()

    def decode(x, state):
        context = Context(positions=state.length[:, None])
        return case.apply(case.params, x, state, context)[:2]

    steps = jax.make_jaxpr(jax.grad(train))(x), jax.make_jaxpr(decode)(x[:, :1], state)
    for step in steps:
        primitives = {equation.primitive.name for equation in equations(step.jaxpr)}
        assert "dot_general" in primitives
        assert not any("callback" in name or "outfeed" in name for name in primitives)


def test_gumbel_routing_is_hard_random_with_a_key_and_deterministic_without():
    config = dataclasses.replace(ROUTED, sampler="gumbel")
    x = inputs(LENGTH)
    case = build(config).with_params(lambda name, p: p / 20 if name == "score_weight" else p)
    plain, _, report = case(x, None, positions(x))
    seen = set()
    for seed in range(6):
        context = positions(x, rng=jax.random.key(seed), temperature=jnp.array(0.7))
        y, _, sampled = case(x, None, context)
        again, _, _ = case(x, None, context)
        np.testing.assert_array_equal(y, again)
        expected, _, _ = case(x, None, forced(sampled["decisions"][0]))
        assert_close(y, expected, 1e-12, "a sampled decision is used as a hard one")
        seen.add(np.asarray(sampled["decisions"]).tobytes())
    assert len(seen) > 1
    expected, _, _ = case(x, None, forced(report["decisions"][0]))
    assert_close(plain, expected, 1e-12, "without a key")
