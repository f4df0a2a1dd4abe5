"""RWKV-6: data-dependent mixes with the token before, decays per channel, a bonus for the present.

Its two halves are mixers of two blocks, both with norm="layer": time mixing and channel mixing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import (
    Linear,
    LowRank,
    last_inputs,
    layer_normalise,
    normal,
    token_before,
    upcast,
)
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import RecurrentState, empty_state, recur, split_heads
from jhybrid.recurrent_config import RWKV6ChannelConfig, RWKV6Config
from pallas_kernels import gated_linear_attention
from pallas_kernels.array_types import Array, Float

_LARGEST_RATE = 8.0  # exp(-exp(8)) is 0 in float64 already; without it exp could reach infinity


class RWKV6(nnx.Module):
    """S_t = Diag(e^-e^w_t) S_{t-1} + k_t v_t^T, read as (S_{t-1} + Diag(u) k_t v_t^T)^T r_t.

    arXiv 2404.05892. With d_t = x_{t-1} - x_t, each of r, w, k, v and g is projected from its own
    mix x + d * mu, where mu = W_n tanh(W (x + d * mu_x))_n + bias_n. w goes through a low rank.
    What is read is normalised per head (mean and variance) and gated by silu(g).
    """

    def __init__(self, config: RWKV6Config, model: ModelConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": model.compute_dtype, "param_dtype": model.param_dtype}
        linear = partial(Linear, rngs=rngs, **dtypes)
        D, H = model.dim, config.num_heads
        keys, values = H * config.key_dim, H * config.value_dim

        def constant(value: float, *shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, model.param_dtype), axes=axes)

        self.config = config
        self.model = model
        self.mix = constant(0.0, D, axes=(None,))
        self.mix_down = linear(D, 5 * config.shift_rank, axes=("embed", None))
        mix_up = normal(rngs, (5, config.shift_rank, D), model.param_dtype)
        self.mix_up = nnx.Param(mix_up, axes=(None, None, "embed"))
        self.mix_bias = constant(0.0, 5 * D, axes=(None,))
        self.r_proj = linear(D, keys, axes=("embed", "heads"))
        self.w_proj = LowRank(
            D,
            config.decay_rank,
            keys,
            activation=jnp.tanh,
            bias=True,
            wide=True,
            rngs=rngs,
            **dtypes,
        )
        self.k_proj = linear(D, keys, axes=("embed", "heads"))
        self.v_proj = linear(D, values, axes=("embed", "heads"))
        self.g_proj = linear(D, values, axes=("embed", "heads"))
        self.bonus = constant(0.0, keys, axes=("heads",))
        self.o_weight = constant(1.0, values, axes=("heads",))
        self.o_bias = constant(0.0, values, axes=("heads",))
        self.o_proj = linear(values, D, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model, _no_token(batch, self.model))

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        B, T, D = x.shape
        H, model = self.config.num_heads, self.model
        last = None if state is None else state.tails
        delta = token_before(x, last, context.segment_ids) - x
        inner = jnp.tanh(self.mix_down(x + delta * self.mix[...].astype(x.dtype)))
        mixes = jnp.einsum(
            "btnr,nrd->nbtd",
            inner.reshape(B, T, 5, -1),
            self.mix_up[...].astype(inner.dtype),
        )
        mixes += self.mix_bias[...].astype(x.dtype).reshape(5, 1, 1, D)
        r, w, k, v, g = x + delta * mixes
        projected = {
            "q": self.r_proj(r),
            "k": self.k_proj(k),
            "v": self.v_proj(v),
            "g": -jnp.exp(jnp.minimum(self.w_proj(w), _LARGEST_RATE)),
        }
        arguments = {n: split_heads(a, H) for n, a in projected.items()}
        arguments["bonus"] = self.bonus[...].reshape(H, -1)
        op = partial(gated_linear_attention, scale=1.0, implementation=model.implementation)
        tails = None if last is None else last_inputs(last, x, context.counts())
        o, state = recur(op, arguments, state, context, tails=tails)
        weight, bias = (p[...].reshape(H, -1) for p in (self.o_weight, self.o_bias))
        o = layer_normalise(o, weight, bias, model.norm_eps).reshape(B, T, -1)
        return self.o_proj(o * jax.nn.silu(upcast(self.g_proj(g)))), state, {}


class RWKV6Channel(nnx.Module):
    """sigmoid(W_r (x + d * mu_r)) * W_v relu(W_k (x + d * mu_k))^2,  d_t = x_{t-1} - x_t."""

    def __init__(self, config: RWKV6ChannelConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        zeros = jnp.zeros((model.dim,), model.param_dtype)
        self.model = model
        self.key_mix = nnx.Param(zeros, axes=(None,))
        self.receptance_mix = nnx.Param(zeros, axes=(None,))
        self.k_proj = linear(model.dim, config.width, axes=("embed", "mlp"))
        self.v_proj = linear(config.width, model.dim, axes=("mlp", "embed"))
        self.r_proj = linear(model.dim, model.dim, axes=("embed", None))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        return empty_state(batch, None, self.model, _no_token(batch, self.model))

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        last = None if state is None else state.tails
        delta = token_before(x, last, context.segment_ids) - x
        key = self.k_proj(x + delta * self.key_mix[...].astype(x.dtype))
        receptance = self.r_proj(x + delta * self.receptance_mix[...].astype(x.dtype))
        value = self.v_proj(jnp.square(jax.nn.relu(key)))
        if state is not None and last is not None:
            context.require_one_document()
            counts = context.counts()
            state = RecurrentState(state.length + counts, last_inputs(last, x, counts), None)
        return (jax.nn.sigmoid(upcast(receptance)) * value).astype(x.dtype), state, {}


def _no_token(batch: int, model: ModelConfig) -> Float[Array, "B 1 D"]:
    return jnp.zeros((batch, 1, model.dim), model.compute_dtype)
