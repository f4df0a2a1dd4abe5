"""The TPU kernels of the gated delta rule: what they decline, interpreted, compiled ahead of time.

No test here runs on a TPU. Interpreted, memory that was not written is NaN, reads outside raise and
races are looked for; compiled, by libtpu for each chip, shows that the kernels lower, not that they
are right.
"""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, gated_delta_rule
from pallas_kernels.gated_delta_rule import api, pallas_tpu
from pallas_kernels.gated_delta_rule.cases import BY_NAME, Case, accepted
from pallas_kernels.gated_delta_rule.pallas_tpu_backward import backward
from pallas_kernels.gated_delta_rule.pallas_tpu_forward import forward
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import TILE, Layout
from pallas_kernels.tpu_compiler import CHIPS, compile_for
from tests.closeness import assert_close
from tests.kernels.recurrences import drawn
from tests.quick_compile import QUICK_COMPILE

V6E = dispatch.Target("tpu", "TPU v6 lite")
TAKEN = api.Problem(
    B=1, T=4096, Hk=2, H=4, K=128, V=256, dtype="bfloat16", chunk_size=64, write_mask=True,
    segments=True,
)  # fmt: skip
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
)


def test_auto_takes_the_kernels_on_a_tpu():
    assert dispatch.choose(api.IMPLEMENTATIONS, "auto", TAKEN, V6E).name == "pallas_tpu"


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"dtype": "float16"}, "TPU v6 lite", "bfloat16 or float32"),
        ({"K": 96}, "TPU v6 lite", "K must be one of"),
        ({"V": 96}, "TPU v6 lite", "V must be one of"),
        ({"chunk_size": 256}, "TPU v6 lite", "at most 128"),
        ({"K": 64, "Hk": 1, "H": 17}, "TPU v6 lite", "17 value heads over 1 key heads"),
        ({}, "TPU v4", "needs one of"),
    ],
)
def test_what_the_kernels_decline_falls_back_to_xla_with_the_reason(change, device, reason):
    problem, target = dataclasses.replace(TAKEN, **change), dispatch.Target("tpu", device)
    choice = dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, target)
    assert choice.name == "xla"
    assert reason in dict(choice.skipped)["pallas_tpu"]
    with pytest.raises(ValueError, match=reason):
        dispatch.choose(api.IMPLEMENTATIONS, "pallas_tpu", problem, target)


@pytest.mark.parametrize(("T", "chunk_size"), [(4096, 48), (4096, 128), (75, 75), (75, 1000)])
def test_chunks_of_at_most_a_tile_and_one_over_the_whole_row_are_taken(T, chunk_size):
    problem = dataclasses.replace(TAKEN, T=T, chunk_size=chunk_size)
    assert pallas_tpu.unsupported(problem, V6E) is None


def test_blocks_hold_whole_registers_or_all_heads():
    for Hk, group, K, V in itertools.product(
        (1, 2, 3, 4, 6, 15, 16), (1, 2, 3, 8), (64, 128, 192, 256), (64, 128, 384)
    ):
        layout = layout_of(Case("", 1, TILE, Hk, Hk * group, K, V), "bfloat16")
        assert layout.H % layout.heads == 0
        assert layout.key_heads * layout.group == layout.heads
        if layout.heads != layout.H:
            assert layout.heads * V % TILE == 0 and layout.key_heads * K % TILE == 0


def layout_of(case: Case, dtype: str) -> Layout:
    """Of whole tiles."""
    sizes = pallas_tpu.with_dead_heads(case.Hk, case.H, case.K, case.V)
    return Layout(
        case.B,
        case.T // TILE,
        *sizes,
        heads=pallas_tpu.heads_per_step(*sizes),
        dtype=jnp.dtype(dtype),
        scale=case.K**-0.5,
        segments=bool(case.documents),
        unit=case.chunk_size if case.write_mask else None,
    )


@functools.partial(jax.jit, static_argnames=("chunk_size",), compiler_options=QUICK_COMPILE)
def interpreted(arguments, integers, cotangents, chunk_size):
    """{"o", "final_state", "dq", ...} of the kernels, whatever this machine is."""
    options = {"write_mask": None, "segment_ids": None} | integers

    def op(arguments):
        K = arguments["q"].shape[-1]
        return pallas_tpu.gated_delta_rule(
            **options | arguments, scale=K**-0.5, chunk_size=chunk_size
        )

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        (o, final_state), pullback = jax.vjp(op, arguments)
        gradients = pullback(cotangents)[0]
    named = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"o": o, "final_state": final_state} | named


def check_interpreted(case: Case, dtype: str):
    inputs, expected = drawn(gated_delta_rule, case, dtype)
    actual = interpreted(*inputs, chunk_size=case.chunk_size)
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted(dtype)[name], f"{case.name}: {name}")


def small(name: str) -> Case:
    """A case of the shared table in two tiles and the narrowest heads, to compile once."""
    return dataclasses.replace(BY_NAME[name], K=64, V=64, T=140)


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("no-decay", marks=pytest.mark.slow),
        "extreme-mixed",
        pytest.param("negative-eigenvalues", marks=pytest.mark.slow),
        "identical-keys",
        "reflecting-keys",
    ],
)
def test_kernels_match_the_reference_on_hard_inputs(name):
    check_interpreted(small(name), "float32")


# Not the two of equal keys: they are ill conditioned, `xla` too is out of bounds with bf16 inputs.
@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["no-decay", "extreme-mixed", "negative-eigenvalues"])
def test_kernels_match_the_reference_on_hard_inputs_in_bfloat16(name):
    check_interpreted(small(name), "bfloat16")


PACKED = Case(
    "packed", 1, 200, 2, 4, 128, 128, documents=(1, 62, 65, 72), write_mask=True, undecayed=0.3
)  # two value heads to a key head, and the loops over heads of a step that 64 lanes rule out


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
def test_kernels_match_the_reference_on_packed_masked_grouped_rows():
    check_interpreted(PACKED, "bfloat16")


ODD_CHUNKS = Case(
    "chunk-24", 1, 90, 1, 2, 64, 64, chunk_size=24, write_mask=True, documents=(31, 59)
)


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
@pytest.mark.slow
def test_chunks_that_do_not_divide_a_tile_are_widened():
    check_interpreted(ODD_CHUNKS, "float32")


WIDE = (
    Case("one-token", 1, 1, 1, 1, 64, 64),
    Case("T63", 1, 63, 1, 2, 128, 64, write_mask=True),
    Case("grouped-8", 1, 130, 1, 8, 128, 128),
    Case("grouped-3", 1, 130, 2, 6, 64, 64, documents=(60, 70)),
    Case("odd-heads", 1, 100, 5, 5, 64, 128, write_mask=True),
    Case("192-384", 1, 140, 2, 2, 192, 384, write_mask=True, chunk_size=32),
    Case("256-512", 1, 140, 1, 1, 256, 512),
    Case("chunk-128", 2, 300, 1, 2, 64, 64, chunk_size=128, write_mask=True, documents=(130, 170)),
    PACKED,
)


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_kernels_match_the_reference_on_every_shape(case, dtype):
    check_interpreted(case, dtype)


def compile_kernels(case: Case, dtype: str, chip: str):
    """Both kernels of `case`, on whole tiles, without XLA's operations around them."""
    layout = layout_of(case, dtype)
    B, N, Hk, H, K, V = (getattr(layout, x) for x in ("B", "N", "Hk", "H", "K", "V"))
    S = jax.ShapeDtypeStruct
    keys, values = S((B, case.T, Hk * K), dtype), S((B, case.T, H * V), dtype)
    gates, state = S((B, H, N, 8, TILE), jnp.float32), S((B, H, K, V), jnp.float32)

    def both(q, k, v, gates, initial, do, dfinal):
        o, _, inverses, states = forward(layout, q, k, v, gates, initial, keep=True)
        return o, backward(layout.reversed(), q, k, v, do, gates, inverses, states, dfinal)

    compile_for(chip, both, keys, keys, values, gates, state, values, state)


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for_every_chip(chip):
    case = Case("bf16", 1, 256, 1, 2, 128, 128, documents=(128, 128), write_mask=True)
    compile_kernels(case, "bfloat16", chip)


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case("fp32", 1, 256, 1, 2, 128, 128, write_mask=True), "float32"),
        (Case("64-64", 1, 256, 1, 2, 64, 64), "bfloat16"),
        (Case("odd-heads", 1, 256, 5, 5, 64, 128), "bfloat16"),
        (Case("192-384", 1, 256, 6, 6, 192, 384, write_mask=True), "bfloat16"),
        (Case("256-256", 1, 256, 2, 4, 256, 256), "bfloat16"),
        (Case("256-512", 1, 256, 1, 2, 256, 512), "bfloat16"),
        (Case("256-512", 1, 256, 1, 2, 256, 512), "float32"),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_every_shape_compiles_for_every_chip(case, dtype, chip):
    compile_kernels(case, dtype, chip)
