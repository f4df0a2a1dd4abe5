"""Gated DeltaNet: a matrix state per head that decays and is corrected token by token."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import GatedDeltaNetConfig, ModelConfig
from jhybrid.layers import Linear, RMSNorm, l2_normalise, rms_normalise, upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import DeltaInputs, Streams
from jhybrid.sharding import shard_op
from pallas_kernels import gated_delta_rule
from pallas_kernels.array_types import Array, Float, Int


class GatedDeltaNetState(NamedTuple):
    """The recurrent state (fp32) after `length` tokens, and the convolutions' last inputs."""

    length: Int[Array, "B"]
    tails: Streams
    memory: Float[Array, "B H K V"]


class GatedDeltaNet(nnx.Module):
    """S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T, read as S_t^T q_t / sqrt(K).

    arXiv 2412.06464. q and k are L2-normalised per head; value head j uses query/key head
    j // (H / Hk). Each head's read is RMS-normalised and gated by silu(W_g x).
    """

    def __init__(self, config: GatedDeltaNetConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        width = config.value_heads * config.value_dim
        self.config = config
        self.dtype = model.compute_dtype
        self.implementation = model.implementation
        self.inputs = DeltaInputs(
            config.num_heads,
            config.value_heads,
            config.key_dim,
            config.value_dim,
            config.conv_width,
            model,
            rngs=rngs,
        )
        self.g_proj = linear(model.dim, width, axes=("embed", "heads"))
        self.o_norm = RMSNorm(config.value_dim, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(width, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> GatedDeltaNetState:
        config = self.config
        shape = (batch, config.value_heads, config.key_dim, config.value_dim)
        memory = jnp.zeros(shape, jnp.promote_types(self.dtype, jnp.float32))
        tails = self.inputs.empty_tails(batch)
        return GatedDeltaNetState(jnp.zeros((batch,), jnp.int32), tails, memory)

    def __call__(
        self, x: Float[Array, "B T D"], state: GatedDeltaNetState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], GatedDeltaNetState | None, Report]:
        B, T, _ = x.shape
        config = self.config
        if state is not None:
            context.require_one_document()
        streams = self.inputs.project(x)
        tails = None if state is None else state.tails
        q, k, v = self.inputs.convolve(streams, tails, context.segment_ids)
        q = l2_normalise(q.reshape(B, T, config.num_heads, config.key_dim))
        k = l2_normalise(k.reshape(B, T, config.num_heads, config.key_dim))
        v = v.reshape(B, T, config.value_heads, config.value_dim)
        g, beta = self.inputs.gates(x, config.negative_eigenvalues)
        if context.lengths is not None:  # g = 0 and beta = 0 leave the state alone
            valid = context.valid()[..., None]
            g, beta = jnp.where(valid, g, 0), jnp.where(valid, beta, 0)

        heads, batch = ("batch", None, "heads"), ("batch",)
        op = shard_op(
            partial(_delta, implementation=self.implementation),
            (heads, heads, heads, heads, heads, ("batch", "heads"), batch),
            (heads, ("batch", "heads")),
        )
        memory = None if state is None else state.memory
        o, memory = op(q, k, v, g, beta, memory, context.segment_ids)
        if state is not None:
            counts = context.counts()
            tails = self.inputs.tails_after(state.tails, streams, counts)
            state = GatedDeltaNetState(state.length + counts, tails, memory)

        gate = jax.nn.silu(upcast(self.g_proj(x))).reshape(o.shape)
        o = rms_normalise(o, self.o_norm.weight[...], self.o_norm.eps) * gate
        return self.o_proj(o.reshape(B, T, -1)), state, {}


def _delta(q, k, v, g, beta, initial_state, segment_ids, **kernel):
    return gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, segment_ids=segment_ids, **kernel
    )
