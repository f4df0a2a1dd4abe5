"""Lightning attention: fixed decays that get weaker with the head and with depth."""

from functools import partial

import jax
import jax.numpy as jnp

from jhybrid.layers import upcast
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import GatedHeads, RecurrentState, recur
from pallas_kernels import simple_linear_attention
from pallas_kernels.array_types import Array, Float


class Lightning(GatedHeads):
    """S_t = e^(-8 h / H (1 - depth)) S_{t-1} + k_t v_t^T in head h, read as S_t^T q_t / sqrt(K).

    arXiv 2401.04658; depth is the share of the model's blocks below this one. q, k and v go through
    silu; each head's read is RMS-normalised and gated by sigmoid(W_g x), as in MiniMax-01 (arXiv
    2501.08313).
    """

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        H = self.config.num_heads
        q, k, v = (jax.nn.silu(upcast(a)).astype(x.dtype) for a in self.project(x))
        depth = 0.0 if context.depth is None else context.depth
        decays = log_decays(H, jnp.asarray(depth, jnp.promote_types(x.dtype, "float32")))
        g = jnp.broadcast_to(decays, (*x.shape[:2], H))
        op = partial(simple_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, {"q": q, "k": k, "v": v, "g": g}, state, context)
        return self.leave(o, x, jax.nn.sigmoid), state, {}


def log_decays(heads: int, depth: Float[Array, ""]) -> Float[Array, "H"]:
    """-8 h / H (1 - depth) of head h, in the dtype of `depth`."""
    return -8 / heads * (1 - depth) * jnp.arange(heads, dtype=depth.dtype)
