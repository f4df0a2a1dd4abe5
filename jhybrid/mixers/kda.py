"""Kimi delta attention: Gated DeltaNet with a decay per key channel."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, LowRank, RMSNorm, l2_normalise
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import ConvolvedInputs, log_decay_rates, step_bias
from jhybrid.mixers.recurrent import RecurrentState, empty_state, gated_norm, recur, split_heads
from jhybrid.recurrent_config import KDAConfig
from pallas_kernels import gated_linear_attention
from pallas_kernels.array_types import Array, Float


class KDA(nnx.Module):
    """S_t = S' + beta_t k_t (v_t - S'^T k_t)^T with S' = Diag(e^g_t) S_{t-1}.

    arXiv 2510.26692. Read as S_t^T q_t / sqrt(K). q and k are L2-normalised per head,
    beta = sigmoid(W_b x), and g = -exp(A_log) softplus(W_2 W_1 x + dt_bias) in fp32, A_log per
    head. Each head's read is RMS-normalised and gated by sigmoid(W_4 W_3 x + b). Both inner ranks
    are the value dim.
    """

    def __init__(self, config: KDAConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": model.compute_dtype, "param_dtype": model.param_dtype}
        linear = partial(Linear, rngs=rngs, **dtypes)
        low_rank = partial(LowRank, model.dim, config.value_dim, rngs=rngs, **dtypes)
        H, K, V = config.num_heads, config.key_dim, config.value_dim
        self.config = config
        self.model = model
        self.inputs = ConvolvedInputs(H, H, K, V, config.conv_width, model, rngs=rngs)
        self.b_proj = linear(model.dim, H, axes=("embed", "heads"), wide=True)
        self.decay = low_rank(H * K, wide=True)
        self.A_log = log_decay_rates(rngs, H, 1.0, model.param_dtype)
        self.dt_bias = step_bias(rngs, H * K, model.param_dtype)
        self.gate = low_rank(H * V, bias=True)
        self.o_norm = RMSNorm(V, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(H * V, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model, self.inputs.empty_tails(batch))

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        H = self.config.num_heads
        streams, tails = self.inputs(x, None if state is None else state.tails, context)
        q, k, v = (split_heads(a, H) for a in streams)
        raw = split_heads(self.decay(x) + self.dt_bias[...], H)
        rate = jnp.exp(self.A_log[...].astype(raw.dtype))[:, None]
        arguments = {
            "q": l2_normalise(q),
            "k": l2_normalise(k),
            "v": v,
            "g": -rate * jax.nn.softplus(raw),
            "beta": jax.nn.sigmoid(self.b_proj(x)) * (2 if self.config.negative_eigenvalues else 1),
        }
        op = partial(gated_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context, tails=tails)
        return self.o_proj(gated_norm(o, self.o_norm, self.gate(x), jax.nn.sigmoid)), state, {}
