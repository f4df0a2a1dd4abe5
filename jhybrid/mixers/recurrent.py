"""What the mixers with a recurrent memory share: their state, and the way through an op."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, rms_normalise, upcast
from jhybrid.mixers.context import Context
from jhybrid.sharding import shard_op
from pallas_kernels import gated_delta_rule, gated_delta_step
from pallas_kernels.array_types import Array, Float, Int

_HEADS = ("batch", None, "heads")


class RecurrentState(NamedTuple):
    """After `length` tokens: the memory (fp32), and the last inputs of convolutions or shifts."""

    length: Int[Array, "B"]
    tails: Any
    memory: Float[Array, "B H *dims"] | None


def empty_state(
    batch: int, shape: tuple[int, ...] | None, model: ModelConfig, tails: Any = None
) -> RecurrentState:
    """The state before any token, with a memory of zeros of `shape` per row."""
    dtype = jnp.promote_types(model.compute_dtype, jnp.float32)
    memory = None if shape is None else jnp.zeros((batch, *shape), dtype)
    return RecurrentState(jnp.zeros((batch,), jnp.int32), tails, memory)


def split_heads(x: Float[Array, "B T F"], heads: int) -> Float[Array, "B T H K"]:
    return x.reshape(*x.shape[:2], heads, -1)


def recur(
    op: Callable[..., tuple[Array, Array]],
    arguments: Mapping[str, Array],
    state: RecurrentState | None,
    context: Context,
    *,
    tails: Any = None,
    **options: Any,
) -> tuple[Float[Array, "B T H V"], RecurrentState | None]:
    """`op` on its [B, T, H, ...] arguments (and bonus [H, K]), each device on its own heads.

    The memory goes through it, if there is a state, whose new tails are `tails`. Padding has g, k
    and v of 0, which leaves the memory alone.
    """
    arguments = dict(arguments)
    if state is not None:
        context.require_one_document()
    if context.lengths is not None:
        for name in {"g", "k", "v"} & arguments.keys():
            x = arguments[name]
            valid = jnp.expand_dims(context.valid(), range(2, x.ndim))
            arguments[name] = jnp.where(valid, x, 0)
    axes = dict.fromkeys(arguments, _HEADS)
    axes |= {"bonus": ("heads",), "initial_state": ("batch", "heads"), "segment_ids": ("batch",)}
    run = shard_op(partial(op, **options), axes, (_HEADS, ("batch", "heads")))
    memory = None if state is None else state.memory
    o, memory = run(**arguments, initial_state=memory, segment_ids=context.segment_ids)
    if state is not None:
        state = RecurrentState(state.length + context.counts(), tails, memory)
    return o, state


def recur_delta(
    arguments: Mapping[str, Array],
    state: RecurrentState | None,
    context: Context,
    *,
    tails: Any = None,
    **options: Any,
) -> tuple[Float[Array, "B T H V"], RecurrentState | None]:
    """`recur` of the gated delta rule; one token after a state is a step that updates it."""
    decoding = state is not None and arguments["v"].shape[1] == 1
    op = _delta_step if decoding else gated_delta_rule
    return recur(op, arguments, state, context, tails=tails, **options)


def _delta_step(*, initial_state: Array, segment_ids: None, **arguments: Any):
    """`gated_delta_step` with the signature that `recur` calls, T = 1."""
    implementation = arguments.pop("implementation")
    token = {name: x[:, 0] for name, x in arguments.items()}
    o, memory = gated_delta_step(**token, state=initial_state, implementation=implementation)
    return o[:, None], memory


class GatedHeads(nnx.Module):
    """Projections to q, k, v and an output gate, heads with a memory [K, V], and the way out.

    y = W_o (RMSNorm(o) * activation(W_g x)), the norm by head. What o is, subclasses say.
    """

    def __init__(self, config: Any, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        keys, values = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.config = config
        self.model = model
        self.q_proj = linear(model.dim, keys, axes=("embed", "heads"))
        self.k_proj = linear(model.dim, keys, axes=("embed", "heads"))
        self.v_proj = linear(model.dim, values, axes=("embed", "heads"))
        self.g_proj = linear(model.dim, values, axes=("embed", "heads"))
        self.o_norm = RMSNorm(config.value_dim, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(values, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model)

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        """q, k [B, T, H, K] and v [B, T, H, V]."""
        heads = partial(split_heads, heads=self.config.num_heads)
        return heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))

    def leave(
        self,
        o: Float[Array, "B T H V"],
        x: Float[Array, "B T D"],
        activation: Callable[[Array], Array] = jax.nn.silu,
    ) -> Float[Array, "B T D"]:
        return self.o_proj(gated_norm(o, self.o_norm, self.g_proj(x), activation))


def gated_norm(
    o: Float[Array, "B T H V"],
    norm: RMSNorm,
    gate: Float[Array, "B T F"],
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "B T F"]:
    """RMSNorm of each head times activation(gate), in fp32 and returned so."""
    gate = activation(upcast(gate)).reshape(o.shape)
    return (rms_normalise(o, norm.weight[...], norm.eps) * gate).reshape(*o.shape[:2], -1)
