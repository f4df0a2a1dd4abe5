"""HGRN: channels that forget by a gate and take in the rest."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import ModelConfig
from jhybrid.layers import Linear, RMSNorm, rms_normalise, upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import RecurrentState, empty_state, recur
from jhybrid.recurrent_config import HGRNConfig
from pallas_kernels.array_types import Array, Float, Int


class HGRN(nnx.Module):
    """h_t = f_t h_{t-1} + (1 - f_t) silu(W_i x_t), f the forget gate below.

    arXiv 2311.04823. The read is RMS-normalised over all channels and gated by silu(W_g x).
    """

    def __init__(self, config: HGRNConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        self.config = config
        self.model = model
        self.i_proj = linear(model.dim, config.width, axes=("embed", "heads"))
        self.f_proj = linear(model.dim, config.width, axes=("embed", "heads"), wide=True)
        self.g_proj = linear(model.dim, config.width, axes=("embed", "heads"))
        self.o_norm = RMSNorm(config.width, eps=model.norm_eps, param_dtype=model.param_dtype)
        self.o_proj = linear(config.width, model.dim, axes=("heads", "embed"))

    def initial_state(self, batch: int, max_length: int) -> RecurrentState:
        return empty_state(batch, (self.config.width,), self.model)

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        g = log_forget_gate(self.f_proj(x), context.lower_bound)
        taken_in = jax.nn.silu(upcast(self.i_proj(x))) * -jnp.expm1(g)
        h, state = recur(gated_sum, {"v": taken_in, "g": g}, state, context)
        gate = jax.nn.silu(upcast(self.g_proj(x)))
        y = rms_normalise(h, self.o_norm.weight[...], self.o_norm.eps) * gate
        return self.o_proj(y), state, {}


def log_forget_gate(
    f: Float[Array, "B T F"], lower_bound: Float[Array, "F"] | None
) -> Float[Array, "B T F"]:
    """log(lb + (1 - lb) sigmoid(f)), in fp32; a bound of 0 (the first block's) is none."""
    g = jax.nn.log_sigmoid(f)
    if lower_bound is None:
        return g
    # log 0 has no gradient; at the smallest number the result is the same.
    bound = jnp.maximum(lower_bound.astype(g.dtype), jnp.finfo(jnp.float32).tiny)
    return jnp.logaddexp(jnp.log(bound), jnp.log1p(-bound) + g)


def gated_sum(
    v: Float[Array, "B T F"],
    g: Float[Array, "B T F"],
    *,
    initial_state: Float[Array, "B F"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T F"], Float[Array, "B F"]]:
    """h_t = exp(g_t) h_{t-1} + v_t, from zero where the segment changes; all h and the last."""
    factor = jnp.exp(g)
    if segment_ids is not None:
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        factor = jnp.where(jnp.pad(changes, ((0, 0), (1, 0)))[..., None], 0, factor)
    if initial_state is not None:
        v = v.at[:, 0].add(factor[:, 0] * initial_state)

    def then(earlier, later):
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    _, h = jax.lax.associative_scan(then, (factor, v), axis=1)
    return h, h[:, -1]
