"""The modules blocks are made of, each against its formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from jax.test_util import check_grads

from jhybrid.config import RopeScaling, SwiGLUConfig
from jhybrid.layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    ShortConv,
    SwiGLU,
    l2_normalise,
    product,
    rotary_frequencies,
    rotate,
)

X = np.random.default_rng(0).normal(size=(2, 11, 6)).astype(np.float32)
RNGS = nnx.Rngs(0)


def test_norms_equal_their_formulas_and_keep_the_dtype():
    rms = RMSNorm(6, eps=1e-2, param_dtype="float32")
    rms.weight[...] = jnp.arange(6.0)
    expected = np.arange(6) * X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-2)
    assert_close(rms(jnp.asarray(X)), expected, 1e-6, "RMSNorm")
    layer = LayerNorm(6, eps=1e-2, param_dtype="float32")
    layer.bias[...] = jnp.arange(6.0)
    centred = X - X.mean(-1, keepdims=True)
    expected = centred / np.sqrt(X.var(-1, keepdims=True) + 1e-2) + np.arange(6)
    assert_close(layer(jnp.asarray(X)), expected, 1e-6, "LayerNorm")
    unit = X / np.sqrt((X**2).sum(-1, keepdims=True) + 1e-6)
    assert_close(l2_normalise(jnp.asarray(X)), unit, 1e-6, "l2_normalise")
    narrow = jnp.asarray(X, jnp.bfloat16)
    for norm in (rms, layer, l2_normalise):
        assert norm(narrow).dtype == jnp.bfloat16


def test_linear_is_a_matrix_product_in_its_dtype_from_small_normal_weights():
    dtypes = {"dtype": "bfloat16", "param_dtype": "float32"}
    linear = Linear(400, 300, axes=("embed", "mlp"), rngs=RNGS, **dtypes)
    weight = np.asarray(linear.weight[...])
    assert abs(weight.std() - 0.02) < 1e-3 and abs(weight.mean()) < 1e-3
    x = jax.random.normal(jax.random.key(1), (3, 400))
    assert linear(x).dtype == jnp.bfloat16
    assert_close(linear(x), x @ weight, 1e-2)
    wide = Linear(400, 300, axes=("embed", "mlp"), rngs=RNGS, wide=True, **dtypes)
    assert wide(x).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8)])
def test_a_single_row_is_multiplied_as_one_of_two(shape, key):
    x, weight, dy = (
        jax.random.normal(k, size)
        for k, size in zip(jax.random.split(key, 3), (shape, (8, 5), (*shape[:-1], 5)), strict=True)
    )

    def one(x, weight):
        return product(x, weight, jnp.float32)

    def of_two(x, weight):
        pair = jnp.stack([x.reshape(8), jnp.zeros(8)])
        return (pair @ weight)[0].reshape(*shape[:-1], 5)

    y, pull = jax.vjp(one, x, weight)
    expected, pull_two = jax.vjp(of_two, x, weight)
    assert y.shape == (*shape[:-1], 5)
    assert_close(y, expected, 1e-6, "y")
    for name, actual, wanted in zip(("dx", "dweight"), pull(dy), pull_two(dy), strict=True):
        assert_close(actual, wanted, 1e-6, name)
    dots = [e for e in jax.make_jaxpr(one)(x, weight).eqns if e.primitive.name == "dot_general"]
    assert [e.invars[0].aval.shape for e in dots] == [(2, 8)]


def test_linear_adds_its_bias():
    dtypes = {"dtype": "float32", "param_dtype": "float32"}
    linear = Linear(6, 3, axes=("embed", "heads"), rngs=RNGS, bias=True, **dtypes)
    assert linear.bias.get_metadata()["axes"] == ("heads",)
    linear.bias[...] = jnp.array([1.0, -2.0, 3.0])
    expected = X @ np.asarray(linear.weight[...]) + [1, -2, 3]
    assert_close(linear(jnp.asarray(X)), expected, 1e-6)


def test_swiglu_equals_its_formula():
    dtypes = {"dtype": "float32", "param_dtype": "float32"}
    swiglu = SwiGLU(SwiGLUConfig(width=10), 6, rngs=RNGS, **dtypes)
    gate, up, down = (
        np.asarray(linear.weight[...])
        for linear in (swiglu.gate_proj, swiglu.up_proj, swiglu.down_proj)
    )
    expected = (X @ gate / (1 + np.exp(-X @ gate)) * (X @ up)) @ down
    assert_close(swiglu(jnp.asarray(X)), expected, 1e-5)


def test_rotation_makes_products_depend_on_distance_alone():
    q, k = np.random.default_rng(2).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(i, j):
        at = [rotate(jnp.asarray(a), jnp.array([[n]]), 100.0) for a, n in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert product(0, 0) == pytest.approx(float((q * k).sum()), rel=1e-6)
    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)
    # channel i turns with channel i + 4, by position * 100^(-i/4)
    turned = rotate(jnp.eye(8)[None, :1, None, :], jnp.array([[2]]), 100.0)[0, 0, 0]
    np.testing.assert_allclose(turned[jnp.array([0, 4])], [np.cos(2), np.sin(2)], rtol=1e-6)
    assert float(jnp.abs(turned).sum()) == pytest.approx(abs(np.cos(2)) + abs(np.sin(2)), rel=1e-6)


def test_scaled_rotation_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    scaling = RopeScaling(factor=8.0, low_turns=1.0, high_turns=4.0, original_length=64)
    plain = 100.0 ** (-np.arange(8) / 8)
    expected = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength > 64 / 1:
            expected.append(frequency / 8)
        elif wavelength < 64 / 4:
            expected.append(frequency)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    changed = np.asarray(expected) / plain
    assert changed.min() == 1 / 8 and changed.max() == 1 and len(set(changed)) > 3
    found = rotary_frequencies(8, 100.0, scaling, jnp.dtype("float32"))
    assert_close(found, expected, 1e-6)
    x = jnp.ones((1, 1, 1, 16))
    turned = rotate(x, jnp.array([[5]]), 100.0, scaling)[0, 0, 0, :8]
    assert_close(turned, np.cos(5 * np.array(expected)) - np.sin(5 * np.array(expected)), 1e-5)


def convolve(x, weight):
    """silu of the causal convolution of one row, tap by tap."""
    width = len(weight)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(width):
            if t - (width - 1) + j >= 0:
                y[t] += weight[j] * x[t - (width - 1) + j]
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_short_convolution_equals_its_formula_and_restarts_per_segment(width):
    conv = ShortConv(6, width, param_dtype="float32", rngs=RNGS)
    conv.weight[...] = jax.random.normal(jax.random.key(3), conv.weight.shape)
    weight = np.asarray(conv.weight[...])
    expected = np.stack([convolve(row, weight) for row in X])
    assert_close(conv(jnp.asarray(X), None, None), expected, 1e-6, "one segment")
    ids = jnp.array([[0, 0, 1, 2, 2, 2, 2, 2, 3, 3, -1]] * 2)
    pieces = [X[:, :2], X[:, 2:3], X[:, 3:8], X[:, 8:10], X[:, 10:]]
    expected = [np.stack([convolve(row, weight) for row in piece]) for piece in pieces]
    actual = conv(jnp.asarray(X), None, ids)
    assert_close(actual, np.concatenate(expected, 1), 1e-6, "several segments")


@pytest.mark.parametrize("width", [1, 2, 4])
def test_short_convolution_continues_from_its_tail_after_any_number_of_tokens(width):
    conv = ShortConv(6, width, param_dtype="float32", rngs=RNGS)
    whole = conv(jnp.asarray(X), None, None)
    for first in range(5):
        counts = jnp.array([first, first + 2])
        empty = conv.empty_tail(2, "float32")
        tail = conv.tail_after(empty, jnp.asarray(X[:, :6]), counts)
        for row, count in enumerate(counts.tolist()):
            rest = conv(jnp.asarray(X[row : row + 1, count:]), tail[row : row + 1], None)
            assert_close(rest, whole[row : row + 1, count:], 1e-6, f"after {count} tokens")


def test_short_convolution_has_right_gradients_for_rows_shorter_than_its_width():
    conv = ShortConv(6, 4, param_dtype="float32", rngs=RNGS)
    x = jnp.asarray(X[:, :2])
    tail = jnp.asarray(X[:, 5:8])

    def loss(x, tail):
        return conv(jnp.asarray(x), jnp.asarray(tail), None).sum()

    check_grads(loss, (x, tail), order=1, modes=["rev"], rtol=1e-2)
