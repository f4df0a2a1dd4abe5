"""Which heads are full, learned once for all samples: the static masks that routing is compared to.

Each key/value head has one parameter. In training its head is a mixture of both modes,
w o_full + (1 - w) o_sparse with w in [0, 1]; afterwards it is full where w exceeds a threshold.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from pallas_kernels.array_types import Array, Float

BETA = 2 / 3  # hard concrete's temperature
LOW, HIGH = -0.1, 1.1  # what hard concrete stretches (0, 1) to before cutting it


class AlphaMask(nnx.Module):
    """w = alpha in [0, 1], 1 at first: DuoAttention, arXiv 2410.10819."""

    def __init__(self, heads: int, model: ModelConfig, *, rngs: nnx.Rngs):
        self.alpha = nnx.Param(jnp.ones(heads, _wide(model)), axes=(None,))

    def weight(self, rng: Array | None) -> Float[Array, "G"]:
        return eval_weight("alpha", self.alpha[...])


class HardConcreteMask(nnx.Module):
    """PruLong, arXiv 2506.17121, after arXiv 1712.01312; log_alpha is about 4 at first.

    In training w = clip(1.2 s - 0.1, 0, 1) with s = sigmoid((logit(u) + log_alpha) / beta), one u
    drawn from (0, 1) for all samples; afterwards w = sigmoid(0.8 log_alpha / beta).
    """

    def __init__(self, heads: int, model: ModelConfig, *, rngs: nnx.Rngs):
        start = 4 + 0.01 * jax.random.normal(rngs.params(), (heads,), _wide(model))
        self.log_alpha = nnx.Param(start, axes=(None,))

    def weight(self, rng: Array | None) -> Float[Array, "G"]:
        log_alpha = self.log_alpha[...]
        if rng is None:
            return eval_weight("log_alpha", log_alpha)
        u = jax.random.uniform(rng, log_alpha.shape, log_alpha.dtype, 1e-6, 1 - 1e-6)
        s = jax.nn.sigmoid((jax.scipy.special.logit(u) + log_alpha) / BETA)
        return jnp.clip(LOW + (HIGH - LOW) * s, 0, 1)


def eval_weight(name: str, parameter: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """w of the parameter `name`, outside training."""
    if name == "alpha":
        return within_unit(parameter)
    return jax.nn.sigmoid(0.8 * parameter / BETA)


MASKS = {"alpha": AlphaMask, "hard_concrete": HardConcreteMask}


def sparse_probability(log_alpha: Float[Array, "G"]) -> Float[Array, "G"]:
    """P(w = 0) of hard concrete."""
    return jax.nn.sigmoid(BETA * math.log(-LOW / HIGH) - log_alpha)


@jax.custom_vjp
def within_unit(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """x cut to [0, 1], with a gradient that never leads further out.

    At a bound jnp.clip has none, and a parameter that starts there would stay. DuoAttention cuts
    the parameter itself after every step; this cuts what is read of it.
    """
    return jnp.clip(x, 0, 1)


def _forward(x: Array) -> tuple[Array, Array]:
    return within_unit(x), x


def _backward(x: Array, g: Array) -> tuple[Array]:
    leads_out = ((x >= 1) & (g < 0)) | ((x <= 0) & (g > 0))  # descent steps against g
    return (jnp.where(leads_out, 0, g),)


within_unit.defvjp(_forward, _backward)


def _wide(model: ModelConfig) -> str:
    return str(jnp.promote_types(model.param_dtype, jnp.float32))
