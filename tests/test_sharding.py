"""Meshes, parameter layouts and the shard_map wrapper, on eight simulated CPU devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from closeness import assert_close
from flax import nnx
from jax.sharding import PartitionSpec as P

from jhybrid.config import MeshConfig
from jhybrid.errors import UserError
from jhybrid.sharding import constrain, make_mesh, parameter_shardings, shard_op

QKV = {"q": ("batch", "time", "heads"), "k": ("batch", "time", "heads"), "mask": ("batch", "heads")}
OUT = (("batch", "time", "heads"), ("batch", "heads"))


def attend(q, k, mask, *, scale):
    """A stand-in op: query head h uses key head h // (H // G) and mask row h // (H // R)."""
    heads = q.shape[2]
    k = jnp.repeat(k, heads // k.shape[2], axis=2)
    keep = jnp.repeat(mask["keep"], heads // mask["keep"].shape[1], axis=1)
    logits = scale * jnp.einsum("bthk,bshk->bhts", q, k)
    weights = jax.nn.softmax(jnp.where(keep[:, :, None], logits, -1e30))
    return jnp.einsum("bhts,bshk->bthk", weights, k), logits.sum((2, 3))


def inputs(batch=4, heads=4, key_heads=2, rows=2, time=6, dim=8):
    keys = jax.random.split(jax.random.key(0), 3)
    keep = jax.random.bernoulli(keys[2], 0.7, (batch, rows, time)).at[..., 0].set(True)
    return {
        "q": jax.random.normal(keys[0], (batch, time, heads, dim)),
        "k": jax.random.normal(keys[1], (batch, time, key_heads, dim)),
        "mask": {"keep": keep, "absent": None},
    }


def values_and_gradients(op, arrays):
    def loss(q, k):
        o, total = op(q=q, k=k, mask=arrays["mask"], scale=0.3)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(total)), (o, total)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, outputs), grads = jax.jit(grad)(arrays["q"], arrays["k"])
    return {"o": outputs[0], "total": outputs[1], "dq": grads[0], "dk": grads[1]}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="all axes divide"),
        pytest.param({"key_heads": 1, "rows": 1}, id="one key head and one mask row, broadcast"),
        pytest.param({"batch": 3}, id="batch not divisible, replicated"),
        pytest.param({"batch": 2}, id="batch divisible by data only"),
        pytest.param({"batch": 1}, id="batch of one"),
    ],
)
def test_an_op_on_a_mesh_equals_the_direct_call_in_values_and_gradients(sizes):
    arrays = inputs(**sizes)
    expected = values_and_gradients(attend, arrays)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        actual = values_and_gradients(shard_op(attend, QKV, OUT), arrays)
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-6, name)


def test_an_op_sees_only_its_own_slice():
    shapes = []

    def op(x):
        shapes.append(x.shape)
        return x

    x = jnp.arange(4 * 6 * 4.0).reshape(4, 6, 4, 1)
    axes = ("batch", "time", "heads")
    mapped = shard_op(op, (axes,), axes)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        out = jax.jit(mapped)(x)
        assert out.sharding.spec == P(("data", "fsdp"), None, "tensor")
    assert shapes[-1] == (1, 6, 2, 1)
    shapes.clear()
    mapped(x)  # without a mesh
    with jax.set_mesh(make_mesh(MeshConfig())):
        mapped(x)  # one device
    assert shapes == [x.shape, x.shape]


def test_heads_that_the_tensor_axis_does_not_divide_are_an_error_naming_both():
    op = shard_op(functools.partial(attend, scale=1.0), QKV, OUT)
    with (
        jax.set_mesh(make_mesh(MeshConfig(tensor=4))),
        pytest.raises(UserError, match=r"mesh.tensor=4 must divide the heads of attend: 6"),
    ):
        op(**inputs(heads=6, key_heads=1, rows=1))


def test_a_result_of_one_head_is_whole_on_every_device():
    def op(q, k):
        return q * k, 2 * k

    heads = ("batch", "time", "heads")
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=4))):
        q, k = jnp.ones((2, 3, 4)), jnp.full((2, 3, 1), 5.0)
        o, doubled = jax.jit(shard_op(op, (heads, heads), (heads, heads)))(q, k)
    assert_close(o, 5 * q, 0, "o")
    assert_close(doubled, 2 * k, 0, "doubled")


def test_an_op_inside_another_runs_directly():
    axes = ("batch", "heads")
    inner = shard_op(lambda x: 2 * x, (axes,), axes)
    outer = shard_op(lambda x: inner(x) + 1, (axes,), axes)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, tensor=2))):
        assert_close(jax.jit(outer)(jnp.ones((4, 2))), jnp.full((4, 2), 3.0), 0, "nested")


def test_parameters_follow_the_rules_and_replicate_what_does_not_divide():
    class Tiny(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.zeros((8, 4)), axes=("embed", "heads"))
            self.odd = nnx.Param(jnp.zeros((8, 3)), axes=("embed", "heads"))
            self.twice = nnx.Param(jnp.zeros((8, 8)), axes=("embed", "embed"))
            self.stacked = nnx.Param(jnp.zeros((2, 4)), axes=("layers", "embed"))
            self.bare = nnx.Param(jnp.zeros(8))

    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    abstract = nnx.state(nnx.eval_shape(Tiny), nnx.Param)
    shardings = parameter_shardings({"params": abstract, "step": jnp.zeros(())}, mesh)
    specs = {name: shardings["params"][name].get_value().spec for name in abstract}
    assert specs == {
        "kernel": P("fsdp", "tensor"),
        "odd": P("fsdp", None),
        "twice": P("fsdp", None),
        "stacked": P(None, "fsdp"),
        "bare": P(None),
    }
    assert shardings["step"].spec == P()
    params = jax.jit(lambda: nnx.state(Tiny(), nnx.Param), out_shardings=shardings["params"])()
    assert params["kernel"].get_value().addressable_shards[0].data.shape == (2, 2)


def test_constrain_lays_out_activations_and_is_the_identity_without_a_mesh():
    x = jnp.ones((8, 3, 4))
    assert constrain(x, "batch", "time", "heads") is x
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        y = jax.jit(lambda x: constrain(2 * x, "batch", "time", "heads"))(x)
    assert y.sharding.spec == P(("data", "fsdp"), None, "tensor")


def test_too_large_a_mesh_names_its_axes_and_the_devices_there_are():
    with pytest.raises(UserError, match=r"mesh.data=4.* needs 16 devices, this run has 8"):
        make_mesh(MeshConfig(data=4, fsdp=4))
