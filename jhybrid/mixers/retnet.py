"""RetNet: every head forgets at a fixed rate of its own."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, rotate
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import RecurrentState, empty_state, gated_norm, recur, split_heads
from jhybrid.recurrent_config import RetNetConfig
from pallas_kernels import simple_linear_attention
from pallas_kernels.array_types import Array, Float


class RetNet(nnx.Module):
    """S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T in head h, read as S_t^T q_t / sqrt(K).

    arXiv 2307.08621. q and k are rotated. Each head's read is RMS-normalised and gated by
    silu(W_g x).
    """

    def __init__(self, config: RetNetConfig, model: ModelConfig, *, rngs: nnx.Rngs):
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

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        H = self.config.num_heads
        q, k, v = (split_heads(p(x), H) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(a, context.positions, self.config.rope_theta) for a in (q, k))
        g = jnp.log1p(-(2.0 ** (-5 - jnp.arange(H, dtype=jnp.promote_types(x.dtype, "float32")))))
        arguments = {"q": q, "k": k, "v": v, "g": jnp.broadcast_to(g, (*x.shape[:2], H))}
        op = partial(simple_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context)
        return self.o_proj(gated_norm(o, self.o_norm, self.g_proj(x))), state, {}
