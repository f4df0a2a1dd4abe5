"""What training keeps of a layer of the published sizes until its backward pass, by remat policy.

Layers are traced for the kernels of machines that are not here; nothing is compiled.
"""

import collections
import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import nats_l_hybrid_380m, transformer_380m
from jhybrid.config import ModelConfig
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from pallas_kernels.block_sparse_attention.pallas_gpu import JAX_VERSION

B, T = 8, 4096
HYBRID, TRANSFORMER = nats_l_hybrid_380m.config().model, transformer_380m.config().model
LINEAR, ROUTED = HYBRID.blocks[0], HYBRID.blocks[3]
BOTH = "dots_and_mixer_outputs"
COSTLY = ("dot_general", "pallas_call", "run_scoped")  # the last: what a Hopper kernel begins with
on_each_machine = pytest.mark.parametrize(
    "device",
    [
        "TPU v6 lite",
        pytest.param(
            "NVIDIA H200",
            marks=pytest.mark.skipif(
                jax.__version__ != JAX_VERSION, reason=f"its kernels need JAX {JAX_VERSION}"
            ),
        ),
    ],
)


def one_layer(model: ModelConfig, block, remat: str):
    """(function of parameters and tokens, their shapes) of a model of one block, no vocabulary."""
    config = dataclasses.replace(model, blocks=(block,), vocab_size=1, remat=remat)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))

    def hidden(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        context = Context(positions=positions, segment_ids=jnp.zeros((B, T), jnp.int32))
        return nnx.merge(graphdef, params)(tokens, context).hidden

    return hidden, (params, jax.ShapeDtypeStruct((B, T), jnp.int32))


@functools.cache
def kept_bytes(device: str, model: ModelConfig, block, remat: str) -> int:
    """Bytes of the arrays of all rows that the pull-back holds."""
    hidden, (params, tokens) = one_layer(model, block, remat)

    def pull_back(params, tokens):
        return jax.vjp(lambda params: hidden(params, tokens), params)[1]

    with machine(device):
        arrays = jax.tree.leaves(jax.eval_shape(pull_back, params, tokens))
    by_row = [x for x in arrays if x.ndim and x.shape[0] == B]
    return sum(x.size * x.dtype.itemsize for x in by_row)


def machine(device: str):
    abstract = jax.sharding.AbstractDevice(device, None, device.split()[0].lower())
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("data",), abstract_device=abstract)
    )


def run(device: str, model: ModelConfig, block, remat: str) -> collections.Counter:
    """How often each costly primitive stands in a layer's forward and backward pass."""
    hidden, shapes = one_layer(model, block, remat)

    def loss(params, tokens):
        return hidden(params, tokens).astype(jnp.float32).sum()

    with machine(device):
        found = jax.make_jaxpr(jax.grad(loss))(*shapes)
    return collections.Counter(_costly(found.jaxpr))


def _costly(jaxpr):
    """Names of costly equations that something depends on: remat leaves dead ones behind."""
    alive = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if not any(id(result) in alive for result in equation.outvars):
            continue
        alive.update(map(id, equation.invars))
        if equation.primitive.name in COSTLY:
            yield equation.primitive.name
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _costly(getattr(value, "jaxpr", value))


def _is_jaxpr(value) -> bool:
    return isinstance(value, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)


@on_each_machine
def test_a_routed_layer_trains_in_the_memory_of_a_plain_transformer_layer(device):
    plain = kept_bytes(device, TRANSFORMER, TRANSFORMER.blocks[0], "none")
    for block in (ROUTED, LINEAR):
        assert kept_bytes(device, HYBRID, block, HYBRID.remat) < plain
    assert kept_bytes(device, HYBRID, ROUTED, "none") > plain  # the policy is what does it


@on_each_machine
@pytest.mark.parametrize(
    "block", [pytest.param(LINEAR, marks=pytest.mark.slow), ROUTED], ids=["linear", "routed"]
)
def test_a_backward_pass_needs_no_product_and_no_kernel_again(device, block):
    assert run(device, HYBRID, block, BOTH) == run(device, HYBRID, block, "none")
    assert run(device, HYBRID, block, "block") > run(device, HYBRID, block, "none")
