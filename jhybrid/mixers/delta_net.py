"""DeltaNet: a matrix state per head that is corrected token by token and never decays."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, l2_normalise
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import ConvolvedInputs
from jhybrid.mixers.recurrent import RecurrentState, empty_state, recur_delta, split_heads
from jhybrid.recurrent_config import DeltaNetConfig
from pallas_kernels.array_types import Array, Float


class DeltaNet(nnx.Module):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, read as S_t^T q_t / sqrt(K).

    arXiv 2406.06484. q and k are L2-normalised per head, beta = sigmoid(W_b x). Each head's read is
    RMS-normalised.
    """

    def __init__(self, config: DeltaNetConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        H, K, V = config.num_heads, config.key_dim, config.value_dim
        self.config = config
        self.model = model
        self.inputs = ConvolvedInputs(H, H, K, V, config.conv_width, model, rngs=rngs)
        self.b_proj = linear(model.dim, H, axes=("embed", "heads"), wide=True)
        self.o_norm = RMSNorm(V, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(H * V, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        shape = (self.config.num_heads, self.config.key_dim, self.config.value_dim)
        return empty_state(batch, shape, self.model, self.inputs.empty_tails(batch))

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        streams, tails = self.inputs(x, None if state is None else state.tails, context)
        q, k, v = (split_heads(a, self.config.num_heads) for a in streams)
        beta = jax.nn.sigmoid(self.b_proj(x)) * (2 if self.config.negative_eigenvalues else 1)
        arguments = {
            "q": l2_normalise(q),
            "k": l2_normalise(k),
            "v": v,
            "g": jnp.zeros_like(beta),
            "beta": beta,
        }
        options = {"tails": tails, "implementation": self.model.implementation}
        o, state = recur_delta(arguments, state, context, **options)
        return self.o_proj(self.o_norm(o).reshape(*x.shape[:2], -1)), state, {}
