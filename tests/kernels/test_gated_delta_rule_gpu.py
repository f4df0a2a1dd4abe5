"""The Hopper kernels of the gated delta rule: what they decline, interpreted, lowered, on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from pallas_kernels import dispatch, gated_delta_rule
from pallas_kernels.gated_delta_rule import api, pallas_gpu

written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
H200 = dispatch.Target("gpu", "NVIDIA H200")
KEY_WIDTHS, VALUE_WIDTHS = (64, 128, 192, 256), (64, 128, 256, 384, 512)
EVERY_PAIR = [(K, V) for K in KEY_WIDTHS for V in VALUE_WIDTHS]
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


GRADIENT_RATIO = {
    "q": 8e-3,
    "k": 8e-3,
    "v": 8e-3,
    "g": 2e-2,
    "beta": 2e-2,
    "initial_state": 8e-3,
    "write_mask": 2e-2,
}


def assert_gradients_match_reference(key, arguments, gradients):
    """`gradients(arguments, (do, dfinal))` against those of the reference in fp32."""
    keys = jax.random.split(key)
    do = jax.random.normal(keys[0], arguments["v"].shape).astype(jnp.bfloat16)
    dfinal = jax.random.normal(keys[1], arguments["initial_state"].shape)
    names = [name for name in GRADIENT_RATIO if arguments[name] is not None]

    segment_ids = arguments["segment_ids"]

    @jax.jit
    def reference(exact, cotangents):
        def outputs(exact):
            return gated_delta_rule(**exact, segment_ids=segment_ids, implementation="reference")

        return jax.vjp(outputs, exact)[1](cotangents)[0]

    exact = {name: arguments[name].astype(jnp.float32) for name in names}
    expected = reference(exact, (do.astype(jnp.float32), dfinal))
    actual = dict(zip(GRADIENT_RATIO, gradients(arguments, (do, dfinal)), strict=True))
    for name in names:
        assert_close(actual[name], expected[name], GRADIENT_RATIO[name], f"d{name}")


@written_for
def test_auto_takes_the_kernels_on_a_hopper_gpu():
    assert dispatch.choose(api.IMPLEMENTATIONS, "auto", TAKEN, H200).name == "pallas_gpu"


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"dtype": "float32"}, "NVIDIA H200", "bfloat16"),
        ({"K": 96}, "NVIDIA H200", "K must be one of"),
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


@pytest.mark.parametrize("width", KEY_WIDTHS)
def test_every_pair_of_widths_is_taken(width, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    for value_width in VALUE_WIDTHS:
        problem = dataclasses.replace(TAKEN, K=width, V=value_width)
        assert pallas_gpu.unsupported(problem, H200) is None


def test_without_a_mask_any_chunk_size_is_taken(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    problem = dataclasses.replace(TAKEN, write_mask=False, chunk_size=100)
    assert pallas_gpu.unsupported(problem, H200) is None


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", how="interpreted")
@written_for
@pytest.mark.parametrize(
    ("T", "pieces", "heads", "widths"),
    [
        (67, 2, 2, (64, 64)),
        pytest.param(150, 1, 2, (64, 64), marks=pytest.mark.slow),
        pytest.param(150, 3, 2, (64, 64), marks=pytest.mark.slow),
        *(pytest.param(67, 2, 1, pair, marks=pytest.mark.slow) for pair in EVERY_PAIR),
    ],
)
def test_interpreted_gradients_match_the_reference(key, T, pieces, heads, widths, quick_compile):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments = inputs(key, (1, T, 1, heads, *widths), segments=True, mask=True)
    options = {"scale": widths[0] ** -0.5, "interpret": plgpu.InterpretGPUParams()}

    def actual(arguments, cotangents):
        o, final_state, *kept = pallas_gpu.forward(**arguments, **options, pieces=pieces)
        kept = dict(
            zip(
                ("inverses", "states", "transitions", "do", "dfinal"),
                (*kept, *cotangents),
                strict=True,
            )
        )
        return (o, final_state), pallas_gpu.backward(**arguments, **kept, **options)

    def gradients(arguments, cotangents):
        outputs, found = jax.jit(actual)(arguments, cotangents)
        assert_matches_reference(arguments, outputs)
        return found

    assert_gradients_match_reference(key, arguments, gradients)


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", "backward", how="interpreted")
@written_for
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 136, 1, 2, 64, 64), marks=pytest.mark.slow),
        (1, 72, 1, 1, 128, 128),
        pytest.param((2, 136, 1, 1, 128, 256), marks=pytest.mark.slow),
        pytest.param((1, 72, 1, 1, 256, 128), marks=pytest.mark.slow),
    ],
)
def test_interpreted_tile_gradients_are_those_of_their_formulas(key, shape):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gated_delta_rule.pallas_gpu_gradients import tile_gradients
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    given = inputs(key, shape, segments=True)
    (B, T, _, H, K, V), N = shape, -(-shape[1] // 64)
    keys = iter(jax.random.split(key, 5))
    do, dv, errors = (jax.random.normal(next(keys), (B, T, H, V)) for _ in range(3))
    states, dstates = (jax.random.normal(next(keys), (B, H, N, V, K)) for _ in range(2))
    do, dv, errors, *states = (x.astype(jnp.bfloat16) for x in (do, dv, errors, states, dstates))
    # As `pallas_gpu_replay` leaves them: whole tiles of K columns a buffer, two buffers or more.
    buffers = max(2, -(-V // K))
    padding = ((0, 0), (0, 64 * N - T), (0, 0), (0, buffers * K - V))
    parts = jnp.split(jnp.pad(errors, padding), buffers, axis=-1)
    gates = pack_gates(given["g"], given["beta"], None, given["segment_ids"])
    run = functools.partial(tile_gradients, scale=0.1, interpret=plgpu.InterpretGPUParams())
    *padded, dgates = jax.jit(run)(given["q"], given["k"], do, dv, parts, *states, gates)
    actual = (*(x[:, :T] for x in padded), dgates)
    arrays = (given["q"], given["k"], do, dv, errors, *states)
    exact = tile_formulas(*(x.astype(jnp.float32) for x in arrays), gates, scale=0.1)
    for name, x, expected in zip(("dq", "dk", "dgates"), actual, exact, strict=True):
        assert_close(x, expected, 5e-3, name)


@functools.partial(jax.jit, static_argnames="scale")
def tile_formulas(q, k, do, dv, errors, states, dstates, gates, scale):
    """dq, dk and the gates' gradients as HOPPER.md has them, tile by tile; no autodiff."""
    (B, T, H, _), N = do.shape, gates.shape[2]

    def tiles(x):  # [B, T, h, W] -> [B, H, N, C, W]
        x = jnp.repeat(jnp.pad(x, ((0, 0), (0, N * 64 - T), (0, 0), (0, 0))), H // x.shape[2], 2)
        return x.reshape(B, N, 64, H, -1).transpose(0, 3, 1, 2, 4)

    q, k, do, dv, errors = map(tiles, (q, k, do, dv, errors))
    c, beta, into, out, document = (gates[..., i, :, None] for i in range(5))
    decay = jnp.exp2(c - c.mT) * (document == document.mT)
    of_outputs = scale * jnp.tril(do @ errors.mT * decay)
    of_errors = -jnp.tril(dv @ errors.mT * decay, -1)
    dread, dwrite, dkeys = scale * do @ states, errors @ dstates, dv @ states
    dq = into * dread + of_outputs * beta.mT @ k
    dk = out * dwrite - into * dkeys + of_errors * beta.mT @ k
    dk += beta * (of_outputs.mT @ q + of_errors.mT @ k)
    pairs = of_outputs * (q @ k.mT) + of_errors * (k @ k.mT)
    dinto = (dread * q).sum(-1) - (dkeys * k).sum(-1)
    dinto = dinto.at[..., -1].add((states * dstates).sum((-1, -2)))
    dc = jnp.log(2.0) * ((pairs * beta.mT).sum(-1) - (pairs * beta.mT).sum(-2))
    dgates = (dc, pairs.sum(-2), dinto, (dwrite * k).sum(-1), jnp.zeros_like(dc))

    def tokens(x):
        return x.transpose(0, 2, 3, 1, 4).reshape(B, N * 64, H, -1)[:, :T]

    return tokens(dq), tokens(dk), jnp.stack(dgates, 3)


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


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", "forward", how="interpreted")
@pytest.mark.slow
@written_for
@pytest.mark.parametrize("pieces", [1, 2])
def test_interpreted_kernels_match_the_reference(key, pieces):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments = inputs(key, (1, 203, 1, 1, 64, 64), segments=pieces == 2, mask=pieces == 2)
    forward = functools.partial(
        pallas_gpu.forward, scale=0.125, pieces=pieces, interpret=plgpu.InterpretGPUParams()
    )
    assert_matches_reference(arguments, jax.jit(lambda x: forward(**x)[:2])(arguments))


@written_for
@pytest.mark.parametrize("beta", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_the_inverse_is_stable_for_identical_keys(beta):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gated_delta_rule.pallas_gpu_inverse import tile_inverses
    from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import pack_gates

    k = jnp.zeros((1, 64, 1, 64), jnp.bfloat16).at[..., 0].set(1)
    gates = pack_gates(jnp.zeros((1, 64, 1)), jnp.full((1, 64, 1), beta), None, None)
    actual = tile_inverses(k, gates, interpret=plgpu.InterpretGPUParams())
    expected = np.linalg.inv(np.eye(64) + beta * np.tril(np.ones((64, 64)), -1))
    assert_close(actual[0, 0, 0], expected, 5e-3, "inverse")


@pytest.mark.covers(
    "gated_delta_rule", "pallas_gpu", "forward", how="compiled", where="cuda (lowered only)"
)
@written_for
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 512, 2, 2, 128, 256), {"pieces": 3, "segments": True, "mask": True}),
        pytest.param((1, 300, 2, 4, 64, 64), {"pieces": 1}, marks=pytest.mark.slow),
        *(
            pytest.param((1, 512, 2, 2, *pair), {"pieces": 2}, marks=pytest.mark.slow)
            for pair in EVERY_PAIR
        ),
    ],
)
def test_kernels_lower_for_cuda_without_a_gpu(key, shape, options):
    options = dict(options)
    pieces = options.pop("pieces")
    arguments = jax.eval_shape(lambda key: inputs(key, shape, **options), key)
    forward = functools.partial(pallas_gpu.forward, scale=0.1, pieces=pieces)
    exported = jax.export.export(jax.jit(lambda x: forward(**x)), platforms=["cuda"])(arguments)
    kernels = 2 if pieces == 1 else 4
    assert exported.mlir_module().count("custom_call @mosaic_gpu") == kernels


@pytest.mark.covers(
    "gated_delta_rule", "pallas_gpu", "backward", how="compiled", where="cuda (lowered only)"
)
@written_for
@pytest.mark.parametrize(
    ("pieces", "widths"),
    [
        (2, (256, 256)),
        pytest.param(1, (128, 128), marks=pytest.mark.slow),
        *(pytest.param(2, pair, marks=pytest.mark.slow) for pair in EVERY_PAIR),
    ],
)
def test_backward_kernels_lower_for_cuda_without_a_gpu(key, pieces, widths):
    K, V = widths
    arguments = jax.eval_shape(lambda key: inputs(key, (1, 131, 1, 2, K, V), mask=True), key)
    kept = {
        "inverses": jax.ShapeDtypeStruct((1, 2, 3, 64, 64), jnp.bfloat16),
        "states": jax.ShapeDtypeStruct((1, 2, pieces, V, K), jnp.float32),
        "transitions": None,
        "do": arguments["v"],
        "dfinal": arguments["initial_state"],
    }

    if pieces > 1:
        half = jax.ShapeDtypeStruct((1, 2, pieces - 1, K, K), jnp.bfloat16)
        kept["transitions"] = (half, half)

    def backward(arguments):
        return pallas_gpu.backward(**arguments, scale=0.1)

    lowered = jax.export.export(jax.jit(backward), platforms=["cuda"])
    module = lowered({**arguments, **kept}).mlir_module()
    assert module.count("custom_call @mosaic_gpu") == (3 if pieces == 1 else 5)


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", "forward")
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


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", "backward")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 300, 2, 4, 64, 64), {"segments": True, "mask": True}),
        ((2, 512, 2, 2, 128, 256), {}),
        ((1, 999, 2, 4, 128, 128), {"segments": True, "mask": True}),
        ((1, 512, 1, 2, 192, 384), {"mask": True}),
        ((1, 4096, 2, 2, 128, 128), {}),
        ((1, 4096, 1, 2, 128, 256), {"segments": True, "mask": True}),
    ],
)
def test_gradients_on_a_gpu_match_the_reference(key, shape, options):
    arguments = inputs(key, shape, **options)
    assert_gradients_match_reference(key, arguments, lambda *given: on_a_gpu(*given)[1])


@jax.jit
def on_a_gpu(arguments, cotangents):
    """(o, final_state), and the gradients in the order of GRADIENT_RATIO."""
    floating = {name: arguments[name] for name in GRADIENT_RATIO}
    segment_ids = arguments["segment_ids"]

    def outputs(floating):
        return gated_delta_rule(**floating, segment_ids=segment_ids, implementation="pallas_gpu")

    results, pullback = jax.vjp(outputs, floating)
    (found,) = pullback(cotangents)
    return results, [found[name] for name in GRADIENT_RATIO]


@pytest.mark.covers("gated_delta_rule", "pallas_gpu")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize(("K", "V"), EVERY_PAIR)
def test_every_pair_of_widths_on_a_gpu_matches_the_reference(key, K, V):
    arguments = inputs(key, (1, 200, 1, 2, K, V), segments=True, mask=True)

    def gradients(arguments, cotangents):
        results, found = on_a_gpu(arguments, cotangents)
        assert_matches_reference(arguments, results)
        return found

    assert_gradients_match_reference(key, arguments, gradients)
