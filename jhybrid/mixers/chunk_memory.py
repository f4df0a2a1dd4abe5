"""The linear memories that chunk routing may write to: what each makes of a layer's input.

Gated DeltaNet is NAtS-L's own; DeltaNet and Mamba-2 are the other two of the released code
(automl/NeuralAttentionSearchLinear). All three read L2-normalised queries and keys that softmax
shares, so only their gates differ.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ChunkRoutedConfig, ModelConfig
from jhybrid.layers import Linear
from jhybrid.mixers.delta_inputs import ConvolvedInputs, DeltaInputs
from pallas_kernels.array_types import Array, Bool, Float


class Writes(NamedTuple):
    """What a memory is told per token: v to write, its log decay, its write strength.

    Without beta the memory adds k v^T; with it, it is corrected by the delta rule.
    """

    v: Float[Array, "B T H V"]
    g: Float[Array, "B T H"]
    beta: Float[Array, "B T H"] | None

    def only(self, tokens: Bool[Array, "B T"]) -> "Writes":
        """The same with all other tokens leaving the memory as it is."""
        keep = tokens[..., None]
        g = jnp.where(keep, self.g, 0)
        if self.beta is not None:
            return Writes(self.v, g, jnp.where(keep, self.beta, 0))
        return Writes(jnp.where(keep[..., None], self.v, 0), g, None)


class GatedDeltaMemory(DeltaInputs):
    """S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T."""

    def writes(self, x: Float[Array, "B T D"], v: Float[Array, "B T H V"]) -> Writes:
        return Writes(v, *self.gates(x))


class DeltaMemory(ConvolvedInputs):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, beta = sigmoid(W_b x)."""

    def __init__(self, heads: int, *sizes: Any, rngs: nnx.Rngs):
        super().__init__(heads, *sizes, rngs=rngs)
        self.b_proj = _gate(heads, sizes[-1], rngs)

    def writes(self, x: Float[Array, "B T D"], v: Float[Array, "B T H V"]) -> Writes:
        beta = jax.nn.sigmoid(self.b_proj(x))
        return Writes(v, jnp.zeros_like(beta), beta)


class Mamba2Memory(ConvolvedInputs):
    """S_t = e^(-A dt_t) S_{t-1} + dt_t k_t v_t^T, dt = softplus(W_a x + dt_bias).

    A starts as 1..H and dt_bias as 1.
    """

    def __init__(self, heads: int, *sizes: Any, rngs: nnx.Rngs):
        super().__init__(heads, *sizes, rngs=rngs)
        dtype = sizes[-1].param_dtype
        self.a_proj = _gate(heads, sizes[-1], rngs)
        self.A_log = nnx.Param(jnp.log(jnp.arange(1.0, heads + 1)).astype(dtype), axes=("heads",))
        self.dt_bias = nnx.Param(jnp.ones((heads,), dtype), axes=("heads",))

    def writes(self, x: Float[Array, "B T D"], v: Float[Array, "B T H V"]) -> Writes:
        dt = jax.nn.softplus(self.a_proj(x) + self.dt_bias[...])
        g = -jnp.exp(self.A_log[...].astype(dt.dtype)) * dt
        return Writes((v * dt[..., None]).astype(v.dtype), g, None)


MEMORIES: Mapping[str, Any] = {
    "gated_delta": GatedDeltaMemory,
    "delta": DeltaMemory,
    "mamba2": Mamba2Memory,
}


def build_memory(
    config: ChunkRoutedConfig, model: ModelConfig, *, rngs: nnx.Rngs
) -> GatedDeltaMemory | DeltaMemory | Mamba2Memory:
    """The inputs of `config.memory`, with fresh parameters."""
    sizes = (config.num_heads, config.key_dim, config.value_dim, config.conv_width)
    return MEMORIES[config.memory](config.num_heads, *sizes, model, rngs=rngs)


def _gate(heads: int, model: ModelConfig, rngs: nnx.Rngs) -> Linear:
    make = partial(Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs)
    return make(model.dim, heads, axes=("embed", "heads"), wide=True)
