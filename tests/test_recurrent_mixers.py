"""What single recurrent mixers promise besides the laws all mixers share (test_mixers.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from mixer_cases import CONFIGS, build, inputs, positions

from jhybrid.config import BlockConfig, ModelConfig
from jhybrid.errors import UserError
from jhybrid.layers import token_before
from jhybrid.mixers.hgrn import gated_sum, log_forget_gate
from jhybrid.mixers.rwkv6 import RWKV6
from jhybrid.model import rising_bounds
from jhybrid.recurrent_config import HGRN2Config, HGRNConfig, Mamba2Config, RetNetConfig

pytestmark = pytest.mark.usefixtures("float64")


def test_lightning_decays_by_head_and_depth():
    """Without k and v for later tokens, the memory shrinks by exp(-8 h / H (1 - depth))."""
    case = build(CONFIGS["lightning"])
    x = inputs(2)
    for depth in (0.0, 0.25, 1.0):
        context = positions(x[:, :1], depth=jnp.asarray(depth))
        _, first, _ = case(x[:, :1], case.mixer.initial_state(1, 2), context)
        _, second, _ = case(jnp.zeros_like(x[:, 1:]), first, context)
        decay = jnp.exp(-8 * jnp.arange(2) / 2 * (1 - depth))
        assert_close(second.memory, decay[:, None, None] * first.memory, 1e-12, f"at {depth}")


def test_lower_bounds_rise_from_zero_and_bound_the_gate():
    bounds = rising_bounds(jax.random.normal(jax.random.key(0), (4, 3)))
    assert np.all(np.asarray(bounds[0]) == 0)
    assert np.all(np.diff(bounds, axis=0) > 0) and np.all(np.asarray(bounds) < 1)
    f = jnp.linspace(-50.0, 50.0, 7)[None, :, None]
    for bound in bounds:
        exact = jnp.log(bound + (1 - bound) * jax.nn.sigmoid(f))
        assert_close(log_forget_gate(f, bound), exact, 1e-12, "log gate")


def test_the_bound_of_the_first_block_has_a_gradient_of_zero_not_nan():
    f = jnp.asarray([[[-3.0, 0.0, 2.0]]])

    def total(logits):
        return log_forget_gate(f, rising_bounds(logits)[0]).sum()

    gradient = jax.grad(total)(jnp.ones((2, 3)))
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_gated_sum_is_the_loop_with_resets_anywhere():
    keys = jax.random.split(jax.random.key(1), 3)
    v, initial = jax.random.normal(keys[0], (2, 9, 4)), jax.random.normal(keys[1], (2, 4))
    g = -jnp.exp(jax.random.normal(keys[2], (2, 9, 4)))
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2, 3, 3, 3], [4] * 9])
    h, last = gated_sum(v, g, initial_state=initial, segment_ids=segments)
    state = np.asarray(initial)
    for t in range(9):
        if t:
            state = np.where((segments[:, t] == segments[:, t - 1])[:, None], state, 0)
        state = np.exp(g[:, t]) * state + v[:, t]
        assert_close(h[:, t], state, 1e-14, f"h at {t}")
    assert_close(last, state, 1e-14, "last")


def test_the_token_before_is_none_at_the_start_of_a_segment():
    x = jnp.arange(1.0, 7.0).reshape(1, 6, 1)
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2]])
    before = token_before(x, None, segments)[0, :, 0]
    np.testing.assert_array_equal(before, [0, 1, 0, 3, 4, 0])
    continued = token_before(x, jnp.full((1, 1, 1), 9.0), None)[0, :, 0]
    np.testing.assert_array_equal(continued, [9, 1, 2, 3, 4, 5])


@pytest.mark.slow
def test_the_largest_rates_of_rwkv6_give_finite_outputs_and_gradients():
    case = build(CONFIGS["rwkv6"])
    huge = case.with_params(lambda n, p: p + 1e3 if n == "w_proj.up.bias" else p)
    x = inputs(20)
    assert isinstance(huge.mixer, RWKV6)
    gradient = jax.grad(lambda x: huge.row(x).sum())(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Mamba2Config(num_heads=3, key_dim=8, value_dim=8, num_groups=2), "num_groups=2"),
        (lambda: RetNetConfig(num_heads=2, key_dim=7, value_dim=8), "key_dim=7 must be even"),
        (lambda: HGRNConfig(width=0), "mixer.width=0 must be positive"),
        (lambda: HGRN2Config(num_heads=2, key_dim=-1, value_dim=8), "key_dim=-1"),
    ],
)
def test_impossible_sizes_are_named(change, message):
    with pytest.raises(UserError, match=message):
        change()


def test_forget_gates_of_different_widths_cannot_share_their_bounds():
    mixers = (HGRNConfig(width=16), HGRN2Config(num_heads=1, key_dim=8, value_dim=8))
    blocks = tuple(BlockConfig(mixer=mixer, channel_mixer=None) for mixer in mixers)
    with pytest.raises(UserError, match=r"gates of \[8, 16\] channels"):
        ModelConfig(vocab_size=8, dim=16, blocks=blocks)
    free = dataclasses.replace(mixers[0], lower_bound=False)
    unbound = (BlockConfig(mixer=free, channel_mixer=None), blocks[1])
    assert ModelConfig(vocab_size=8, dim=16, blocks=unbound).gate_width == 8
