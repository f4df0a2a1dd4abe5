"""Decode attention's implementations against its reference: every case, dtype, kernel and chip."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import decode_attention, dispatch
from pallas_kernels.decode_attention import api, pallas_gpu, pallas_tpu, parts, xla
from pallas_kernels.decode_attention.cases import BY_NAME, Case, accepted, tagged
from pallas_kernels.tpu_compiler import CHIPS, compile_for
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

H200, V6E = dispatch.Target("gpu", "NVIDIA H200"), dispatch.Target("tpu", "TPU v6 lite")
BENCH = tagged("bench")
written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
)
NAMES = ("q", "k_pages", "v_pages", "pages", "starts", "positions")


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK_COMPILE)
def outputs_and_gradients(case: Case, floating, lists, cotangents, implementation):
    attend = functools.partial(decode_attention, **case.options, implementation=implementation)
    outputs, pullback = jax.vjp(lambda x: attend(**x, **lists), floating)
    gradients = {f"d{name}": x for name, x in pullback(cotangents)[0].items()}
    return dict(zip(case.outputs, outputs, strict=True)) | gradients


@functools.cache
def drawn(case: Case, dtype: str):
    """Arguments, cotangents, and the reference's results from the same values in fp32 or wider."""
    floating, lists, cotangents = case.draw(jax.random.key(1), dtype)
    expected = outputs_and_gradients(case, wide(floating), lists, wide(cotangents), "reference")
    return floating, lists, cotangents, expected


def check(case: Case, dtype: str, kernel):
    """`kernel(logits, q, k_pages, ...) -> (o, lse)` against the reference."""
    floating, lists, _, expected = drawn(case, dtype)
    logits = parts.Logits(case.K**-0.5, case.softcap)
    given = floating | lists
    actual = jax.jit(functools.partial(kernel, logits))(*(given[name] for name in NAMES))
    for name, x in zip(case.outputs, actual, strict=True):
        assert_close(x, expected[name], accepted(dtype)[name], f"{case.name}: {name}")


@pytest.mark.covers("decode_attention", "xla")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("few-queries", "float32"),
        ("chunks", "bfloat16"),
        *(
            pytest.param(case.name, dtype, marks=pytest.mark.slow)
            for case in tagged("ci")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_xla_matches_the_reference(name, dtype):
    case = BY_NAME[name]
    floating, lists, cotangents, expected = drawn(case, dtype)
    actual = outputs_and_gradients(case, floating, lists, cotangents, "xla")
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted(dtype)[name], f"{case.name}: {name}")


@pytest.mark.slow
def test_float64_stays_float64(float64):
    case = BY_NAME["few-queries"]
    floating, lists, cotangents, expected = drawn(case, "float64")
    actual = outputs_and_gradients(case, floating, lists, cotangents, "xla")
    assert {x.dtype.name for x in actual.values()} == {"float64"}
    for name, reference in expected.items():
        assert_close(actual[name], reference, accepted("float64")[name], name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_of_queries_that_see_nothing_are_zero(implementation):
    case = BY_NAME["full"]
    floating, lists, cotangents, _ = drawn(case, "float32")
    lists = {**lists, "pages": lists["pages"].at[0].set(-1)}
    found = outputs_and_gradients(case, floating, lists, cotangents, implementation)
    assert not np.any(found["dq"][0]) and np.any(found["dq"][1])
    assert all(np.isfinite(x).all() for name, x in found.items() if name != "lse")


@pytest.mark.slow
def test_vmap_over_caches_is_one_cache_after_the_other():
    case = BY_NAME["few-queries"]
    floating, lists, _, _ = drawn(case, "float32")
    queries = jnp.stack([floating["q"], 2 * floating["q"]])
    places = jnp.stack([lists["positions"], lists["positions"] - 9])

    @jax.jit
    def attend(q, positions):
        return decode_attention(**floating | {"q": q}, **lists | {"positions": positions})

    together = jax.jit(jax.vmap(attend))(queries, places)
    for n in range(2):
        for name, x, y in zip(case.outputs, together, attend(queries[n], places[n]), strict=True):
            assert_close(x[n], y, 1e-6, name)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(P("rows"), marks=pytest.mark.slow), P(None, "rows")],
    ids=["rows", "heads"],
)
def test_shard_map_over_rows_or_heads_is_the_whole(spec):
    """A device may hold any of the lists; the pool of pages is on all of them."""
    case = BY_NAME["full"]
    floating, lists, _, expected = drawn(case, "float32")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    by_row, by_head = P(*spec[:1]), P(spec[0], None, *spec[1:])
    specs = by_head, P(), P(), spec, spec, by_row
    attend = jax.shard_map(
        decode_attention, mesh=mesh, in_specs=specs, out_specs=(by_head, spec), check_vma=False
    )
    actual = jax.jit(attend)(*((floating | lists)[name] for name in NAMES))
    for name, x in zip(case.outputs, actual, strict=True):
        assert_close(x, expected[name], 1e-5, name)


def test_parts_merge_to_the_whole():
    case = BY_NAME["chunks"]
    floating, lists, _, expected = drawn(case, "float32")
    entries = np.arange(lists["pages"].shape[2])
    attend = jax.jit(decode_attention)
    outputs = [
        attend(**floating, **{**lists, "pages": jnp.where(mine, lists["pages"], -1)})
        for mine in (entries % 3 == 0, entries % 3 == 1, entries % 3 == 2, entries < 0)
    ]
    o, lse = (jnp.stack(x) for x in zip(*outputs, strict=True))
    o, lse = parts.merge(o.swapaxes(2, 3), lse)  # [n, B, H, t, V]
    assert_close(o.swapaxes(1, 2), expected["o"], 1e-5, "o")
    assert_close(lse, expected["lse"], 1e-5, "lse")


def test_auto_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    for case in BENCH:
        problem = case.problem("bfloat16")
        assert dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, V6E).name == "pallas_tpu"
        assert dispatch.choose(api.IMPLEMENTATIONS, "auto", problem, H200).name == "pallas_gpu"


TAKEN = BY_NAME["8k-1"].problem("bfloat16")


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({"dtype": "float32"}, H200, "must be bfloat16, not float32"),
        ({"K": 96}, H200, r"\(K, V\) must be one of .* not \(96, 128\)"),
        ({"C": 48}, H200, "8, 16, 32 or a multiple of 64 tokens, not 48"),
        ({"t": 17}, H200, "68 queries share a list, at most 64 do"),
        ({}, dispatch.Target("gpu", "NVIDIA A100-SXM4-80GB"), "needs an NVIDIA H100 or H200"),
        ({"dtype": "float64"}, V6E, "bfloat16 or float32"),
        ({"V": 96}, V6E, "V must be one of"),
        ({"C": 8}, V6E, "multiples of 16 tokens, not 8"),
        ({"t": 65}, V6E, "260 queries share a list, at most 256 do"),
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
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        dispatch.choose(api.IMPLEMENTATIONS, f"pallas_{target.platform}", problem, target)


# What a part of a list gets


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize(
    "steps", [[7], [0, 0, 0], [40, 0, 1, 0, 0, 13], [4] * 16, [100, 1, 1, 1], [0, 5, 0]]
)
def test_shares_cover_every_step_once_evenly_and_in_places_of_their_own(steps, workers):
    steps = np.asarray(steps)
    ends = np.cumsum(steps)
    begins = ends - steps
    dealt = pallas_gpu.Shares.of(jnp.int32(ends[-1]), workers)
    size = int(dealt.size)
    assert size == max(math.ceil(steps.sum() / workers), pallas_gpu._FEWEST_STEPS)
    first, last = np.asarray(dealt.first(begins)), np.asarray(dealt.last(begins, ends))
    assert (first >= 0).all() and (first <= last).all() and (last < workers).all()
    for begin, end, *mine in zip(begins, ends, first, last, strict=True):
        here = set(range(begin // size, (end - 1) // size + 1)) if end > begin else set()
        assert here <= set(range(mine[0], mine[1] + 1)) and (
            not here or len(here) > mine[1] - mine[0]
        )
    # a worker's lists are a run, and so are the places of a list's parts, which nobody shares
    assert (first[1:] >= last[:-1]).all() and (np.diff(first) >= 0).all()


def test_lists_end_with_the_last_page_that_is_seen():
    pages = jnp.array([[[5, -1, 3, 9, -1]], [[-1] * 5]])
    starts = jnp.array([[[0, 8, 16, 24, 0]], [[0] * 5]])
    lists = parts.Lists.of(pages, starts, jnp.array([[20], [4]]), group=2, entries=4, rows=8)
    assert lists.lengths.tolist() == [3, 0]
    assert lists.pages[0].tolist() == [5, 0, 3, 9, 0, 0, 0, 0]
    assert lists.starts[0].tolist() == [0, parts.NOWHERE, 16, 24, *[parts.NOWHERE] * 4]
    assert lists.positions[0].tolist() == [20, 20, *[-1] * 6]


# TPU


@pytest.fixture
def interpreted(monkeypatch, capsys):
    monkeypatch.setattr(pallas_tpu, "_MOST_PAGES", 3)
    options = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    with pltpu.force_tpu_interpret_mode(options):
        yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.covers("decode_attention", "pallas_tpu", "forward", how="interpreted")
@pytest.mark.parametrize(
    ("name", "dtype", "cores"),
    [
        ("few-queries", "float32", 1),
        pytest.param("mixed", "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("one-page", "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("full", "float32", 1, marks=pytest.mark.slow),
        pytest.param("chunks", "bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_matches_the_reference(name, dtype, cores, interpreted):
    check(BY_NAME[name], dtype, functools.partial(pallas_tpu.attend, parts=cores))


def test_gradients_of_a_kernel_are_those_of_the_reference():
    case = BY_NAME["few-queries"]
    floating, lists, cotangents, expected = drawn(case, "float32")
    logits = parts.Logits(case.K**-0.5, case.softcap)
    given = floating | lists

    def kernel(logits, *arguments):  # without a gradient of its own, as the kernels are
        return jax.lax.stop_gradient(xla.attend(logits, *arguments))

    run = functools.partial(api._differentiable(kernel), logits)
    pullback = jax.jit(lambda arguments, cotangents: jax.vjp(run, *arguments)[1](cotangents))
    found = pullback([given[name] for name in NAMES], cotangents)
    for name, actual in zip(NAMES[:3], found[:3], strict=True):
        assert_close(actual, expected[f"d{name}"], accepted("float32")[f"d{name}"], f"d{name}")


@pytest.mark.covers("decode_attention", "pallas_tpu", "forward", how="compiled", where="{chip}")
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "name",
    [
        "128k-1",
        pytest.param("natsl-380m-128k-1", marks=pytest.mark.slow),
        pytest.param("32k-8-four-queries", marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_compiles_for_every_chip(name, chip):
    case = BY_NAME[name]
    floating, lists, _ = jax.eval_shape(
        functools.partial(case.draw, dtype="bfloat16"), jax.random.key(0)
    )
    given = floating | lists
    logits = parts.Logits(case.K**-0.5, case.softcap)
    attend = functools.partial(pallas_tpu.attend, logits)
    _, compiled = compile_for(chip, attend, *(given[name] for name in NAMES))
    assert "decode_attention" in compiled.as_text()


def test_a_core_gets_a_part_of_each_list():
    assert pallas_tpu.cores_of(dispatch.Target("tpu", "TPU v5p")) == 2
    assert pallas_tpu.cores_of(V6E) == 1


# Hopper


@pytest.mark.covers("decode_attention", "pallas_gpu", "forward", how="interpreted")
@written_for
@pytest.mark.parametrize(
    ("case", "workers"),
    [
        (Case("mixed", 2, 2, 200, 4, 2, 64, 64, C=16, heads="mixed", ring=3, softcap=2.0), 5),
        pytest.param(
            Case("scattered", 1, 1, 700, 6, 2, 64, 128, C=64, heads="chunks", scattered=True),
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case("long-pages", 2, 1, 500, 2, 2, 128, 128, C=128), 7, marks=pytest.mark.slow
        ),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_gpu_kernels_match_the_reference_interpreted(case, workers):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options = {"workers": workers, "interpret": plgpu.InterpretGPUParams()}
    check(case, "bfloat16", functools.partial(pallas_gpu.attend, **options))


@pytest.mark.covers(
    "decode_attention", "pallas_gpu", "forward", how="compiled", where="cuda (lowered only)"
)
@written_for
@pytest.mark.parametrize(
    ("widths", "C"),
    [
        ((64, 128), 64),
        ((128, 128), 16),
        *(pytest.param(w, 64, marks=pytest.mark.slow) for w in pallas_gpu._WIDTHS),
    ],
    ids=str,
)
def test_the_gpu_kernels_lower_for_cuda_and_fit(widths, C):
    from jax.experimental.mosaic.gpu import core

    K, V = widths
    case = Case("lowered", 2, 1, 4096, 8, 2, K, V, C=C)
    floating, lists, _ = jax.eval_shape(
        functools.partial(case.draw, dtype="bfloat16"), jax.random.key(0)
    )
    given = floating | lists
    attend = jax.jit(functools.partial(pallas_gpu.attend, parts.Logits(1.0, None)))
    _, workers = pallas_gpu.stages_and_workers(K, V)
    blocks = workers // 132  # of a multiprocessor, whose 228 KiB they share
    with core.artificial_shared_memory_limit(228 * 1024 // blocks - 1024):
        exported = jax.export.export(attend, platforms=["cuda"])(*(given[x] for x in NAMES))
    module = exported.mlir_module()
    assert module.count("custom_call @mosaic_gpu") == 2


@pytest.mark.covers("decode_attention", "pallas_gpu", "forward")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", 2, 2, 3000, 16, 4, 64, 64, C=16, heads="mixed", softcap=2.0),
        Case("scattered", 3, 1, 5000, 12, 4, 64, 128, heads="chunks", scattered=True),
        Case("one-row", 1, 1, 20000, 32, 8, 128, 128),
        Case("long-pages", 1, 4, 9000, 32, 4, 128, 128, C=128),
        Case("wide", 4, 1, 3000, 4, 4, 256, 256),
        Case("wide-values", 1, 1, 3000, 8, 2, 128, 256, C=32),
        Case("short", 4, 1, 40, 8, 2, 128, 128),
        Case("many-rows", 96, 1, 600, 8, 4, 128, 128, heads="mixed", ring=2),
    ],
    ids=lambda case: case.name,
)
def test_the_gpu_kernels_on_a_gpu_match_the_reference(case):
    floating, lists, _, expected = drawn(case, "bfloat16")
    attend = functools.partial(decode_attention, **case.options, implementation="pallas_gpu")
    actual = jax.jit(attend)(**floating, **lists)
    again = jax.jit(attend)(**floating, **lists)
    for name, x, y in zip(case.outputs, actual, again, strict=True):
        assert_close(x, expected[name], accepted("bfloat16")[name], f"{case.name}: {name}")
        assert np.array_equal(x, y), f"{name} differs between runs"
