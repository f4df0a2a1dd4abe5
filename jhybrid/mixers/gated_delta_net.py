"""Gated DeltaNet: a matrix state per head that decays and is corrected token by token."""

from functools import partial

from flax import nnx

from jhybrid.config import GatedDeltaNetConfig, ModelConfig
from jhybrid.layers import Linear, RMSNorm, l2_normalise
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import DeltaInputs
from jhybrid.mixers.recurrent import (
    RecurrentState,
    empty_state,
    gated_norm,
    recur_delta,
    split_heads,
)
from pallas_kernels.array_types import Array, Float


class GatedDeltaNet(nnx.Module):
    """S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T, read as S_t^T q_t / sqrt(K).

    arXiv 2412.06464. q and k are L2-normalised per head; value head j uses query/key head
    j // (H / Hk). Each head's read is RMS-normalised and gated by silu(W_g x).
    """

    def __init__(self, config: GatedDeltaNetConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        width = config.value_heads * config.value_dim
        self.config = config
        self.model = model
        self.inputs = DeltaInputs(
            config.num_heads,
            config.value_heads,
            config.key_dim,
            config.value_dim,
            config.conv_width,
            model,
            rngs=rngs,
        )
        self.g_proj = linear(model.dim, width, axes=("embed", "heads"))
        self.o_norm = RMSNorm(config.value_dim, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(width, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        config = self.config
        shape = (config.value_heads, config.key_dim, config.value_dim)
        return empty_state(batch, shape, self.model, self.inputs.empty_tails(batch))

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        config = self.config
        (q, k, v), tails = self.inputs(x, None if state is None else state.tails, context)
        g, beta = self.inputs.gates(x, config.negative_eigenvalues)
        arguments = {
            "q": l2_normalise(split_heads(q, config.num_heads)),
            "k": l2_normalise(split_heads(k, config.num_heads)),
            "v": split_heads(v, config.value_heads),
            "g": g,
            "beta": beta,
        }
        options = {"tails": tails, "implementation": self.model.implementation}
        o, state = recur_delta(arguments, state, context, **options)
        return self.o_proj(gated_norm(o, self.o_norm, self.g_proj(x))), state, {}
