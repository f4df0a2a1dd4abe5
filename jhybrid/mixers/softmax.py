"""Causal softmax attention with grouped key/value heads, rotary positions or none, and a window."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig, SoftmaxConfig
from jhybrid.layers import Linear, RMSNorm, rotate
from jhybrid.mixers import head_cache
from jhybrid.mixers.context import Context, Report
from jhybrid.sharding import shard_op
from pallas_kernels import BlockMask, block_sparse_attention_output
from pallas_kernels.array_types import Array, Float, Int


class SoftmaxState(NamedTuple):
    """Keys (after their rotation) and values of every token so far, `length` of them per row."""

    length: Int[Array, "B"]
    keys: Float[Array, "B G S K"]
    values: Float[Array, "B G S K"]


class Softmax(nnx.Module):
    """o_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(K)) v_j, then the output projection.

    Query head h reads key/value head h // (H / G). `qk_norm` applies an RMSNorm per head before the
    rotation. A window counts the query's own key.
    """

    def __init__(self, config: SoftmaxConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(config.head_dim, eps=model.norm_eps, param_dtype=model.param_dtype)

        self.config = config
        self.dtype = model.compute_dtype
        self.implementation = model.implementation
        q_dim, kv_dim = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        heads_in = partial(linear, axes=("embed", "heads"), bias=config.qkv_bias)
        self.q_proj = heads_in(model.dim, q_dim)
        self.k_proj = heads_in(model.dim, kv_dim)
        self.v_proj = heads_in(model.dim, kv_dim)
        self.o_proj = linear(q_dim, model.dim, axes=("heads", "embed"))
        self.q_norm = norm()
        self.k_norm = norm()

    def initial_state(self, batch: int, max_length: int) -> SoftmaxState:
        room = head_cache.whole_pages(max_length)
        shape = (batch, self.config.num_kv_heads, room, self.config.head_dim)
        keys, values = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return SoftmaxState(jnp.zeros((batch,), jnp.int32), keys, values)

    def __call__(
        self, x: Float[Array, "B T D"], state: SoftmaxState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], SoftmaxState | None, Report]:
        B, T, _ = x.shape
        q, k, v = self.project(x)
        q, k = self.rotate(q, context), self.rotate(k, context)
        kernel = {"window": self.config.window, "implementation": self.implementation}
        heads, cache, batch = ("batch", None, "heads"), ("batch", "heads"), ("batch",)
        if state is None:
            op = shard_op(partial(_attend, **kernel), (heads, heads, heads, batch), heads)
            o = op(q, k, v, context.segment_ids)
        else:
            context.require_one_document()
            op = shard_op(
                partial(_extend_and_attend, **kernel),
                (heads, heads, heads, cache, cache, batch, batch),
                (heads, cache, cache),
            )
            counts = context.counts()
            o, keys, values = op(q, k, v, state.keys, state.values, state.length, counts)
            state = SoftmaxState(state.length + counts, keys, values)
        return self.o_proj(o.reshape(B, T, -1)), state, {}

    def project(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """q, k, v; the first two after their norms and before their rotation."""

        def heads(x: Array, norm: RMSNorm | None = None) -> Array:
            x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
            return x if norm is None else norm(x)

        q, k = heads(self.q_proj(x), self.q_norm), heads(self.k_proj(x), self.k_norm)
        return q, k, heads(self.v_proj(x))

    def rotate(self, x: Float[Array, "B T H K"], context: Context) -> Float[Array, "B T H K"]:
        theta, scaling = self.config.rope_theta, self.config.rope_scaling
        return x if theta is None else rotate(x, context.positions, theta, scaling)


def _attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    segment_ids: Int[Array, "B T"] | None,
    **kernel,
) -> Float[Array, "B T H K"]:
    mask = BlockMask.causal()
    return block_sparse_attention_output(q, k, v, mask, segment_ids=segment_ids, **kernel)


def _extend_and_attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    keys: Float[Array, "B G S K"],
    values: Float[Array, "B G S K"],
    length: Int[Array, "B"],
    counts: Int[Array, "B"],
    window: int | None,
    **kernel,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """Writes each row's `counts` new keys at its own length, then attends over the whole cache."""
    step = jnp.arange(k.shape[1])
    place = jnp.where(step < counts[:, None], length[:, None] + step, keys.shape[2])
    write = jax.vmap(lambda cache, at, new: cache.at[:, at].set(new, mode="drop"))
    keys = write(keys, place, jnp.moveaxis(k, 1, 2))
    values = write(values, place, jnp.moveaxis(v, 1, 2))
    offset = jnp.broadcast_to(length[:, None], keys.shape[:2])
    if q.shape[1] == 1 and window is None:
        return head_cache.attend_newest(q, keys, values, offset, **kernel), keys, values
    o, _ = head_cache.attend(q, keys, values, BlockMask.causal(), offset, window=window, **kernel)
    return o, keys, values
