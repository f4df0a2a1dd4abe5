"""Mamba-2: a state space model with one decay per head and token, as linear attention."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, rms_normalise, upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import ConvolvedInputs, log_decay_rates, step_bias
from jhybrid.mixers.recurrent import RecurrentState, empty_state, recur, split_heads
from jhybrid.recurrent_config import Mamba2Config
from pallas_kernels import simple_linear_attention
from pallas_kernels.array_types import Array, Float


class Mamba2(nnx.Module):
    """S_t = e^(dt_t A) S_{t-1} + dt_t B_t x_t^T, read as S_t^T C_t + D x_t.

    arXiv 2405.21060. C, B and x are the convolved q, k and v of `inputs`; B and C are shared by the
    heads of a group. dt = softplus(W_dt u + dt_bias), A = -exp(A_log). What is read is gated by
    silu(W_z u) and then RMS-normalised over the channels of each group.
    """

    def __init__(self, config: Mamba2Config, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        H, width = config.num_heads, config.num_heads * config.value_dim
        self.config = config
        self.model = model
        self.inputs = ConvolvedInputs(
            config.num_groups,
            H,
            config.key_dim,
            config.value_dim,
            config.conv_width,
            model,
            rngs=rngs,
            conv_bias=True,
        )
        self.z_proj = linear(model.dim, width, axes=("embed", "heads"))
        self.dt_proj = linear(model.dim, H, axes=("embed", "heads"), wide=True)
        self.dt_bias = step_bias(rngs, H, model.param_dtype)
        self.A_log = log_decay_rates(rngs, H, 1.0, model.param_dtype)
        self.D = nnx.Param(jnp.ones((H,), model.param_dtype), axes=("heads",))
        self.o_norm = nnx.Param(jnp.ones((width,), model.param_dtype), axes=("heads",))
        self.o_proj = linear(width, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model, self.inputs.empty_tails(batch))

    def __call__(
        self, u: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        config = self.config
        (C, B, x), tails = self.inputs(u, None if state is None else state.tails, context)
        x = split_heads(x, config.num_heads)
        dt = jax.nn.softplus(self.dt_proj(u) + self.dt_bias[...])
        arguments = {
            "q": split_heads(C, config.num_groups),
            "k": split_heads(B, config.num_groups),
            "v": (x * dt[..., None]).astype(x.dtype),
            "g": -jnp.exp(self.A_log[...].astype(dt.dtype)) * dt,
        }
        op = partial(simple_linear_attention, scale=1.0, implementation=self.model.implementation)
        y, state = recur(op, arguments, state, context, tails=tails)
        y = upcast(y) + self.D[...][:, None] * upcast(x)
        gated = split_heads(
            y.reshape(*y.shape[:2], -1) * jax.nn.silu(upcast(self.z_proj(u))), config.num_groups
        )
        weight = self.o_norm[...].reshape(config.num_groups, -1)
        y = rms_normalise(gated, weight, self.model.norm_eps)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), state, {}
