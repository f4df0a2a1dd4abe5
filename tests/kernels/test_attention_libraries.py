"""Causal rows by other libraries' kernels: which they take, and that they compute the same."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    BlockMask,
    block_sparse_attention,
    block_sparse_attention_output,
    dispatch,
)
from pallas_kernels.block_sparse_attention import api, libraries
from pallas_kernels.tpu_compiler import CHIPS, compile_for
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

H200, V6E = dispatch.Target("gpu", "NVIDIA H200"), dispatch.Target("tpu", "TPU v6 lite")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
)


def problem(T=4096, S=None, K=128, V=None, mask=None, dtype=jnp.bfloat16, **options):
    shapes = (1, T, 4, K), (1, S or T, 2, K), (1, S or T, 2, V or K)
    plain = {"block_bias": False, "q_offset": False, "segment_ids": False}
    return api.Problem(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        mask=mask or BlockMask.causal(),
        **{**plain, "window": None, "softcap": None, **options},
    )


@pytest.mark.parametrize(("target", "name"), [(H200, "cudnn"), (V6E, "splash")])
def test_whole_causal_rows_go_to_the_library_where_lse_is_not_wanted(target, name):
    choice = dispatch.choose(api.OUTPUT_IMPLEMENTATIONS, "auto", problem(), target)
    assert choice == dispatch.Choice(name, ())
    with_lse = dispatch.choose(api.IMPLEMENTATIONS, "auto", problem(), V6E)
    assert with_lse == dispatch.Choice("pallas_tpu", ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": BlockMask.streaming(1, 4)}, "causal masks only, not Streaming"),
        ({"q_offset": True}, "no q_offset"),
        ({"window": 512}, "no window"),
        ({"softcap": 30.0}, "no softcap"),
        ({"S": 8192}, "4096 queries of 8192 keys"),
        ({"V": 256}, "K = V, not 128 and 256"),
        ({"dtype": jnp.float32}, "bfloat16, not float32"),
    ],
)
@pytest.mark.parametrize(("target", "name"), [(H200, "cudnn"), (V6E, "splash")])
def test_other_problems_are_declined_with_the_reason(changes, reason, target, name):
    skipped = dispatch.choose(
        {**api.OUTPUT_IMPLEMENTATIONS}, "auto", problem(**changes), target
    ).skipped
    assert reason in dict(skipped)[name]


@pytest.mark.parametrize(
    ("name", "changes", "target", "reason"),
    [
        ("cudnn", {"segment_ids": True}, H200, "dense bias for segment ids"),
        ("cudnn", {"K": 256}, H200, "up to 128, not 256"),
        ("cudnn", {}, dispatch.Target("gpu", "NVIDIA A100-SXM4-80GB"), "is run on H100 and H200"),
        ("cudnn", {}, V6E, "is run on H100 and H200"),
        ("splash", {"K": 64}, V6E, "multiples of 128, not 64"),
        ("splash", {"T": 4000}, V6E, "blocks of 128, not 4000"),
        ("splash", {}, H200, "is compiled for"),
    ],
)
def test_each_library_has_limits_of_its_own(name, changes, target, reason):
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        dispatch.choose(api.OUTPUT_IMPLEMENTATIONS, name, problem(**changes), target)


def test_splash_takes_packed_rows():
    packed = problem(segment_ids=True)
    assert dispatch.choose(api.OUTPUT_IMPLEMENTATIONS, "auto", packed, V6E).name == "splash"


def drawn(T, H, G, K, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (1, T, H, K), (1, T, G, K), (1, T, G, K), (1, T, H, K)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def with_gradients(attend, q, k, v, do):
    o, pullback = jax.vjp(attend, q, k, v)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *pullback(do)), strict=True))


def check(attend, arrays, segment_ids=None):
    """`attend(q, k, v)` and its gradients against the reference in fp32."""

    def reference(q, k, v):
        options = {"segment_ids": segment_ids, "implementation": "reference"}
        return block_sparse_attention(q, k, v, BlockMask.causal(), **options)[0]

    expected = with_gradients(reference, *(x.astype(jnp.float32) for x in arrays))
    for name, x in with_gradients(attend, *arrays).items():
        # splash attention rounds the scaled queries, 2^-9 of each
        assert_close(x, expected[name], 6e-3, name)


def test_the_output_alone_is_that_of_the_op():
    q, k, v, _ = drawn(40, 4, 2, 8, jnp.float32)
    mask, options = BlockMask.streaming(1, 2, 8), {"window": 20, "softcap": 3.0, "scale": 0.2}
    o, _ = block_sparse_attention(q, k, v, mask, **options)
    assert np.array_equal(block_sparse_attention_output(q, k, v, mask, **options), o)
    with pytest.raises(TypeError, match="no option 'windows'"):
        block_sparse_attention_output(q, k, v, mask, windows=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="window=0 must be >= 1"):
        block_sparse_attention_output(q, k, v, mask, window=0)


@pytest.mark.covers("block_sparse_attention_output", "splash", how="interpreted")
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_splash_matches_the_reference_interpreted(packed):
    arrays = drawn(256, 4, 2, 128)
    ids = jnp.repeat(jnp.array([[0, 1, 1, -1]]), 64, axis=1) if packed else None
    options = {"segment_ids": ids, "kv_segment_ids": None, "interpret": True}
    attend = functools.partial(libraries.splash, mask=BlockMask.causal(), scale=128**-0.5)
    check(functools.partial(attend, **options), arrays, ids)


@pytest.mark.covers("block_sparse_attention_output", "splash", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_splash_compiles_for_every_chip_without_sums_of_dq(chip):
    T, H, K = 8192, 8, 128
    q, k = (jax.ShapeDtypeStruct((1, T, n, K), jnp.bfloat16) for n in (H, 2))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def attend(q, k, v, ids, do):
        def o(q, k, v):
            return block_sparse_attention_output(q, k, v, BlockMask.causal(), segment_ids=ids)

        return jax.vjp(o, q, k, v)[1](do)

    _, compiled = compile_for(chip, attend, q, k, k, ids, q)
    assert "splash" in compiled.as_text()
    rows = 2 * T * H * K  # bytes of q
    # four kinds of rows at a time; sums of dq would be eight more, in fp32
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * rows


def test_cudnn_lowers_for_cuda(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: True)
    attend = functools.partial(libraries.cudnn, mask=BlockMask.causal(), scale=0.1)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn(512, 8, 2, 128)]
    traced = jax.jit(functools.partial(with_gradients.__wrapped__, attend)).trace(*shapes)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@__cudnn$fmhaSoftmax(" in module and "@__cudnn$fmhaSoftmaxBackward(" in module


@pytest.mark.covers("block_sparse_attention_output", "cudnn")
@pytest.mark.gpu
@pytest.mark.parametrize(("H", "G", "K"), [(8, 8, 128), (8, 2, 64)])
def test_cudnn_on_a_gpu_matches_the_reference(H, G, K):
    attend = functools.partial(
        block_sparse_attention_output, mask=BlockMask.causal(), implementation="cudnn"
    )
    check(attend, drawn(2048, H, G, K))
