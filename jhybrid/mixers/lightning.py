"""Lightning attention: fixed decays that get weaker with the head and with depth."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import RecurrentState, empty_state, gated_norm, recur, split_heads
from jhybrid.recurrent_config import LightningConfig
from pallas_kernels import simple_linear_attention
from pallas_kernels.array_types import Array, Float


class Lightning(nnx.Module):
    """S_t = e^(-8 h / H (1 - depth)) S_{t-1} + k_t v_t^T in head h, read as S_t^T q_t / sqrt(K).

    arXiv 2401.04658; depth is the share of the model's blocks below this one. q, k and v go through
    silu; each head's read is RMS-normalised and gated by sigmoid(W_g x), as in MiniMax-01 (arXiv
    2501.08313).
    """

    def __init__(self, config: LightningConfig, model: ModelConfig, *, rngs: nnx.Rngs):
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
        q, k, v = (
            split_heads(jax.nn.silu(upcast(p(x))).astype(x.dtype), H)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        depth = 0.0 if context.depth is None else context.depth
        rate = jnp.arange(H, dtype=jnp.promote_types(x.dtype, "float32")) * (8 / H)
        g = jnp.broadcast_to(-rate * (1 - depth), (*x.shape[:2], H))
        op = partial(simple_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, {"q": q, "k": k, "v": v, "g": g}, state, context)
        gated = gated_norm(o, self.o_norm, self.g_proj(x), jax.nn.sigmoid)
        return self.o_proj(gated), state, {}
