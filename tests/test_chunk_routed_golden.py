"""The authors' released NAtS-L layer, recorded on a GPU: our output and gradients against theirs.

Its backward leaves out same-chunk softmax pairs though its forward has them; with
`truncate_intra_softmax_grad` ours does too. The recording used TF32 products, hence 1e-3.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, rms_ratio
from flax import nnx
from golden.cut_natsl_layer import STRIDE
from mixer_cases import by_name, model_with, positions
from published import published

from jhybrid.config import ChunkRoutedConfig
from jhybrid.mixers import build_mixer

CUT = pathlib.Path(__file__).parent / "golden" / "natsl_layer.npz"
FULL = "goldens/natsl_layer_fp32.npz"

# Our parameter names; theirs are PyTorch's, with matrices [out, in] and taps [channels, 1, width].
NAMES = {
    "inputs.q_proj.weight": "q_proj.weight",
    "inputs.k_proj.weight": "k_proj.weight",
    "inputs.v_proj.weight": "v_proj.weight",
    "inputs.a_proj.weight": "a_proj.weight",
    "inputs.b_proj.weight": "b_proj.weight",
    "inputs.q_conv.weight": "q_conv1d.weight",
    "inputs.k_conv.weight": "k_conv1d.weight",
    "inputs.v_conv.weight": "v_conv1d.weight",
    "inputs.A_log": "A_log",
    "inputs.dt_bias": "dt_bias",
    "score_weight": "nats_layer.weight",
    "fusion_proj.weight": "nats_out_weights_layer.weight",
    "q_norm.weight": "q_norm.weight",
    "k_norm.weight": "k_norm.weight",
    "g_proj.weight": "g_proj.weight",
    "memory_norm.weight": "o_norm.weight1",
    "softmax_norm.weight": "o_norm.weight2",
    "o_proj.weight": "o_proj.weight",
}


def read(path):
    with np.load(path) as file:
        return {name: jnp.asarray(file[name].astype(np.float32)) for name in file}


@pytest.fixture(params=["cut", "full"])
def golden(request):
    """(arrays, stride of the rows kept of large results)."""
    if request.param == "cut":
        return read(CUT), STRIDE
    return read(published(FULL)), 1


def ours(array):
    """A parameter in our layout."""
    return array[:, 0].T if array.ndim == 3 else array.T


@functools.cache
def layer(truncated):
    """The layer's parameters and its jitted outputs and gradients."""
    config = ChunkRoutedConfig(
        num_heads=2,
        key_dim=64,
        value_dim=128,
        num_softmax_heads=4,
        truncate_intra_softmax_grad=truncated,
    )
    mixer = build_mixer(config, model_with(config, "float32", dim=256), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer)

    @jax.jit
    def gradients(params, x, cotangent):
        def loss(params, x):
            y, _, report = nnx.merge(graphdef, params)(x, None, positions(x))
            return (y * cotangent).sum(), (y, report)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    return params, gradients


def run(golden, *, truncated):
    """(y, dx, gradients by our names, report) for the recorded parameters, input and cotangent."""
    params, gradients = layer(truncated)
    values = {
        path: nnx.Param(ours(golden["p." + NAMES[".".join(path)]]))
        for path, _ in nnx.to_flat_state(params)
    }
    values = nnx.from_flat_state(list(values.items()))
    (_, (y, report)), (grads, dx) = gradients(values, golden["x"], golden["do"])
    return y, dx, by_name(grads), report


def test_reproduces_the_released_layer_and_its_truncated_gradients(golden):
    golden, stride = golden
    y, dx, grads, report = run(golden, truncated=True)
    decisions = np.array(report["decisions"])
    decisions[:, -1] = True  # the release marks the last chunk for both operations
    np.testing.assert_allclose(decisions.mean((0, 1)), [1 / 2, 1 / 3])
    assert_close(y[:, ::stride], golden["o"], 1e-3, "o")
    assert_close(dx[:, ::stride], golden["dx"], 3e-3, "dx")
    for name, theirs in NAMES.items():
        expected = golden["g." + theirs]
        # a matrix transposed back to [out, in], whose rows were cut
        actual = grads[name].T.reshape(-1, *expected.shape[1:])
        actual = actual[:: len(actual) // len(expected)]
        assert_close(actual, expected, 3e-3, theirs)


@pytest.mark.slow
def test_the_exact_gradient_is_the_default_and_differs_where_the_release_truncates():
    assert not ChunkRoutedConfig(
        num_heads=1, key_dim=2, value_dim=2, num_softmax_heads=1
    ).truncate_intra_softmax_grad
    golden = read(CUT)
    y, dx, grads, _ = run(golden, truncated=False)
    truncated_y, truncated_dx, truncated_grads, _ = run(golden, truncated=True)
    assert_close(y, truncated_y, 1e-5, "o")
    assert 0.3 < rms_ratio(dx, truncated_dx) < 0.4
    streams = {f"inputs.{s}_{part}.weight" for s in "qkv" for part in ("proj", "conv")}
    for name, gradient in grads.items():
        ratio = rms_ratio(gradient, truncated_grads[name])
        changes = name in streams | {"q_norm.weight", "k_norm.weight"}
        assert ratio > 0.3 if changes else ratio < 1e-4, f"{name}: {ratio}"
