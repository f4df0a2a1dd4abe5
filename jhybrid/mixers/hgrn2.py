"""HGRN-2: HGRN with an outer-product state, its keys tied to the forget gate."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.hgrn import log_forget_gate
from jhybrid.mixers.recurrent import RecurrentState, empty_state, recur, split_heads
from jhybrid.recurrent_config import HGRN2Config
from pallas_kernels import gated_linear_attention
from pallas_kernels.array_types import Array, Float

_NORM_EPS = 1e-5  # whatever the model's, as in flash-linear-attention


class HGRN2(nnx.Module):
    """S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T, read as S_t^T silu(W_q x_t) / sqrt(K).

    arXiv 2404.07904; f is HGRN's forget gate. What is read is RMS-normalised over all heads.
    """

    def __init__(self, config: HGRN2Config, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        keys, values = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.config = config
        self.model = model
        self.q_proj = linear(model.dim, keys, axes=("embed", "heads"))
        self.f_proj = linear(model.dim, keys, axes=("embed", "heads"), wide=True)
        self.i_proj = linear(model.dim, values, axes=("embed", "heads"))
        self.o_norm = RMSNorm(values, eps=_NORM_EPS, param_dtype=model.param_dtype)
        self.o_proj = linear(values, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model)

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        g = log_forget_gate(self.f_proj(x), context.lower_bound)
        projected = {
            "q": jax.nn.silu(upcast(self.q_proj(x))).astype(x.dtype),
            "k": -jnp.expm1(g).astype(x.dtype),
            "v": self.i_proj(x),
            "g": g,
        }
        arguments = {n: split_heads(a, self.config.num_heads) for n, a in projected.items()}
        op = partial(gated_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context)
        return self.o_proj(self.o_norm(o.reshape(*x.shape[:2], -1))), state, {}
