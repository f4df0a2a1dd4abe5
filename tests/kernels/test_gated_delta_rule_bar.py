"""What every kernel of the gated delta rule is held to: lengths about a tile, decays, fla's shapes.

The same cases for the TPU and Hopper kernels, interpreted (memory that was not written is NaN), and
for the Hopper kernels on a GPU whose free memory was filled with NaN. `xla` passes them in
test_gated_delta_rule.py.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import gated_delta_rule
from pallas_kernels.gated_delta_rule import pallas_gpu, pallas_tpu
from pallas_kernels.gated_delta_rule.cases import Case, accepted, tagged
from tests.closeness import assert_close
from tests.kernels.recurrences import drawn
from tests.quick_compile import QUICK_COMPILE

written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
LENGTHS = tuple(
    Case(f"T{T}", 1, T, 1, 2, 64, 64, write_mask=True) for T in (1, 63, 64, 65, 75, 1000)
)
DECAYS = (
    *(Case(f"g{g:g}", 1, 140, 1, 1, 64, 64, decay=g) for g in (0.0, -1e-3, -5.0, -60.0)),
    Case("g-60-or-0", 1, 140, 1, 1, 64, 64, decay=-60.0, undecayed=0.9),
)
WIDTHS = set(pallas_gpu._KEY_WIDTHS)  # fla's heads of 60 and 100 are `xla`'s
FLA = tuple(case for case in tagged("fla") if case.K in WIDTHS)
SHORT = tuple(case for case in FLA if case.B * case.T * case.H <= 2048)


def check(case: Case, dtype: str, run):
    """`run(arguments, cotangents) -> (outputs, gradients)` against the reference in fp32."""
    (arguments, integers, cotangents), expected = drawn(gated_delta_rule, case, dtype)
    (o, final_state), gradients = run(arguments, integers, cotangents)
    actual = {"o": o, "final_state": final_state}
    actual |= {f"d{name}": x for name, x in gradients.items()}
    # The gradient of a single gate is one sum whose bf16 terms cancel.
    unsteady = {"dg", "dbeta", "dwrite_mask"} if case.T == 1 and dtype == "bfloat16" else ()
    for name in expected.keys() - unsteady:
        # fla's own tests pass what is 1e-6 off; a gradient of 1e-27 is a sum of terms that cancel.
        assert_close(actual[name], expected[name], accepted(dtype)[name], name, floor=1e-6)


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def on_an_interpreted_tpu(arguments, integers, cotangents):
    options = {"write_mask": None, "segment_ids": None, "chunk_size": 64} | integers

    def op(arguments):
        scale = arguments["q"].shape[-1] ** -0.5
        return pallas_tpu.gated_delta_rule(**options | arguments, scale=scale)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        outputs, pullback = jax.vjp(op, arguments)
        return outputs, pullback(cotangents)[0]


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def on_an_interpreted_gpu(arguments, integers, cotangents):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    given = {"write_mask": None, "segment_ids": None} | arguments | integers
    interpret = plgpu.InterpretGPUParams(uninitialized_memory="nan")
    options = {"scale": given["q"].shape[-1] ** -0.5, "interpret": interpret}
    o, final_state, *kept = pallas_gpu.forward(**given, **options)
    names = ("inverses", "states", "transitions", "do", "dfinal")
    given |= dict(zip(names, (*kept, *cotangents), strict=True))
    names = ("q", "k", "v", "g", "beta", "initial_state", "write_mask")
    found = dict(zip(names, pallas_gpu.backward(**given, **options), strict=True))
    return (o, final_state), {name: found[name] for name in arguments}


@jax.jit
def on_a_gpu(arguments, integers, cotangents):
    def op(arguments):
        return gated_delta_rule(**arguments, **integers, implementation="pallas_gpu")

    outputs, pullback = jax.vjp(op, arguments)
    return outputs, pullback(cotangents)[0]


@pytest.mark.covers("gated_delta_rule", "pallas_tpu", how="interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*LENGTHS, *DECAYS, *SHORT], ids=lambda case: case.name)
def test_tpu_kernels_interpreted(case, dtype):
    check(case, dtype, on_an_interpreted_tpu)


@pytest.mark.covers("gated_delta_rule", "pallas_gpu", how="interpreted")
@pytest.mark.slow
@written_for
@pytest.mark.parametrize("case", [*LENGTHS[:-1], *DECAYS], ids=lambda case: case.name)
def test_hopper_kernels_interpreted(case):
    check(case, "bfloat16", on_an_interpreted_gpu)


@pytest.mark.covers("gated_delta_rule", "pallas_gpu")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("case", [*LENGTHS, *DECAYS, *FLA], ids=lambda case: case.name)
def test_hopper_kernels_on_a_gpu(case):
    drawn(gated_delta_rule, case, "bfloat16")
    jax.block_until_ready(jnp.full(2**28, jnp.nan))  # 1 GiB, free again for the kernels' buffers
    check(case, "bfloat16", on_a_gpu)
