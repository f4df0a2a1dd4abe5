"""Gated linear attention: each key channel decays by a gate of its own."""

from functools import partial

import jax
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import LowRank
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import GatedHeads, RecurrentState, recur, split_heads
from jhybrid.recurrent_config import GLAConfig
from pallas_kernels import gated_linear_attention
from pallas_kernels.array_types import Array, Float


class GLA(GatedHeads):
    """S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T, read as S_t^T q_t / sqrt(K).

    arXiv 2312.06635. g = log sigmoid(W_2 W_1 x + b) / divisor, in fp32. Each head's read is
    RMS-normalised and gated by silu(W_g x).
    """

    def __init__(self, config: GLAConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, model, rngs=rngs)
        self.decay = LowRank(
            model.dim,
            config.gate_rank,
            config.num_heads * config.key_dim,
            bias=True,
            wide=True,
            dtype=model.compute_dtype,
            param_dtype=model.param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        q, k, v = self.project(x)
        g = jax.nn.log_sigmoid(self.decay(x)) / self.config.gate_divisor
        arguments = {"q": q, "k": k, "v": v, "g": split_heads(g, self.config.num_heads)}
        op = partial(gated_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context)
        return self.leave(o, x), state, {}
