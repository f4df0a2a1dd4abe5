"""The Hopper kernels of the gated delta rule: what they decline, interpreted, lowered, on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from pallas_kernels import dispatch, gated_delta_rule
from pallas_kernels.gated_delta_rule import api, pallas_gpu, xla

written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
H200 = dispatch.Target("gpu", "NVIDIA H200")
TAKEN = api.Problem(
    B=1,
    T=4096,
    Hk=2,
    H=4,
    K=128,
    V=256,
    dtype="bfloat16",
    chunk_size=64,
    write_mask=True,
    segments=True,
)


def inputs(key, shape, *, segments=False, mask=False, gate=3.0):
    """Random arguments: unit keys and queries, gates of a trained model's size at `gate` = 3."""
    B, T, Hk, H, K, V = shape
    keys = jax.random.split(key, 8)

    def unit(key):
        x = jax.random.normal(key, (B, T, Hk, K))
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    boundary = jax.random.uniform(keys[6], (B, T)) < 0.02
    weight = jax.random.bernoulli(keys[7], 0.5, (B, -(-T // 64), H)).astype(jnp.float32)
    return {
        "q": unit(keys[0]),
        "k": unit(keys[1]),
        "v": jax.random.normal(keys[2], (B, T, H, V)).astype(jnp.bfloat16),
        "g": jax.nn.log_sigmoid(jax.random.normal(keys[3], (B, T, H)) + gate),
        "beta": jax.random.uniform(keys[4], (B, T, H)),
        "initial_state": 0.3 * jax.random.normal(keys[5], (B, H, K, V)),
        "write_mask": weight if mask else None,
        "segment_ids": jnp.cumsum(boundary, axis=1).astype(jnp.int32) if segments else None,
    }


@functools.partial(jax.jit, static_argnames=("implementation",))
def run(arguments, implementation):
    return gated_delta_rule(**arguments, implementation=implementation)


def assert_matches_reference(arguments, actual):
    expected = run(arguments, "reference")
    assert_close(actual[0], expected[0], 5e-3, "o")
    assert_close(actual[1], expected[1], 5e-3, "final_state", floor=1e-6)


@written_for
def test_auto_takes_the_kernels_on_a_hopper_gpu():
    assert dispatch.choose(api.IMPLEMENTATIONS, "auto", TAKEN, H200).name == "pallas_gpu"


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"dtype": "float32"}, "NVIDIA H200", "bfloat16"),
        ({"K": 256}, "NVIDIA H200", "K must be one of"),
        ({"V": 96}, "NVIDIA H200", "V must be one of"),
        ({"chunk_size": 128}, "NVIDIA H200", "chunk_size 64"),
        ({}, "NVIDIA A100-SXM4-80GB", "needs an NVIDIA H100 or H200"),
    ],
)
def test_what_the_kernels_decline_falls_back_to_xla_with_the_reason(
    change, device, reason, monkeypatch
):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    problem, target = dataclasses.replace(TAKEN, **change), dispatch.Target("gpu", device)
    choice = dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, target)
    assert choice.name == "xla"
    assert reason in dict(choice.skipped)["pallas_gpu"]
    with pytest.raises(ValueError, match=reason):
        dispatch.choose(api.IMPLEMENTATIONS, "pallas_gpu", problem, target)


def test_another_jax_version_is_declined(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", "0.0.0")
    assert "written for JAX 0.0.0" in pallas_gpu.unsupported(TAKEN, H200)


def test_without_a_mask_any_chunk_size_is_taken(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    problem = dataclasses.replace(TAKEN, write_mask=False, chunk_size=100)
    assert pallas_gpu.unsupported(problem, H200) is None


def test_gradients_are_those_of_xla_until_there_is_a_backward_kernel(key, monkeypatch):
    arguments = inputs(key, (1, 70, 1, 2, 16, 8), segments=True, mask=True)
    segment_ids = arguments.pop("segment_ids")
    options = {"segment_ids": segment_ids, "scale": 0.25, "chunk_size": 64}

    def forward(q, k, v, g, beta, initial_state, write_mask, segment_ids, *, scale):
        return xla.gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, write_mask=write_mask,
            segment_ids=segment_ids, scale=scale, chunk_size=64,
        )  # fmt: skip

    # The kernels themselves do not run here: this is about what is wired around them.
    monkeypatch.setattr(pallas_gpu, "forward", forward)

    def loss(rule, arguments):
        o, state = rule(**arguments, **options)
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(state**2)

    # Compiling takes most of this test's time; at this level it is a third of the default's.
    quick = {"xla_backend_optimization_level": 0}
    gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0, compiler_options=quick)
    expected = gradient(xla.gated_delta_rule, arguments)
    for name, actual in gradient(pallas_gpu.gated_delta_rule, arguments).items():
        assert_close(actual, expected[name], 1e-6, f"d{name}")

    del arguments["write_mask"]
    without = jax.eval_shape(
        jax.grad(
            lambda x: loss(functools.partial(pallas_gpu.gated_delta_rule, write_mask=None), x)
        ),
        arguments,
    )
    assert without.keys() == arguments.keys()


@written_for
@pytest.mark.parametrize("tiles", [1, 2, 7, 64, 512, 2048])
@pytest.mark.parametrize("heads", [1, 6, 16, 48, 1000])
def test_every_stretch_of_a_split_row_owns_a_tile(heads, tiles):
    from pallas_kernels.gated_delta_rule.pallas_gpu_split import stretches

    pieces = stretches(1, heads, tiles, 128, 256)
    assert (pieces - 1) * -(-tiles // pieces) < tiles


@written_for
def test_rows_are_split_only_when_heads_are_few():
    from pallas_kernels.gated_delta_rule.pallas_gpu_split import stretches

    assert stretches(1, 16, 512, 128, 128) > 4
    assert stretches(8, 6, 64, 128, 256) == 1


@written_for
@pytest.mark.parametrize("pieces", [1, 2])
def test_interpreted_kernels_match_the_reference(key, pieces):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments = inputs(key, (1, 203, 1, 1, 64, 64), segments=pieces == 2, mask=pieces == 2)
    forward = functools.partial(
        pallas_gpu.forward, scale=0.125, pieces=pieces, interpret=plgpu.InterpretGPUParams()
    )
    assert_matches_reference(arguments, jax.jit(lambda x: forward(**x))(arguments))


@written_for
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_inverse_is_stable_for_identical_keys(beta):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gated_delta_rule.pallas_gpu_inverse import tile_inverses
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    k = jnp.zeros((1, 64, 1, 64), jnp.bfloat16).at[..., 0].set(1)
    gates = pack_gates(jnp.zeros((1, 64, 1)), jnp.full((1, 64, 1), beta), None, None)
    actual = tile_inverses(k, gates, interpret=plgpu.InterpretGPUParams())
    expected = np.linalg.inv(np.eye(64) + beta * np.tril(np.ones((64, 64)), -1))
    assert_close(actual[0, 0, 0], expected, 5e-3, "inverse")


@written_for
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 300, 2, 4, 64, 64), {"pieces": 1}),
        ((2, 512, 2, 2, 128, 256), {"pieces": 3, "segments": True, "mask": True}),
        ((1, 512, 2, 2, 192, 384), {"pieces": 2}),
    ],
)
def test_kernels_lower_for_cuda_without_a_gpu(key, shape, options):
    pieces = options.pop("pieces")
    arguments = jax.eval_shape(lambda key: inputs(key, shape, **options), key)
    forward = functools.partial(pallas_gpu.forward, scale=0.1, pieces=pieces)
    exported = jax.export.export(jax.jit(lambda x: forward(**x)), platforms=["cuda"])(arguments)
    kernels = 2 if pieces == 1 else 4
    assert exported.mlir_module().count("custom_call @mosaic_gpu") == kernels


@pytest.mark.gpu
@written_for
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 2, 2, 128, 128), {}),
        ((1, 63, 2, 2, 64, 64), {}),
        ((1, 65, 2, 4, 64, 128), {}),
        ((1, 999, 2, 4, 128, 256), {"segments": True, "mask": True}),
        ((2, 1000, 2, 4, 128, 128), {"segments": True}),
        ((2, 1000, 2, 4, 128, 128), {"gate": -60.0}),
        ((1, 4096, 1, 2, 64, 64), {"segments": True, "mask": True}),
        ((1, 4096, 2, 2, 128, 256), {"mask": True}),
        ((1, 4096, 1, 2, 192, 384), {}),
        ((1, 1024, 2, 2, 128, 512), {}),
    ],
)
def test_kernels_on_a_gpu_match_the_reference(key, shape, options):
    arguments = inputs(key, shape, **options)
    assert_matches_reference(arguments, run(arguments, "pallas_gpu"))
