"""The Hopper kernels of block-sparse attention: declined, planned, interpreted, lowered, on a GPU.

The interpreter raises where barriers are left unbalanced. Two blocks share all tiles there, so that
small rows take several rounds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from pallas_kernels import BlockMask, block_sparse_attention, dispatch
from pallas_kernels.block_sparse_attention import api, pallas_gpu
from pallas_kernels.block_sparse_attention import pallas_gpu_plan as planning
from pallas_kernels.block_sparse_attention.cases import Case
from pallas_kernels.block_sparse_attention.schedule import Tiling
from pallas_kernels.dispatch import Candidate

OP = "block_sparse_attention"
written_for = pytest.mark.skipif(
    jax.__version__ != pallas_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {pallas_gpu.JAX_VERSION}, this is {jax.__version__}",
)
H200 = dispatch.Target("gpu", "NVIDIA H200")


def case(name, B=1, T=200, S=None, H=2, G=2, K=64, V=64, rows=2, **options):
    return Case(name, B, T, S or T, H, G, K, V, rows, **{"block_size": 64} | options)


CASES = {
    "causal": case("causal", G=1),
    "one-query": case("one-query", B=2, T=1, S=100, q_offset=(99, 30)),
    "streaming": case("streaming", mask="streaming", local_blocks=1),
    "blocks": case("blocks", T=136, G=1, mask="blocks", block_size=128, density=0.5),
    "blocks-of-64": case("blocks-of-64", rows=1, mask="blocks", density=0.3),
    "chunks": case("chunks", G=1, V=128, rows=1, mask="chunks", density=0.6, block_bias=True),
    "chunks-128-256": case(
        "chunks-128-256",
        T=136,
        H=1,
        G=1,
        K=128,
        V=256,
        rows=1,
        mask="chunks",
        density=0.6,
        block_bias=True,
    ),
    "causal-128": case("causal-128", T=136, H=1, G=1, K=128, V=128),
    "causal-256": case("causal-256", T=72, H=1, G=1, K=256, V=256),
    "packed": case("packed", mask="mixed", documents=3, window=90),
    "everything": case(
        "everything",
        T=136,
        S=200,
        G=1,
        rows=1,
        mask="routed",
        density=0.5,
        block_bias=True,
        q_offset=(50,),
        documents=2,
        window=100,
        softcap=5.0,
    ),
}


def draw(case: Case):
    return case.draw(jax.random.key(0), jnp.bfloat16)


def taken(**change) -> api.Problem:
    arguments, fixed, _ = draw(CASES["chunks"])
    problem = api.Problem(
        *(jax.ShapeDtypeStruct(arguments[name].shape, arguments[name].dtype) for name in "qkv"),
        mask=fixed["mask"],
        block_bias=True,
        q_offset=False,
        segment_ids=False,
        window=None,
        softcap=None,
    )
    return dataclasses.replace(problem, **change)


@written_for
def test_auto_takes_the_kernels_on_a_hopper_gpu():
    assert dispatch.choose(api.IMPLEMENTATIONS, "auto", taken(), H200).name == "pallas_gpu"


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({"q": jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)}, "NVIDIA H200", "bfloat16"),
        ({"v": jax.ShapeDtypeStruct((1, 8, 2, 96), jnp.bfloat16)}, "NVIDIA H200", r"\(64, 96\)"),
        ({"mask": BlockMask.streaming(1, 1, 32)}, "NVIDIA H200", "tiles of 32, below 64"),
        ({}, "NVIDIA A100-SXM4-80GB", "needs an NVIDIA H100 or H200"),
    ],
)
def test_what_the_kernels_decline_is_named(change, device, reason, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", jax.__version__)
    target = dispatch.Target("gpu", device)
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        dispatch.choose(api.IMPLEMENTATIONS, "pallas_gpu", taken(**change), target)


def test_another_jax_version_is_declined(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "JAX_VERSION", "0.0.0")
    assert "written for JAX 0.0.0" in pallas_gpu.unsupported(taken(), H200)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("K", "V"), pallas_gpu._WIDTHS)
@pytest.mark.parametrize("block", [64, 128])
def test_every_plan_fits_in_shared_memory_with_two_steps_in_flight(block, K, V, ids):
    mask = BlockMask.from_blocks(jnp.ones((1, 1, 2, 2), bool), block)
    plans = planning.plans(mask, K, V, ids)
    resident = {"forward": K, "dq": K + V, "dkv": K + V}
    for name, plan in plans._asdict().items():
        streamed = 2 * (K + V) + 4 * ids + 8 * (name == "dkv")
        used = plan.tiles * plan.tile * 2 * resident[name] + plan.stages * plan.step * streamed
        assert plan.lanes * used <= planning.SMEM_BYTES - planning.RESERVED_BYTES
        assert plan.stages >= 2
        assert plan.workers in (1, 2)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("lists", "together"), [(1, 1), (6, 6), (6, 2), (7, 1)])
def test_every_tile_is_dealt_out_once_the_longest_first(lists, together, lanes):
    plan = planning.Plan(Tiling(64, 64), 64, 64, 2, lanes)
    work = np.random.default_rng(0).integers(0, 9, (lists, 11))
    places = np.asarray(planning.order(plan, jnp.asarray(work), together)).reshape(-1)
    places, rest = places[: work.size], places[work.size :]
    assert sorted(places) == list(range(work.size))
    assert (rest == -1).all()
    lengths = work.reshape(-1)[places].reshape(-1, together * 11)
    assert (np.diff(lengths, axis=1) <= 0).all()
    assert (np.diff(lengths.sum(1)) <= 0).all()


@pytest.fixture
def interpreted(monkeypatch):
    """`pallas_gpu` interpreted, on two blocks."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def few_blocks(*arguments):
        return planning.Plans(*(plan._replace(blocks=2) for plan in plans(*arguments)))

    plans = planning.plans
    monkeypatch.setattr(planning, "plans", few_blocks)
    run = functools.partial(pallas_gpu.block_sparse_attention, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_gpu", Candidate(run))


def widened(tree):
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def solve(implementation: str, case: Case, arguments, fixed, cotangents) -> dict:
    """Outputs and gradients by name; compiled anew, because tests replace what `pallas_gpu` is."""

    def run(arguments, fixed, cotangents):
        def op(arguments):
            call = arguments | fixed | case.options
            return block_sparse_attention(**call, implementation=implementation)

        (o, lse), pull_back = jax.vjp(op, arguments)
        return {"o": o, "lse": lse} | {f"d{x}": dx for x, dx in pull_back(cotangents)[0].items()}

    return jax.jit(run)(arguments, fixed, cotangents)


def assert_matches_reference(case: Case):
    """Outputs and gradients; dblock_bias against `xla`, whose o is rounded to bf16 as well."""
    arguments, fixed, cotangents = draw(case)
    actual = solve("pallas_gpu", case, arguments, fixed, cotangents)
    expected = solve("reference", case, widened(arguments), fixed, widened(cotangents))
    if case.block_bias:
        rounded = solve("xla", case, arguments, fixed, cotangents)
        expected["dblock_bias"] = rounded["dblock_bias"]
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_close(x, expected[name], 1e-5 if name == "lse" else 5e-3, name, floor=1e-6)


@pytest.mark.covers(OP, "pallas_gpu", "forward", "backward", how="interpreted")
@written_for
@pytest.mark.parametrize(
    "name",
    [x if x == "chunks" else pytest.param(x, marks=pytest.mark.slow) for x in CASES],
)
def test_interpreted_kernels_match_the_reference(name, interpreted):
    assert_matches_reference(CASES[name])


def exported(case: Case, transform=lambda run: run) -> str:
    """The module of `transform` of forward and backward, lowered for CUDA."""
    arguments, fixed, cotangents = jax.eval_shape(lambda: draw(case))
    traced = {"q_offset": None, "segment_ids": None, "kv_segment_ids": None} | fixed

    def run(arguments, traced, cotangents):
        def op(arguments):
            return pallas_gpu.block_sparse_attention(
                **{"block_bias": None} | arguments,
                **traced,
                **case.options,
                scale=case.K**-0.5,
            )

        outputs, pull_back = jax.vjp(op, arguments)
        return outputs, pull_back(cotangents)

    lower = jax.export.export(jax.jit(transform(run)), platforms=["cuda"])
    module = lower(arguments, traced, cotangents)
    return module.mlir_module()


@pytest.mark.covers(
    OP, "pallas_gpu", "forward", "backward", how="compiled", where="cuda (lowered only)"
)
@written_for
@pytest.mark.parametrize(
    ("K", "V", "options"),
    [
        (64, 128, {"mask": "chunks", "block_bias": True, "rows": 1}),
        pytest.param(128, 128, {"mask": "blocks", "block_size": 128}, marks=pytest.mark.slow),
        pytest.param(128, 128, {"mask": "mixed", "documents": 2}, marks=pytest.mark.slow),
        pytest.param(64, 64, {"mask": "blocks"}, marks=pytest.mark.slow),
        pytest.param(
            128, 256, {"mask": "routed", "block_bias": True, "window": 99}, marks=pytest.mark.slow
        ),
        pytest.param(256, 256, {"softcap": 9.0, "documents": 2}, marks=pytest.mark.slow),
    ],
)
def test_kernels_lower_for_cuda_without_a_gpu(K, V, options):
    text = exported(case("lowered", T=512, K=K, V=V, **options))
    assert text.count("custom_call @mosaic_gpu") == 3


def _over_rows_of_one(run):
    """vmap over the batch, each row a problem of its own."""

    def one_by_one(*arrays):
        return jax.vmap(lambda *x: run(*jax.tree.map(lambda y: y[None], x)))(*arrays)

    return one_by_one


def _sharded(run):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@pytest.mark.slow
@written_for
@pytest.mark.parametrize("transform", [_over_rows_of_one, _sharded, jax.checkpoint])
def test_transformed_kernels_lower_for_cuda(transform):
    text = exported(case("transformed", B=2, T=128, mask="chunks", V=128), transform)
    assert text.count("custom_call @mosaic_gpu") == 3


ON_GPU = {
    **CASES,
    "long-causal-128": case("long-causal-128", B=2, T=1000, H=4, K=128, V=128),
    "blocks-128": case(
        "blocks-128", T=2048, H=4, K=128, V=128, rows=4, mask="blocks", block_size=128
    ),
    "mixed-128": case("mixed-128", T=1024, H=4, G=4, K=128, V=128, mask="mixed", documents=3),
    "chunks-64-128": case(
        "chunks-64-128", T=2048, H=6, G=6, V=128, rows=3, mask="chunks", block_bias=True
    ),
    "routed-128-256": case(
        "routed-128-256", T=1000, H=4, K=128, V=256, mask="routed", block_bias=True, window=700
    ),
    "capped-256": case("capped-256", T=700, K=256, V=256, softcap=9.0, documents=2),
    "blocks-of-64-256": case("blocks-of-64-256", T=512, K=256, V=256, mask="blocks", rows=1),
}


@pytest.mark.covers(OP, "pallas_gpu", "forward", "backward")
@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_on_a_gpu_match_the_reference(name):
    assert_matches_reference(ON_GPU[name])


@pytest.mark.covers(OP, "pallas_gpu", "forward", "backward")
@pytest.mark.gpu
@written_for
def test_vmap_on_a_gpu_is_the_batch():
    """Bit for bit, but for dblock_bias, which XLA sums over a chunk in an order of its choice."""
    case = ON_GPU["chunks-64-128"]
    case = dataclasses.replace(case, B=3)
    arguments, fixed, cotangents = draw(case)

    def run(arguments, fixed, cotangents):
        return solve("pallas_gpu", case, arguments, fixed, cotangents)

    together = run(arguments, fixed, cotangents)
    one_by_one = jax.jit(_over_rows_of_one(run))(arguments, fixed, cotangents)
    for name, x in together.items():
        alone = one_by_one[name][:, 0]
        if name == "dblock_bias":
            assert_close(x, alone, 1e-6, name)
        else:
            assert np.array_equal(x, alone), name


@pytest.mark.gpu
@written_for
@pytest.mark.parametrize("blocks", [7, 132])
def test_gradients_on_a_gpu_do_not_vary_between_runs(blocks, monkeypatch):
    plans = planning.plans

    def chosen(*arguments):
        return planning.Plans(*(plan._replace(blocks=blocks) for plan in plans(*arguments)))

    monkeypatch.setattr(planning, "plans", chosen)
    case = ON_GPU["routed-128-256"]
    first, second = (solve("pallas_gpu", case, *draw(case)) for _ in range(2))
    for name, x in first.items():
        assert np.array_equal(x, second[name]), name
