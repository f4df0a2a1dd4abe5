"""RetNet: every head forgets at a fixed rate of its own."""

from functools import partial

import jax.numpy as jnp

from jhybrid.layers import rotate
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.recurrent import GatedHeads, RecurrentState, recur
from pallas_kernels import simple_linear_attention
from pallas_kernels.array_types import Array, Float


class RetNet(GatedHeads):
    """S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T in head h, read as S_t^T q_t / sqrt(K).

    arXiv 2307.08621. q and k are rotated. Each head's read is RMS-normalised and gated by
    silu(W_g x).
    """

    def __call__(
        self, x: Float[Array, "B T D"], state: RecurrentState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None, Report]:
        H = self.config.num_heads
        q, k, v = self.project(x)
        q, k = (rotate(a, context.positions, self.config.rope_theta) for a in (q, k))
        g = jnp.log1p(-(2.0 ** (-5 - jnp.arange(H, dtype=jnp.promote_types(x.dtype, "float32")))))
        arguments = {"q": q, "k": k, "v": v, "g": jnp.broadcast_to(g, (*x.shape[:2], H))}
        op = partial(simple_linear_attention, implementation=self.model.implementation)
        o, state = recur(op, arguments, state, context)
        return self.leave(o, x), state, {}
