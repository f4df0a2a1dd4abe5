"""The TPU kernels of gated linear attention: what they decline, interpreted, compiled for chips.

No test here runs on a TPU. Interpreted, memory that was not written is NaN, reads outside raise and
races are looked for; compiled, by libtpu for each chip, shows that the kernels lower, not that they
are right.
"""

import dataclasses
import functools
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, gated_linear_attention
from pallas_kernels.gated_linear_attention import api, pallas_tpu
from pallas_kernels.gated_linear_attention.cases import BY_NAME, Case, accepted
from pallas_kernels.gated_linear_attention.pallas_tpu_levels import TILE, levels
from pallas_kernels.tpu_compiler import CHIPS, compile_for
from tests.closeness import assert_close
from tests.kernels.recurrences import drawn
from tests.quick_compile import QUICK_COMPILE

V6E = dispatch.Target("tpu", "TPU v6 lite")
TAKEN = api.Problem(
    B=1, T=4096, Hk=2, H=4, K=128, V=256, dtype="bfloat16", chunk_size=64, write_mask=False,
    segments=True, beta=False, bonus=True,
)  # fmt: skip
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
)


def test_auto_takes_the_kernels_on_a_tpu():
    assert dispatch.choose(api.IMPLEMENTATIONS, "auto", TAKEN, V6E).name == "pallas_tpu"


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"beta": True, "bonus": False}, "TPU v6 lite", "erase term"),
        ({"dtype": "float16"}, "TPU v6 lite", "bfloat16 or float32"),
        ({"K": 96}, "TPU v6 lite", "K must be one of"),
        ({"V": 96}, "TPU v6 lite", "V must be one of"),
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


@pytest.mark.parametrize("exclusive", [False, True])
def test_levels_hold_the_decay_of_every_pair(exclusive):
    """Of each pair i > j, at the one level at which they meet, into_i out_j."""
    g = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(0), (TILE, 8))) / 4
    factors = jax.jit(lambda g: [level[1:] for level in levels(g, exclusive)])(g)
    until = np.cumsum(np.asarray(g, np.float64), 0)
    read = np.pad(until[:-1], ((1, 0), (0, 0))) if exclusive else until
    *inside, (into, out, through) = factors
    i, j = np.arange(TILE)[:, None], np.arange(TILE)
    for n, (row, column, _) in enumerate(inside):
        meeting = ((i ^ j) >> n == 1) & (i > j)
        actual = (np.asarray(row)[:, None] * np.asarray(column))[meeting]
        assert_close(actual, np.exp(read[:, None] - until)[meeting], 1e-6, f"level {n}")
    assert_close(into, np.exp(read), 1e-6, "into the tile")
    assert_close(out, np.exp(until[-1] - until), 1e-6, "out of the tile")
    assert_close(through[0], np.exp(until[-1]), 1e-6, "through the tile")


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def interpreted(arguments, integers, cotangents):
    """{"o", "final_state", "dq", ...} of the kernels, whatever this machine is."""
    options = {"beta": None, "bonus": None, "segment_ids": None} | integers

    def op(arguments):
        K = arguments["q"].shape[-1]
        return pallas_tpu.gated_linear_attention(**options | arguments, scale=K**-0.5)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        (o, final_state), pullback = jax.vjp(op, arguments)
        gradients = pullback(cotangents)[0]
    named = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"o": o, "final_state": final_state} | named


def check_interpreted(case: Case, dtype: str):
    inputs, expected = drawn(gated_linear_attention, case, dtype)
    actual = interpreted(*inputs)
    for name, reference in expected.items():
        bound = accepted(dtype)[name]
        assert_close(actual[name], reference, bound, f"{case.name}: {name}", floor=1e-36)


def one_head(name: str) -> Case:
    """A case of the shared table in two tiles of the widths that one head fills registers with."""
    return dataclasses.replace(BY_NAME[name], B=1, Hk=1, H=1, K=128, V=128)


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="interpreted")
def test_kernels_match_the_reference_on_mixed_extreme_decays():
    check_interpreted(one_head("gla-extreme-mixed"), "float32")


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="interpreted")
def test_kernels_match_the_reference_on_packed_rows_with_a_bonus():
    check_interpreted(one_head("rwkv6-packed"), "bfloat16")


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["gla", "rwkv6"])
@pytest.mark.parametrize("name", ["T65", "packed", "extreme-mixed", "extreme-decay"])
def test_kernels_match_the_reference_on_hard_inputs(name, rule, dtype):
    check_interpreted(one_head(f"{rule}-{name}"), dtype)


SHAPES = (
    Case("one-token", "rwkv6", 1, 1, 1, 1, 64, 64),
    Case("64-64", "gla", 2, 140, 2, 2, 64, 64),
    Case("grouped", "rwkv6", 1, 130, 1, 2, 128, 64, documents=(60, 70)),
    Case("odd-heads", "gla", 1, 100, 5, 5, 64, 128),
    Case("128-256", "rwkv6", 1, 260, 1, 1, 128, 256),
    Case("192-384", "gla", 1, 140, 2, 2, 192, 384),
    Case("256-512", "gla", 1, 140, 1, 1, 256, 512, documents=(129, 11)),
)


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_kernels_match_the_reference_on_every_shape(case, dtype):
    check_interpreted(case, dtype)


def compile_op(case: Case, dtype: str, chip: str):
    """Forward and backward kernel of `case`, with XLA's operations around them."""
    arguments, integers, cotangents = jax.eval_shape(
        functools.partial(case.draw, dtype=dtype), jax.random.key(0)
    )

    def both(arguments, integers, cotangents):
        op = functools.partial(gated_linear_attention, implementation="pallas_tpu")
        _, pullback = jax.vjp(lambda a: op(**a, **integers), arguments)
        return pullback(cotangents)

    compile_for(chip, both, arguments, integers, cotangents)


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for_every_chip(chip):
    compile_op(Case("", "rwkv6", 1, 256, 1, 1, 128, 128, documents=(200, 56)), "bfloat16", chip)


@pytest.mark.covers("gated_linear_attention", "pallas_tpu", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_every_shape_compiles_for_every_chip(case, dtype, chip):
    compile_op(case, dtype, chip)
