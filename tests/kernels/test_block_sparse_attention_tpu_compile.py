"""The TPU kernels of block-sparse attention, compiled ahead of time for TPUs that are not here."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import block_sparse_attention
from pallas_kernels.block_sparse_attention.cases import Case
from pallas_kernels.tpu_compiler import CHIPS, compile_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the extra `tpu`"
)


def case(name, K, V, mask="blocks", B=1, T=512, S=None, H=2, G=1, rows=2, **options):
    return Case(name, B, T, S or T, H, G, K, V, rows, mask=mask, **options)


EVERYTHING = case(
    "everything",
    64,
    128,
    "routed",
    B=2,
    T=500,
    S=600,
    H=4,
    G=2,
    block_size=64,
    block_bias=True,
    q_offset=(77, 13),
    documents=3,
    window=300,
    softcap=5.0,
)
ON_V5E = [
    case("chunks-64-128", 64, 128, "chunks", block_size=64, block_bias=True),
    case("mixed-128-128", 128, 128, "mixed", G=2),
    case("blocks-64-64", 64, 64, block_size=64),
    case("blocks-128-256", 128, 256),
    case("causal-256-256", 256, 256, "causal"),
    case("one-query", 128, 128, "mixed", T=1, S=1000, G=2, q_offset=(999,)),
]
slow = pytest.mark.slow


def compiled(case: Case, chip: str, dtype=jnp.bfloat16, transform=lambda f: f) -> str:
    """Text of the compiled forward and backward pass."""
    arguments, fixed, cotangents = case.draw(jax.random.key(0), dtype)

    def run(arguments, fixed, cotangents):
        @transform
        def attend(arguments):
            return block_sparse_attention(**arguments, **fixed, **case.options)

        outputs, vjp = jax.vjp(attend, arguments)
        return outputs, vjp(cotangents)

    return compile_for(chip, run, arguments, fixed, cotangents)[1].as_text()


def calls(text: str, kernel: str) -> int:
    return sum("custom-call(" in line and f"{kernel}" in line for line in text.splitlines())


@pytest.mark.covers("block_sparse_attention", "pallas_tpu", how="compiled", where="{chip}")
@pytest.mark.parametrize("chip", CHIPS)
def test_everything_at_once_compiles_and_is_one_launch_each_way(chip):
    text = compiled(EVERYTHING, chip)
    for kernel in ("forward", "dq", "dkv"):
        assert calls(text, f"block_sparse_attention_{kernel}") == 1, kernel


@pytest.mark.parametrize("case", ON_V5E, ids=lambda case: case.name)
def test_each_width_and_mask_compiles(case):
    assert calls(compiled(case, "v5e"), "block_sparse_attention_forward") == 1


def test_fp32_compiles():
    text = compiled(ON_V5E[0], "v5e", jnp.float32)
    assert calls(text, "block_sparse_attention_forward") == 1


def test_remat_computes_the_forward_pass_again_and_nothing_else():
    text = compiled(ON_V5E[1], "v5e", transform=jax.checkpoint)
    assert calls(text, "block_sparse_attention_forward") == 2
    assert calls(text, "block_sparse_attention_dkv") == 1


@slow
def test_pairwise_lists_of_any_length_are_one_launch():
    """16 heads at 32K: 4 MiB of lists, four times the scalar memory of a core."""
    long = case("32k", 128, 128, T=32768, H=16, G=16, rows=16)
    text = compiled(long, "v5e")
    for kernel in ("forward", "dq", "dkv"):
        assert calls(text, f"block_sparse_attention_{kernel}") == 1, kernel
