"""The convolved projections and gates that feed a delta rule, or Mamba-2's recurrence."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, ShortConv
from jhybrid.mixers.context import Context
from pallas_kernels.array_types import Array, Float, Int


class Streams(NamedTuple):
    """q, k and v as one row of channels per token: the inputs of their convolutions, or results.

    The last W - 1 inputs of each, kept as a state, are the convolutions' tails.
    """

    q: Float[Array, "B T F"]
    k: Float[Array, "B T F"]
    v: Float[Array, "B T F"]


def log_decay_rates(rngs: nnx.Rngs, heads: int, low: float, dtype: str) -> nnx.Param:
    """log A, with A uniform in (low, 16)."""
    rates = jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=16.0)
    return nnx.Param(jnp.log(rates).astype(dtype), axes=("heads",))


def step_bias(rngs: nnx.Rngs, size: int, dtype: str) -> nnx.Param:
    """dt_bias, with softplus(dt_bias) log-uniform in (0.001, 0.1)."""
    low, high = jnp.log(1e-3), jnp.log(0.1)
    step = jax.random.uniform(rngs.params(), (size,), minval=low, maxval=high)
    step = jnp.maximum(jnp.exp(step), 1e-4)
    inverse_of_softplus = step + jnp.log(-jnp.expm1(-step))
    return nnx.Param(inverse_of_softplus.astype(dtype), axes=("heads",))


class ConvolvedInputs(nnx.Module):
    """q, k, v = silu(conv(W x)), or silu(W x) without a width."""

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int | None,
        model: ModelConfig,
        *,
        rngs: nnx.Rngs,
        conv_bias: bool = False,
    ):
        linear = partial(
            Linear,
            model.dim,
            axes=("embed", "heads"),
            dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            rngs=rngs,
        )
        conv = partial(
            ShortConv, width=conv_width, param_dtype=model.param_dtype, rngs=rngs, bias=conv_bias
        )
        self.dtype = model.compute_dtype
        self.q_proj = linear(key_heads * key_dim)
        self.k_proj = linear(key_heads * key_dim)
        self.v_proj = linear(value_heads * value_dim)
        self.q_conv = conv(key_heads * key_dim)
        self.k_conv = conv(key_heads * key_dim)
        self.v_conv = conv(value_heads * value_dim)

    def project(self, x: Float[Array, "B T D"]) -> Streams:
        return Streams(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def convolve(
        self, streams: Streams, tails: Streams | None, segment_ids: Int[Array, "B T"] | None
    ) -> Streams:
        q_tail, k_tail, v_tail = (None, None, None) if tails is None else tails
        return Streams(
            self.q_conv(streams.q, q_tail, segment_ids),
            self.k_conv(streams.k, k_tail, segment_ids),
            self.v_conv(streams.v, v_tail, segment_ids),
        )

    def empty_tails(self, batch: int) -> Streams:
        convs = (self.q_conv, self.k_conv, self.v_conv)
        return Streams(*(conv.empty_tail(batch, self.dtype) for conv in convs))

    def tails_after(self, tails: Streams, streams: Streams, count: Int[Array, "B"]) -> Streams:
        """The tails once the first `count` tokens of each row have gone through."""
        convs = (self.q_conv, self.k_conv, self.v_conv)
        triples = zip(convs, tails, streams, strict=True)
        return Streams(*(conv.tail_after(tail, x, count) for conv, tail, x in triples))

    def __call__(
        self, x: Float[Array, "B T D"], tails: Streams | None, context: Context
    ) -> tuple[Streams, Streams | None]:
        """The convolved streams, and the tails after this call if there were some before."""
        streams = self.project(x)
        convolved = self.convolve(streams, tails, context.segment_ids)
        if tails is None:
            return convolved, None
        return convolved, self.tails_after(tails, streams, context.counts())


class DeltaInputs(ConvolvedInputs):
    """Of a gated delta rule: also beta = sigmoid(W_b x), g = -exp(A_log) softplus(W_a x + dt_bias).

    Gated DeltaNet, arXiv 2412.06464. g (log decay, one per value head) and beta are fp32.
    """

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int | None,
        model: ModelConfig,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(key_heads, value_heads, key_dim, value_dim, conv_width, model, rngs=rngs)
        linear = partial(
            Linear,
            model.dim,
            value_heads,
            axes=("embed", "heads"),
            dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            rngs=rngs,
            wide=True,
        )
        self.a_proj = linear()
        self.b_proj = linear()
        # The lower end keeps log A finite.
        self.A_log = log_decay_rates(rngs, value_heads, 1e-6, model.param_dtype)
        self.dt_bias = step_bias(rngs, value_heads, model.param_dtype)

    def gates(
        self, x: Float[Array, "B T D"], negative_eigenvalues: bool = False
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """(g, beta), both fp32; beta reaches 2 with `negative_eigenvalues`."""
        beta = jax.nn.sigmoid(self.b_proj(x)) * (2 if negative_eigenvalues else 1)
        rate = self.a_proj(x)
        g = jax.nn.softplus(rate + self.dt_bias[...]) * -jnp.exp(self.A_log[...].astype(rate.dtype))
        return g, beta
