"""Static head masks: mixed in training, fixed afterwards, and decoded like any row."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from closeness import assert_close
from flax import nnx
from mixer_cases import build, by_name, inputs, model_with, positions
from test_head_routed import BLOCK, FA_SSA, FA_XA, LENGTH, XA_SSA, G, packed, two_branches

from jhybrid import head_masks
from jhybrid.checkpoint import StoredParameters, load_model, write_export
from jhybrid.config import Experiment
from jhybrid.errors import UserError
from jhybrid.mixers import Context, head_routed_ops
from jhybrid.mixers.head_masks import HardConcreteMask, sparse_probability, within_unit
from jhybrid.parameters import flatten

ALPHA = dataclasses.replace(FA_SSA, route="alpha")
CONCRETE = dataclasses.replace(FA_SSA, route="hard_concrete")
NAMES = {"alpha": "mask.alpha", "hard_concrete": "mask.log_alpha"}
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")


def with_mask(config, values):
    name = NAMES[config.route]
    return build(config).with_params(lambda n, p: jnp.asarray(values, p.dtype) if n == name else p)


def test_a_cut_weight_moves_inwards_only():
    x = jnp.array([-0.1, 0.0, 0.4, 1.0, 1.3])
    assert_close(within_unit(x), jnp.array([0.0, 0.0, 0.4, 1.0, 1.0]), 0)
    for sign, inwards in ((1.0, [0, 0, 1, 1, 1]), (-1.0, [1, 1, 1, 0, 0])):
        grad = jax.grad(lambda x, s=sign: (s * within_unit(x)).sum())(x)
        np.testing.assert_array_equal(grad, sign * np.array(inwards))


def test_hard_concrete_is_its_formula_and_zero_as_often_as_its_probability_says():
    mask = HardConcreteMask(3, model_with(FA_SSA, "float64"), rngs=nnx.Rngs(0))
    start = mask.log_alpha[...]
    assert float(jnp.abs(start - 4).max()) < 0.05
    mask.log_alpha[...] = log_alpha = jnp.array([-1.0, 0.3, 2.0])
    draws = jax.vmap(mask.weight)(jax.random.split(jax.random.key(0), 20_000))
    u = jax.random.uniform(jax.random.key(1), (3,), "float64", 1e-6, 1 - 1e-6)
    s = 1 / (1 + np.exp(-(np.log(u / (1 - u)) + log_alpha) / (2 / 3)))
    assert_close(mask.weight(jax.random.key(1)), np.clip(1.2 * s - 0.1, 0, 1), 1e-12)
    np.testing.assert_allclose((draws == 0).mean(0), sparse_probability(log_alpha), atol=0.012)
    assert (draws == 1).any()
    assert ((draws > 0) & (draws < 1)).any()
    assert_close(mask.weight(None), 1 / (1 + np.exp(-0.8 * log_alpha / (2 / 3))), 1e-12)


@pytest.mark.parametrize("config", [ALPHA, CONCRETE], ids=lambda c: c.route)
def test_training_mixes_both_modes_in_value_and_all_gradients(config):
    case = with_mask(config, [0.3, 0.8])
    x, context = inputs(32, batch=2, seed=4), packed()
    context = dataclasses.replace(context, rng=jax.random.key(2))
    cotangent = inputs(32, batch=2, seed=5) * context.valid()[..., None]

    def ours(params, x):
        y, _, report = nnx.merge(case.graphdef, params)(x, None, context)
        return (y * cotangent).sum() + report["gate"].mean(), report

    def oracle(params, x):
        mixer = nnx.merge(case.graphdef, params)
        gates = jnp.broadcast_to(mixer.mask.weight(context.rng), (2, 32, G))
        return (two_branches(config, mixer, x, context, gates) * cotangent).sum() + gates.mean()

    (value, report), (grads, dx) = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(
        case.params, x
    )
    expected, (theirs, dx_theirs) = jax.jit(jax.value_and_grad(oracle, (0, 1)))(case.params, x)
    assert float(value) == pytest.approx(float(expected), rel=1e-12)
    assert_close(dx, dx_theirs, 1e-11, "dx")
    theirs = by_name(theirs)
    for name, grad in by_name(grads).items():
        assert_close(grad, theirs[name], 1e-11, name, floor=1e-13)
    assert (np.abs(theirs[NAMES[config.route]]) > 1e-3).all()
    assert ((report["gate"] > 0) & (report["gate"] < 1)).any()


@pytest.mark.parametrize("config", [ALPHA, CONCRETE], ids=lambda c: c.route)
def test_outside_training_heads_are_what_the_threshold_says(config):
    values = {"alpha": [0.3, 0.8], "hard_concrete": [-1.0, 2.0]}[config.route]
    x = inputs(LENGTH, batch=2)
    for threshold, heads in ((0.1, [1, 1]), (0.5, [0, 1]), (0.95, [0, 0])):
        case = with_mask(dataclasses.replace(config, route_threshold=threshold), values)
        y, _, report = case(x, None, positions(x))
        np.testing.assert_array_equal(report["gate"], np.broadcast_to(heads, (2, 1, G)))
        forced = jnp.broadcast_to(jnp.array(heads, bool), (2, 1, G))
        routed = with_mask(config, values)(x, None, positions(x, routes=forced))[0]
        assert_close(y, routed, 1e-12)
        told = positions(x, softmax_bias=jnp.asarray(0.5 - threshold))
        assert_close(with_mask(config, values)(x, None, told)[0], y, 0)


@pytest.mark.parametrize("route", ["retrieval", "sparse"])
@pytest.mark.parametrize(
    "mode",
    [FA_SSA, *(pytest.param(c, marks=pytest.mark.slow) for c in (FA_XA, XA_SSA))],
    ids=lambda c: c.mode,
)
def test_all_heads_attend_alike_with_and_without_training(mode, route):
    config = dataclasses.replace(mode, route=route)
    case, x = build(config), inputs(LENGTH, batch=2)
    assert not [name for name in by_name(case.params) if name.startswith(("router", "mask"))]
    y, _, report = case(x, None, positions(x))
    gates = jnp.full((2, LENGTH, G), float(route == "retrieval"))
    assert_close(y, two_branches(config, case.mixer, x, positions(x), gates), 1e-12)
    np.testing.assert_array_equal(report["gate"], gates[:, :1])
    assert_close(case(x, None, positions(x, rng=jax.random.key(0)))[0], y, 0)


def test_packed_documents_are_as_alone():
    case, x, context = with_mask(ALPHA, [0.3, 0.8]), inputs(32, batch=2, seed=4), packed()
    y = case(x, None, context)[0]
    for row, start, stop in ((0, 0, 11), (0, 12, 28), (1, 0, 30)):
        alone = x[row : row + 1, start:stop]
        assert_close(y[row : row + 1, start:stop], case.row(alone), 1e-12)


@pytest.mark.parametrize("pieces", [(5, 9, 1, 1, 11), (LENGTH - 8,) + (1,) * 8])
def test_a_row_read_in_pieces_equals_the_whole_row(pieces):
    case, x = with_mask(ALPHA, [0.3, 0.8]), inputs(LENGTH, batch=2)
    full, state, start = case.row(x), case.mixer.initial_state(2, LENGTH), 0
    for length in pieces:
        places = jnp.broadcast_to(start + jnp.arange(length), (2, length))
        part = x[:, start : start + length]
        y, state, _ = case(part, state, Context(positions=places))
        assert_close(y, full[:, start : start + length], 1e-12)
        start += length
    assert start == LENGTH
    np.testing.assert_array_equal(state.full, [[False, True]] * 2)
    W = (FA_SSA.sink_blocks + FA_SSA.local_blocks) * BLOCK
    assert state.recent[0].shape[2] == W < LENGTH


def test_a_prompt_is_read_in_pieces_only_where_it_decides_nothing():
    assert FA_SSA.needs_whole_prompt
    assert not ALPHA.needs_whole_prompt
    assert dataclasses.replace(XA_SSA, route="retrieval").needs_whole_prompt


def test_a_threshold_that_no_weight_exceeds_is_refused():
    with pytest.raises(UserError, match="route_threshold"):
        dataclasses.replace(ALPHA, route_threshold=1.0)
    assert head_routed_ops.initial_state(ALPHA, 1, 8, "float32", 1.0).keys.shape[1] == G


# ---- Thresholds ----


@pytest.mark.parametrize(
    ("values", "share", "reached"),
    [
        ([0.1, 0.5, 0.9, 0.2], 0.5, 0.5),
        ([0.1, 0.5, 0.9, 0.2], 0.0, 0.0),
        ([0.1, 0.5, 0.9, 0.2], 1.0, 1.0),
        ([0.0, 0.0, 1.0, 0.4], 0.25, 0.5),  # equal weights stay together; two zeros or none
        ([1.0, 1.0, 0.0, 1.0], 1.0, 0.25),  # nothing exceeds a weight of 1
    ],
)
def test_a_threshold_makes_the_asked_share_of_heads_sparse(values, share, reached):
    found = head_masks.threshold(np.array(values), share)
    assert found.sparse == reached == np.mean(np.array(values) <= found.route_threshold)
    assert 0 <= found.route_threshold < 1


def test_the_command_prints_a_setting_that_does_what_it_says(tmp_path, monkeypatch, capsys):
    mixer = dataclasses.replace(ALPHA, attention=tiny_models.SOFTMAX)
    config = tiny_models.tiny(mixer, mixer, channels=False)
    model = nnx.merge(*nnx.split(tiny_models.build(config)))
    model.groups[0][0].mixer.mask.alpha[...] = jnp.array([[0.9, 0.2], [0.4, 1.2]], jnp.float32)
    params = flatten(nnx.state(model, nnx.Param))
    folder = write_export(Experiment(name="masks", model=config), params, tmp_path / "export")
    monkeypatch.setattr(sys, "argv", ["x", "--checkpoint", str(folder), "--sparse", "0.75,0.1"])
    assert head_masks.main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "sparse 0.75: 0.750 of 4 heads" in first
    assert "sparse 0.1: 0.000 of 4 heads" in second
    _, changed = load_model(folder, [first.partition("--set ")[2].strip("'")])
    tokens = jnp.asarray(tiny_models.tokens(1, 16))
    reports = changed(tokens, Context(positions=jnp.arange(16)[None])).reports
    decisions = [report["decisions"][0, 0].tolist() for report in reports.values()]
    assert decisions == [[False, False], [False, True]]
    monkeypatch.setattr(sys, "argv", ["x", "--checkpoint", str(folder), "--sparse", "2"])
    with pytest.raises(UserError, match="--sparse 2"):
        head_masks.main()


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    config = tiny_models.tiny(tiny_models.SOFTMAX, channels=False)
    params = flatten(nnx.state(tiny_models.build(config), nnx.Param))
    folder = write_export(Experiment(name="plain", model=config), params, tmp_path / "export")
    with pytest.raises(UserError, match="no head masks"):
        head_masks.weights(StoredParameters(folder))
