"""vmap, remat, shard_map and jit leave the recurrences' outputs and gradients as they are."""

import functools
import importlib.util

import jax
import pytest

from pallas_kernels import (
    dispatch,
    gated_delta_rule,
    gated_delta_rule_map,
    gated_linear_attention,
    simple_linear_attention,
)
from pallas_kernels.gated_delta_rule import pallas_gpu
from pallas_kernels.gated_delta_rule.cases import Case
from pallas_kernels.tpu_compiler import compile_for
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

P = jax.sharding.PartitionSpec
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
CASE = Case("small", 2, 44, 2, 4, 8, 8, chunk_size=8, write_mask=True, documents=(13, 31))
BY_TOKEN, BY_STATE = P("data", None, "tensor"), P("data", "tensor")
SPECS = dict.fromkeys(("q", "k", "v", "g", "beta", "write_mask"), BY_TOKEN)
SPECS |= {"initial_state": BY_STATE, "segment_ids": P("data")}


def sharded(op, given, out_specs, **options):
    """`op` of `given`, rows over one axis of a mesh of four devices and heads over the other."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=axes, devices=jax.devices()[:4])
    specs = ({name: SPECS[name] for name in given},)
    return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=out_specs, **options)


def by_row(op):
    """`op` of one row at a time under vmap."""

    def one(arguments):
        outputs = op({name: x[None] for name, x in arguments.items()})
        return jax.tree.map(lambda x: x[0], outputs)

    return jax.vmap(one)


TRANSFORMS = {
    "jit alone": lambda op: op,
    "vmap": by_row,
    "remat": jax.checkpoint,
    "shard_map": lambda op: sharded(op, SPECS, (BY_TOKEN, BY_STATE)),
}


@functools.cache
def rule_and_gradients(transform, implementation):
    """{"o", "final_state", "dq", ...} of the rule under a transform."""
    arguments, integers, cotangents = CASE.draw(jax.random.key(2), "float32")

    def op(given):
        return gated_delta_rule(**given, **CASE.options, implementation=implementation)

    def run(arguments, integers, cotangents):
        outputs, pullback = jax.vjp(
            lambda x: TRANSFORMS[transform](op)({**x, **integers}), arguments
        )
        return outputs, pullback(cotangents)[0]

    compiled = jax.jit(run, compiler_options=QUICK_COMPILE)
    (o, final_state), gradients = compiled(arguments, integers, cotangents)
    named = {f"d{name}": x for name, x in gradients.items()}
    return {"o": o, "final_state": final_state} | named


@pytest.mark.parametrize("transform", ["vmap", "remat", "shard_map"])
@IMPLEMENTATIONS
def test_transforms_change_nothing(transform, implementation):
    expected = rule_and_gradients("jit alone", implementation)
    for name, x in rule_and_gradients(transform, implementation).items():
        assert_close(x, expected[name], 1e-6, f"{transform}: {name}")


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("op", "left_out"),
    [
        (gated_delta_rule, ()),
        (gated_delta_rule_map, ("q",)),
        (simple_linear_attention, ("beta",)),
        (gated_linear_attention, ("beta",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_row_may_start_from_zeros_inside_shard_map(op, left_out, implementation):
    """The zeros vary over the mesh's axes as what a scan makes of them does."""
    arguments, _, _ = CASE.draw(jax.random.key(2), "float32")
    given = {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}
    given = {name: x for name, x in given.items() if name not in left_out}
    if op is gated_linear_attention:
        given["g"] = given["g"][..., None] + 0 * arguments["v"]  # a decay of each channel; K = V

    def run(given):
        return tuple(op(**given, implementation=implementation))

    specs = (BY_STATE,) * 2 if op is gated_delta_rule_map else (BY_TOKEN, BY_STATE)
    expected = jax.jit(run, compiler_options=QUICK_COMPILE)(given)
    actual = jax.jit(sharded(run, given, specs), compiler_options=QUICK_COMPILE)(given)
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y, 1e-6)


# Pallas calls declare no replication types.
ON_KERNELS = TRANSFORMS | {
    "shard_map": lambda op: sharded(op, SPECS, (BY_TOKEN, BY_STATE), check_vma=False)
}


def kernels_under(transform, implementation, target, monkeypatch):
    """(function, shapes of its arguments): both passes on kernels' widths, as if on `target`."""
    monkeypatch.setattr(dispatch.Target, "current", lambda: target)
    case = Case("wide", 2, 136, 2, 4, 64, 64, write_mask=True, documents=(70, 66))
    shapes = jax.eval_shape(functools.partial(case.draw, dtype="bfloat16"), jax.random.key(0))
    op = ON_KERNELS[transform](
        lambda given: gated_delta_rule(**given, implementation=implementation)
    )

    def run(arguments, integers, cotangents):
        outputs, pullback = jax.vjp(lambda x: op({**x, **integers}), arguments)
        return outputs, pullback(cotangents)[0]

    return run, shapes


@pytest.mark.slow
@pytest.mark.skipif(jax.__version__ != pallas_gpu.JAX_VERSION, reason="kernels of another JAX")
@pytest.mark.parametrize(("transform", "launches"), [("vmap", 5), ("remat", 6), ("shard_map", 5)])
def test_hopper_kernels_lower_under_transforms(transform, launches, monkeypatch):
    target = dispatch.Target("gpu", "NVIDIA H200")
    run, shapes = kernels_under(transform, "pallas_gpu", target, monkeypatch)
    module = jax.export.export(jax.jit(run), platforms=["cuda"])(*shapes).mlir_module()
    assert module.count("custom_call @mosaic_gpu") == launches  # remat: the inverses again


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("transform", "launches"), [("vmap", 2), ("remat", 3)])
def test_tpu_kernels_compile_under_transforms(transform, launches, monkeypatch):
    target = dispatch.Target("tpu", "TPU v6 lite")
    run, shapes = kernels_under(transform, "pallas_tpu", target, monkeypatch)
    _, compiled = compile_for("v6e", run, *shapes)
    assert compiled.as_text().count("tpu_custom_call") == launches
