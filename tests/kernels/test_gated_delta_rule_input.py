"""Bad input of the gated delta rule is refused in one line, before anything compiles."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gated_delta_rule

B, T, Hk, H, K, V = 2, 70, 2, 4, 8, 6


def shaped(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def arguments(**changed):
    return {
        "q": shaped(B, T, Hk, K),
        "k": shaped(B, T, Hk, K),
        "v": shaped(B, T, H, V),
        "g": shaped(B, T, H),
        "beta": shaped(B, T, H),
    } | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": shaped(B, T, K)}, r"q has 3 axes; it must be 4"),
        ({"k": shaped(B, T, Hk, 9)}, r"k has shape \(2, 70, 2, 9\); it must be \(2, 70, 2, 8\)"),
        ({"v": shaped(B, 69, H, V)}, r"v has shape \(2, 69, 4, 6\); it must be \(2, 70, 4, 6\)"),
        ({"v": shaped(B, T, 3, V)}, r"v has 3 heads, q and k have 2"),
        ({"g": shaped(B, T, Hk)}, r"g has shape \(2, 70, 2\); it must be \(2, 70, 4\)"),
        ({"beta": shaped(B, H, T)}, r"beta has shape \(2, 4, 70\); it must be \(2, 70, 4\)"),
        ({"initial_state": shaped(B, H, V, K)}, r"initial_state has shape \(2, 4, 6, 8\)"),
        ({"write_mask": shaped(B, 1, H)}, r"write_mask has shape \(2, 1, 4\).*\(2, 2, 4\)"),
        ({"segment_ids": shaped(T, dtype=jnp.int32)}, r"segment_ids has shape \(70,\)"),
        ({"chunk_size": 0}, r"chunk_size is 0"),
        ({"chunk_size": 6.5}, r"chunk_size is 6\.5"),
        ({"g": shaped(B, T, H) + 0.25}, r"g reaches 0\.25; a log decay must be <= 0"),
        ({"implementation": "cuda"}, r"choose one of"),
    ],
)
def test_wrong_values_and_shapes_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": shaped(B, T, Hk, K, dtype=jnp.int32)}, r"q has dtype int32; it must be floating"),
        ({"k": shaped(B, T, Hk, K, dtype=jnp.bfloat16)}, r"k has dtype bfloat16, q has float32"),
        ({"beta": shaped(B, T, H, dtype=jnp.int8)}, r"beta has dtype int8"),
        ({"segment_ids": shaped(B, T)}, r"segment_ids has dtype float32"),
        ({"scale": "big"}, r"scale is a str"),
    ],
)
def test_wrong_types_are_named(changed, message):
    with pytest.raises(TypeError, match=message):
        gated_delta_rule(**arguments(**changed))


def test_shapes_are_checked_while_tracing_too():
    with pytest.raises(ValueError, match="beta has shape"):
        jax.eval_shape(gated_delta_rule, *arguments(beta=shaped(B, T)).values())


def test_a_traced_positive_decay_cannot_be_seen_and_a_constant_one_can():
    inputs = arguments()
    positive = inputs.pop("g") + 1.0
    jax.eval_shape(lambda g: gated_delta_rule(**inputs, g=g), positive)
    with pytest.raises(ValueError, match="g reaches 1"):
        jax.eval_shape(lambda: gated_delta_rule(**inputs, g=positive))
