"""One step of decoding: every implementation against the recurrence, kernels also in place."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, gated_delta_rule, gated_delta_step
from pallas_kernels.gated_delta_step import api, pallas_gpu, pallas_tpu
from pallas_kernels.gated_delta_step.cases import BY_NAME, CASES, Case, accepted, tagged
from pallas_kernels.tpu_compiler import CHIPS, compile_for
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

H200, V6E = dispatch.Target("gpu", "NVIDIA H200"), dispatch.Target("tpu", "TPU v6 lite")
NAMES = ("q", "k", "v", "g", "beta", "state")
TAKEN = BY_NAME["grouped"].problem("bfloat16")
written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernel is written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
)


@functools.partial(jax.jit, static_argnames=("implementation",), compiler_options=QUICK_COMPILE)
def outputs_and_gradients(arguments, cotangents, implementation):
    """{"o", "state", "dq", ...}"""
    step = functools.partial(gated_delta_step, implementation=implementation)
    outputs, pullback = jax.vjp(lambda x: step(**x), arguments)
    gradients = {f"d{name}": x for name, x in pullback(cotangents)[0].items()}
    return dict(zip(("o", "state"), outputs, strict=True)) | gradients


@functools.cache
def drawn(case: Case, dtype: str):
    """Arguments, cotangents, and the reference's results from the same values in fp32 or wider."""
    arguments, _, cotangents = case.draw(jax.random.key(1), dtype)
    wide = jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), (arguments, cotangents)
    )
    return arguments, cotangents, outputs_and_gradients(*wide, "reference")


def check(case: Case, dtype: str, actual):
    """`actual(arguments) -> (o, state)` against the reference."""
    arguments, _, expected = drawn(case, dtype)
    for name, x in zip(("o", "state"), actual(arguments), strict=True):
        assert_close(x, expected[name], accepted(dtype)[name], f"{case.name}: {name}")


@pytest.mark.covers("gated_delta_step", "xla")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", tagged("ci"), ids=lambda case: case.name)
def test_xla_matches_the_reference(case, dtype):
    arguments, cotangents, expected = drawn(case, dtype)
    actual = outputs_and_gradients(arguments, cotangents, "xla")
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted(dtype)[name], f"{case.name}: {name}")


def test_float64_stays_float64(float64):
    case = BY_NAME["small"]
    arguments, cotangents, expected = drawn(case, "float64")
    actual = outputs_and_gradients(arguments, cotangents, "xla")
    assert {x.dtype.name for x in actual.values()} == {"float64"}
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted("float64")[name], name)


@pytest.mark.covers("gated_delta_step", "{implementation}", "forward")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_steps_one_after_another_are_the_rule_over_the_row(key, implementation):
    B, T, Hk, H, K, V = 2, 6, 2, 4, 16, 24
    keys = jax.random.split(key, 6)
    q, k = (jax.random.normal(x, (B, T, Hk, K)) / K**0.5 for x in keys[:2])
    v, state = jax.random.normal(keys[2], (B, T, H, V)), jax.random.normal(keys[3], (B, H, K, V))
    g = jax.nn.log_sigmoid(jax.random.normal(keys[4], (B, T, H)))
    row = (q, k, v, g, jax.random.uniform(keys[5], (B, T, H)))
    expected = gated_delta_rule(*row, initial_state=state, implementation="reference")

    def step(state, token):
        o, state = gated_delta_step(*token, state, implementation=implementation)
        return state, o

    state, o = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in row))
    assert_close(jnp.moveaxis(o, 0, 1), expected[0], 1e-5, "o")
    assert_close(state, expected[1], 1e-5, "state")


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_row_without_decay_and_strength_keeps_its_state(implementation):
    arguments, _, _ = BY_NAME["grouped"].draw(jax.random.key(0), "float32")
    for name in ("g", "beta"):
        arguments[name] = arguments[name].at[0].set(0)
    _, state = gated_delta_step(**arguments, implementation=implementation)
    assert (state[0] == arguments["state"][0]).all()
    assert not jnp.isclose(state[1], arguments["state"][1]).all()


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("q", lambda x: x[:, None], r"q has 4 axes; it must be 3: \[B, Hk, K\]"),
        ("state", lambda x: x[:1], r"state has shape \(1, 6, 64, 128\); it must be \(2, 6"),
        ("beta", lambda x: x[:, :2], r"beta has shape \(2, 2\); it must be \(2, 6\)"),
        ("v", lambda x: x[:, :5], "5 is not a multiple of 2"),
        ("g", lambda x: -x, "a log decay must be <= 0"),
    ],
)
def test_wrong_arguments_are_named(name, wrong, message):
    arguments, _, _ = BY_NAME["grouped"].draw(jax.random.key(0), "float32")
    arguments[name] = wrong(arguments[name])
    with pytest.raises(ValueError, match=message):
        gated_delta_step(**arguments)


def test_auto_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    for target, name in ((H200, "pallas_gpu"), (V6E, "pallas_tpu")):
        for case in CASES:
            if case.V % 128 == 0:
                problem = case.problem("bfloat16")
                assert dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, target).name == name


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({"dtype": "float16"}, H200, "bfloat16 or float32"),
        ({"K": 96}, H200, "K must be one of"),
        ({"V": 96}, H200, "V must be a multiple of 64"),
        ({}, dispatch.Target("gpu", "NVIDIA A100-SXM4-80GB"), "needs an NVIDIA H100 or H200"),
        ({"dtype": "float64"}, V6E, "bfloat16 or float32"),
        ({"K": 60}, V6E, "K must be a multiple of 8"),
        ({"V": 64}, V6E, "V must be a multiple of 128"),
        ({}, dispatch.Target("tpu", "TPU v4"), "needs one of"),
    ],
)
def test_what_the_kernels_decline_falls_back_to_xla_with_the_reason(
    change, target, reason, monkeypatch
):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    problem = dataclasses.replace(TAKEN, **change)
    choice = dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, target)
    assert choice.name == "xla"
    assert reason in dict(choice.skipped)[f"pallas_{target.platform}"]


def tpu_interpreted(arguments):
    step = functools.partial(pallas_tpu.step, arguments["k"].shape[-1] ** -0.5)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        return jax.jit(step)(*(arguments[name] for name in NAMES))


@pytest.mark.covers("gated_delta_step", "pallas_tpu", "forward", how="interpreted")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grouped", "wide"])
def test_the_tpu_kernel_matches_the_reference(name, dtype):
    check(BY_NAME[name], dtype, tpu_interpreted)


def test_gradients_through_a_kernel_are_those_of_the_reference():
    case = BY_NAME["grouped"]
    arguments, cotangents, expected = drawn(case, "float32")
    run = functools.partial(api.IMPLEMENTATIONS["pallas_tpu"].run, case.K**-0.5)
    with pltpu.force_tpu_interpret_mode():
        pullback = jax.vjp(run, *(arguments[name] for name in NAMES))[1]
    for name, actual in zip(NAMES, pullback(cotangents), strict=True):
        assert_close(actual, expected[f"d{name}"], accepted("float32")[f"d{name}"], f"d{name}")


def test_a_step_of_the_grid_holds_whole_registers_of_heads_or_all():
    assert pallas_tpu.heads_per_step(32, 128 * 128 * 4) == 16
    assert pallas_tpu.heads_per_step(6, 192 * 384 * 4) == 6
    assert pallas_tpu.heads_per_step(24, 256 * 256 * 4) == 8


@pytest.mark.covers("gated_delta_step", "pallas_tpu", "forward", how="interpreted")
def test_the_tpu_kernel_with_several_steps_a_row_matches_the_reference(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "_STATE_BYTES", 8 * 8 * 128 * 4)  # eight heads
    check(Case("many-heads", 1, 8, 16, 8, 128), "bfloat16", tpu_interpreted)


@pytest.mark.covers("gated_delta_step", "pallas_tpu", "forward", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["64", "natsl-800m-64", "gdn-340m-64"])
def test_the_tpu_kernel_compiles_for_every_chip_and_updates_in_place(name, chip):
    case = BY_NAME[name]
    arguments, _, _ = jax.eval_shape(
        functools.partial(case.draw, dtype="bfloat16"), jax.random.key(0)
    )
    step = functools.partial(pallas_tpu.step, case.K**-0.5)
    _, compiled = compile_for(chip, step, *(arguments[n] for n in NAMES), donate=(5,))
    memory = compiled.memory_analysis()
    state = 4 * arguments["state"].size
    assert memory.alias_size_in_bytes == state
    assert memory.temp_size_in_bytes < state / 20


@pytest.mark.covers("gated_delta_step", "pallas_gpu", "forward", how="interpreted")
@written_for
@pytest.mark.parametrize(
    ("shape", "columns", "dtype"),
    [
        ((1, 1, 2, 64, 128), 32, "bfloat16"),
        ((2, 1, 1, 192, 64), 32, "float32"),
        ((1, 1, 1, 256, 64), 64, "bfloat16"),
        pytest.param((2, 1, 2, 64, 128), 32, "float32", marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 64, 128), 64, "float32", marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 192, 384), 32, "bfloat16", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 256, 256), 32, "float32", marks=pytest.mark.slow),
    ],
)
def test_the_gpu_kernel_matches_the_reference_interpreted(shape, columns, dtype):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def interpreted(arguments):
        options = {"columns": columns, "blocks": 2, "interpret": plgpu.InterpretGPUParams()}
        step = functools.partial(pallas_gpu.step, arguments["k"].shape[-1] ** -0.5, **options)
        return jax.jit(step)(*(arguments[name] for name in NAMES))

    check(Case("interpreted", *shape), dtype, interpreted)


@pytest.mark.covers(
    "gated_delta_step", "pallas_gpu", "forward", how="compiled", where="cuda (lowered only)"
)
@written_for
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["1", "256", "natsl-800m-1", "natsl-800m-256", "gdn-340m-64"])
def test_the_gpu_kernel_lowers_for_cuda_and_updates_in_place(name, dtype):
    case = BY_NAME[name]
    arguments, _, _ = jax.eval_shape(functools.partial(case.draw, dtype=dtype), jax.random.key(0))
    step = jax.jit(functools.partial(pallas_gpu.step, case.K**-0.5))
    lowered = jax.export.export(step, platforms=["cuda"])
    module = lowered(*(arguments[name] for name in NAMES)).mlir_module()
    (call,) = (line for line in module.splitlines() if "custom_call @mosaic_gpu" in line)
    alias = "output_operand_alias<output_tuple_indices = [1], operand_index = 5"
    assert alias in call


def test_as_many_blocks_as_shared_memory_holds_at_most_three_a_multiprocessor():
    widths = {width: pallas_gpu.blocks_of(10**6, width) for width in (64, 128, 192, 256)}
    assert widths == {64: 396, 128: 396, 192: 396, 256: 264}
    assert pallas_gpu.blocks_of(48, 128) == 48


@pytest.mark.covers("gated_delta_step", "pallas_gpu", "forward")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gpu_kernel_on_a_gpu_matches_the_reference(case, dtype):
    check(case, dtype, functools.partial(call, implementation="pallas_gpu"))


def call(arguments, implementation):
    return gated_delta_step(**arguments, implementation=implementation)
