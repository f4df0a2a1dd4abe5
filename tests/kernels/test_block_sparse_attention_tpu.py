"""The TPU kernels of block-sparse attention, interpreted, and what they decline.

The interpreter fills memory with NaN before it is written, raises on reads out of bounds, runs
copies only when they are waited for and reports races. Tiles are small and steps two tiles, so that
the short rows here take several.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels.attention_calls import (
    attend,
    cotangents_for,
    drawn,
    inputs,
    normal,
    outputs_and_gradients,
    pack,
)
from quick_compile import QUICK_COMPILE

from pallas_kernels import BlockMask, block_sparse_attention
from pallas_kernels.block_sparse_attention import api, pallas_tpu, pallas_tpu_tiles, schedule
from pallas_kernels.block_sparse_attention.cases import Case
from pallas_kernels.dispatch import Candidate, Target, UnsupportedError

INTERPRET = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
BLOCK = 16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, capsys):
    """`pallas_tpu` whatever this machine is; a reported race fails the test."""
    candidate = Candidate(pallas_tpu.block_sparse_attention)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_tpu", candidate)
    monkeypatch.setattr(pallas_tpu_tiles, "STEP_TILES", 2)
    monkeypatch.setattr(schedule, "LARGEST_FREE_TILE", 32)
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        yield
    assert "RACE DETECTED" not in capsys.readouterr().out


def case(name, B=1, T=40, S=None, H=2, G=2, K=8, V=8, rows=2, **options):
    return Case(name, B, T, S or T, H, G, K, V, rows, block_size=BLOCK, **options)


CASES = {
    "causal": case("causal", T=100, G=1),
    "streaming": case("streaming", T=70, V=16, mask="streaming"),
    "blocks": case("blocks", T=45, S=70, H=4, V=16, mask="blocks", density=0.5),
    "chunks": case("chunks", T=75, H=4, mask="chunks", density=0.5, block_bias=True),
    "packed": case("packed", B=2, T=64, mask="mixed", documents=3, window=29),
    "everything": case(
        "everything",
        B=2,
        T=41,
        S=66,
        H=4,
        rows=2,
        mask="routed",
        density=0.5,
        block_bias=True,
        q_offset=(25, 13),
        documents=2,
        window=50,
        softcap=5.0,
    ),
}


def problems():
    """(name, dtype, ratio); those that say little that the others do not are slow."""
    first = ("everything",)
    for name in CASES:
        marks = () if name in first else pytest.mark.slow
        yield pytest.param(name, "float32", 1e-5, id=name, marks=marks)
    yield pytest.param("chunks", "bfloat16", 5e-3, id="bf16", marks=pytest.mark.slow)


@pytest.mark.covers("block_sparse_attention", "pallas_tpu", how="interpreted")
@pytest.mark.parametrize(("name", "dtype", "ratio"), list(problems()))
def test_outputs_and_gradients_are_those_of_the_reference(name, dtype, ratio):
    problem = drawn(CASES[name], dtype)
    actual = outputs_and_gradients("pallas_tpu", *problem)
    expected = outputs_and_gradients("reference", *problem)
    for result, wanted in expected.items():
        assert actual[result].dtype == wanted.dtype, result
        assert_close(actual[result], wanted, ratio, result)


def test_the_interpreter_reports_races(capsys):
    def kernel(source, target, semaphore):
        copy = pltpu.make_async_copy(source, target, semaphore)
        copy.start()
        target[...] = jnp.zeros(target.shape, target.dtype)
        copy.wait()

    x = jnp.ones((8, 128))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    try:
        jax.block_until_ready(call(x))
        said = capsys.readouterr().out
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises what earlier ones print
        said = str(error)
    assert "RACE DETECTED" in said


def results(arguments, mask, cotangents, implementation="pallas_tpu", **fixed):
    return outputs_and_gradients(implementation, arguments, {"mask": mask, **fixed}, cotangents)


def assert_equal_results(actual, expected, ratio=1e-5):
    for name, wanted in expected.items():
        assert_close(actual[name], wanted, ratio, name)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(
            lambda N: BlockMask.from_blocks(jnp.ones((1, 1, N, N), bool), BLOCK),
            marks=pytest.mark.slow,
        ),
        lambda N: BlockMask.by_head(
            jnp.array([[True, False]]),
            BlockMask.from_chunks(jnp.ones((1, 2, N), bool), BLOCK),
            BlockMask.streaming(0, N, BLOCK),
        ),
    ],
    ids=["blocks", "chunks-streaming"],
)
def test_a_mask_that_keeps_everything_is_dense_causal_attention(mask):
    arguments = inputs(B=1, T=37, H=2)
    do, dlse = cotangents_for(arguments)

    @jax.jit
    def dense(arguments):
        def op(arguments):
            q, k, v = (arguments[name] for name in "qkv")
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        o, vjp = jax.vjp(op, arguments)
        return {"o": o} | {f"d{name}": x for name, x in vjp(do)[0].items()}

    found = results(arguments, mask(3), (do, jnp.zeros_like(dlse)))
    assert_equal_results(found, dense(arguments))


@pytest.mark.slow
def test_one_full_head_among_empty_ones():
    arguments = inputs(B=1, T=48, H=3, G=3)
    cotangents = cotangents_for(arguments)
    keep = jnp.zeros((1, 3, 3, 3), bool).at[:, 1].set(True)
    found = results(arguments, BlockMask.from_blocks(keep, BLOCK), cotangents)
    full = results(arguments, BlockMask.causal(), cotangents, "reference")
    for name in ("o", "dq", "dk", "dv"):
        assert_close(found[name][:, :, 1], full[name][:, :, 1], 1e-5, name)
        assert not np.any(found[name][:, :, [0, 2]]), name
    assert_close(found["lse"][:, 1], full["lse"][:, 1], 1e-5, "lse")
    assert np.all(found["lse"][:, [0, 2]] == -np.inf)


def test_rows_without_a_key_pass_no_gradient_even_of_nan():
    arguments = inputs(T=20, S=33, H=2, G=1)
    offset = {"q_offset": jnp.array([-5, 3])}
    do, dlse = cotangents_for(arguments)
    clean = results(arguments, BlockMask.causal(), (do, dlse), **offset)
    assert_equal_results(
        clean, results(arguments, BlockMask.causal(), (do, dlse), "reference", **offset)
    )
    assert np.all(clean["o"][0, :5] == 0) and np.all(clean["lse"][0, :, :5] == -np.inf)
    poisoned = (do.at[0, :5].set(jnp.nan), dlse.at[0, :, :5].set(jnp.nan))
    found = results(arguments, BlockMask.causal(), poisoned, **offset)
    assert all(np.array_equal(found[name], clean[name]) for name in clean)


@pytest.mark.slow
def test_packed_documents_equal_separate_ones():
    lengths = [13, 40]
    documents = [inputs(B=1, T=length, H=2, G=1, seed=length) for length in lengths]
    row, ids = pack(documents, lengths, BLOCK)
    do, dlse = cotangents_for(row)
    mask = BlockMask.streaming(1, 1, BLOCK)
    packed = results(row, mask, (do, dlse), segment_ids=jnp.array(ids))
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        tokens = slice(start, start + length)
        alone = results(document, mask, (do[:, tokens], dlse[:, :, tokens]))
        for name in ("o", "dq", "dk", "dv"):
            assert_close(packed[name][:, tokens], alone[name], 1e-5, name)
        assert_close(packed["lse"][:, :, tokens], alone["lse"], 1e-5, "lse")
        start += -(-length // BLOCK) * BLOCK
    padding = ids[0] < 0
    for name in ("o", "dq", "dk", "dv"):
        assert not np.any(packed[name][:, padding]), name


def test_keys_that_are_not_selected_are_not_read():
    """NaN in every key and value that no query may see."""
    arguments = inputs(B=1, T=64, H=2, G=1)
    keep = jnp.zeros((1, 2, 4, 4), bool).at[:, :, :, [0, 3]].set(True)
    mask = BlockMask.from_blocks(keep, BLOCK)
    clean = attend("pallas_tpu", arguments, mask=mask)
    poisoned = arguments | {x: arguments[x].at[:, 16:48].set(jnp.nan) for x in "kv"}
    for found, wanted in zip(attend("pallas_tpu", poisoned, mask=mask), clean, strict=True):
        assert np.array_equal(found, wanted)


def routed(selected, route):
    chunks = BlockMask.from_chunks(selected, BLOCK)
    return BlockMask.by_head(route, chunks, BlockMask.streaming(1, 1, BLOCK))


def test_another_selection_does_not_recompile():
    compiled = jax.jit(
        lambda arguments, mask: block_sparse_attention(
            **arguments, mask=mask, implementation="pallas_tpu"
        ),
        compiler_options=QUICK_COMPILE,
    )
    arguments, rng = inputs(B=1, T=48, H=2), np.random.default_rng(0)
    outputs = []
    for _ in range(2):
        selected = jnp.asarray(rng.random((1, 2, 3)) < 0.5)
        outputs.append(compiled(arguments, routed(selected, jnp.ones((1, 2), bool)))[0])
    assert compiled._cache_size() == 1
    assert not np.array_equal(outputs[0], outputs[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_transformations_change_nothing(how):
    rng = np.random.default_rng(3)
    arguments = inputs(B=2, T=32, H=2) | {"block_bias": normal(5, 2, 2, 2)}
    selected, route = (jnp.asarray(rng.random((2, 2)) < 0.5) for _ in range(2))
    mask = routed(jnp.stack([selected, ~selected], 2), route)
    cotangents = cotangents_for(arguments)
    expected = results(arguments, mask, cotangents, "reference")

    def attention(arguments, mask):
        return block_sparse_attention(**arguments, mask=mask, implementation="pallas_tpu")

    def one_row(arguments, mask):
        added = jax.tree.map(lambda x: x[None], (arguments, mask))
        return jax.tree.map(lambda x: x[0], attention(*added))

    def by_device():
        mesh = jax.make_mesh(
            (1, 2),
            ("data", "tensor"),
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
            devices=jax.devices()[:2],
        )
        P = jax.sharding.PartitionSpec
        by_row = {name: P("data", None, "tensor") for name in "qkv"}
        by_row["block_bias"] = P("data", "tensor")
        return jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(by_row, P("data", "tensor")),
            out_specs=(P("data", None, "tensor"), P("data", "tensor")),
            check_vma=False,
        )

    function = {
        "vmap": lambda: jax.vmap(one_row),
        "shard_map": by_device,
    }[how]()

    def run(arguments, mask, cotangents):
        (o, lse), vjp = jax.vjp(lambda arguments: function(arguments, mask), arguments)
        return {"o": o, "lse": lse} | {f"d{x}": dx for x, dx in vjp(cotangents)[0].items()}

    compiled = jax.jit(run, compiler_options=QUICK_COMPILE)
    assert_equal_results(compiled(arguments, mask, cotangents), expected)


V6E = Target("tpu", "TPU v6 lite")


def problem(mask=None, dtype=jnp.bfloat16, T=256, K=128, V=128):
    shapes = [jax.ShapeDtypeStruct((1, T, 2, width), dtype) for width in (K, K, V)]
    mask = BlockMask.causal() if mask is None else mask
    return api.Problem(*shapes, mask, False, False, False, None, None)


@pytest.mark.parametrize(
    ("declined", "target", "reason"),
    [
        (problem(), Target("cpu", "cpu"), "needs a TPU, not 'cpu'"),
        (problem(dtype=jnp.float16), V6E, "bfloat16 or float32, not float16"),
        (problem(K=96), V6E, "K must be one of .*, not 96"),
        (problem(V=512), V6E, "V must be one of .*, not 512"),
        (
            problem(BlockMask.streaming(1, 1, 8)),
            V6E,
            r"blocks of \[8\] are cut into tiles of 8, below 16",
        ),
    ],
)
def test_what_the_kernels_cannot_take_is_declined_with_a_reason(declined, target, reason):
    found = pallas_tpu.unsupported(declined, target)
    assert found is not None and re.search(reason, found), found
    assert pallas_tpu.unsupported(problem(), V6E) is None


def test_naming_the_kernels_on_another_machine_is_an_error(monkeypatch):
    candidate = Candidate(pallas_tpu.block_sparse_attention, pallas_tpu.unsupported)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_tpu", candidate)
    with pytest.raises(UnsupportedError, match="needs a TPU, not 'cpu'"):
        block_sparse_attention(**inputs(), mask=BlockMask.causal(), implementation="pallas_tpu")
