"""The chunked loss is the plain loss, and never holds all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from jaxprs import equations
from tiny_models import SOFTMAX, build, tiny, tokens

from jhybrid.config import MeshConfig
from jhybrid.losses import next_token_loss, token_log_likelihoods
from jhybrid.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D = 4, 30, 16


def inputs():
    hidden = jax.random.normal(jax.random.key(0), (B, T, D))
    targets = np.where(np.random.default_rng(1).random((B, T)) < 0.2, -1, tokens(B, T))
    return hidden, jnp.asarray(targets, jnp.int32)


def full_log_likelihoods(model, hidden, targets):
    log_p = jax.nn.log_softmax(model.logits(hidden))
    picked = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, picked, 0.0)


def full_loss(model, hidden, targets):
    return -jnp.sum(full_log_likelihoods(model, hidden, targets)), jnp.sum(targets >= 0)


def value_and_gradients(loss, model, hidden, targets):
    graphdef, params = nnx.split(model, nnx.Param)

    def total(params, hidden):
        return loss(nnx.merge(graphdef, params), hidden, targets)

    grad = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (value, count), (params_grad, hidden_grad) = jax.jit(grad)(params, hidden)
    embed = params_grad["embed"].get_value()
    head = params_grad["head"].get_value() if "head" in params_grad else jnp.zeros(())
    return {"loss": value, "count": count, "embed": embed, "head": head, "hidden": hidden_grad}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk", [1, 28, 10_000], ids=lambda chunk: f"{chunk} tokens at once")
def test_chunked_loss_equals_full_loss_in_value_and_gradients(tied, chunk):
    model = build(tiny(SOFTMAX, tied_head=tied, loss_chunk_tokens=chunk))
    expected = value_and_gradients(full_loss, model, *inputs())
    actual = value_and_gradients(next_token_loss, model, *inputs())
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-5, name)


def test_likelihoods_by_token_equal_the_full_softmax_and_vanish_without_target():
    model = build(tiny(SOFTMAX, loss_chunk_tokens=28))
    hidden, targets = inputs()
    actual = token_log_likelihoods(model, hidden, targets)
    assert_close(actual, full_log_likelihoods(model, hidden, targets), 1e-5, "likelihoods")
    assert np.all(np.asarray(actual)[np.asarray(targets) < 0] == 0)


def test_the_loss_on_eight_devices_equals_one_device():
    model = build(tiny(SOFTMAX, loss_chunk_tokens=28))
    expected = value_and_gradients(next_token_loss, model, *inputs())
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        actual = value_and_gradients(next_token_loss, model, *inputs())
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-5, name)


def largest_array(jaxpr) -> int:
    """Elements of the largest intermediate array."""
    found = [v.aval for equation in equations(jaxpr) for v in equation.outvars]
    return max(aval.size for aval in found if hasattr(aval, "size"))


def test_products_of_a_bf16_model_are_bf16_and_its_gradients_near_those_in_fp32():
    wide = build(tiny(SOFTMAX, loss_chunk_tokens=28))
    narrow = build(tiny(SOFTMAX, loss_chunk_tokens=28, compute_dtype="bfloat16"))
    expected = value_and_gradients(next_token_loss, wide, *inputs())
    actual = value_and_gradients(next_token_loss, narrow, *inputs())
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-2, name)

    def total(hidden):
        return next_token_loss(narrow, hidden, inputs()[1])[0]

    found = equations(jax.make_jaxpr(jax.grad(total))(inputs()[0]).jaxpr)
    products = [e.invars for e in found if e.primitive.name == "dot_general"]
    assert len(products) == 4  # logits, and again; gradients of tokens and of the head
    assert all(x.aval.dtype == jnp.bfloat16 for operands in products for x in operands)


def test_logits_of_all_tokens_exist_neither_forwards_nor_backwards():
    vocab, tokens_at_once = 5000, 32
    model = build(tiny(SOFTMAX, vocab_size=vocab, loss_chunk_tokens=tokens_at_once))
    graphdef, params = nnx.split(model, nnx.Param)

    def largest(loss):
        def total(params, hidden):
            return loss(nnx.merge(graphdef, params), hidden, inputs()[1])[0]

        grad = jax.value_and_grad(total, argnums=(0, 1))
        return largest_array(jax.make_jaxpr(grad)(params, inputs()[0]).jaxpr)

    assert largest(full_loss) == B * T * vocab
    assert largest(next_token_loss) <= tokens_at_once * vocab
