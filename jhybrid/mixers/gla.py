"""Gated linear attention: each key channel decays by a gate of its own."""

from functools import partial

import jax
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, LowRank, RMSNorm
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import RecurrentState, empty_state, gated_norm, recur, split_heads
from jhybrid.recurrent_config import GLAConfig
from pallas_kernels import gated_linear_attention
from pallas_kernels.array_types import Array, Float


class GLA(nnx.Module):
    """S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T, read as S_t^T q_t / sqrt(K).

    arXiv 2312.06635. g = log sigmoid(W_2 W_1 x + b) / divisor, in fp32. Each head's read is
    RMS-normalised and gated by silu(W_g x).
    """

    def __init__(self, config: GLAConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": model.compute_dtype, "param_dtype": model.param_dtype}
        linear = partial(Linear, rngs=rngs, **dtypes)
        low_rank = partial(LowRank, rngs=rngs, **dtypes)
        keys, values = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.config = config
        self.model = model
        self.q_proj = linear(model.dim, keys, axes=("embed", "heads"))
        self.k_proj = linear(model.dim, keys, axes=("embed", "heads"))
        self.v_proj = linear(model.dim, values, axes=("embed", "heads"))
        self.decay = low_rank(model.dim, config.gate_rank, keys, bias=True, wide=True)
        self.g_proj = linear(model.dim, values, axes=("embed", "heads"))
        self.o_norm = RMSNorm(config.value_dim, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(values, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model)

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        projected = {
            "q": self.q_proj(x),
            "k": self.k_proj(x),
            "v": self.v_proj(x),
            "g": jax.nn.log_sigmoid(self.decay(x)) / self.config.gate_divisor,
        }
        arguments = {n: split_heads(a, self.config.num_heads) for n, a in projected.items()}
        op = partial(gated_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context)
        return self.o_proj(gated_norm(o, self.o_norm, self.g_proj(x))), state, {}
