"""JAX's own TPU attention for the same problem, compiled beside ours by `tpu_schedule`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from pallas_kernels.block_sparse_attention.cases import Case


class Splash:
    """JAX's splash attention, whose masks are known before tracing; no lse gradient."""

    def __init__(self, case: Case):
        mask = splash_attention_mask.CausalMask((case.T, case.S))
        blocks = splash_attention_kernel.BlockSizes(
            block_q=512, block_kv=512, block_q_dkv=512, block_kv_dkv=512, use_fused_bwd_kernel=True
        )
        kernel: Any = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * case.H),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
        )

        def forward(arguments, arrays):
            del arrays
            q, k, v = (arguments[name].swapaxes(1, 2) for name in "qkv")
            o: Any = jax.vmap(kernel)(case.K**-0.5 * q, k, v)
            return o.swapaxes(1, 2)

        def forward_backward(arguments, arrays, cotangents):
            o, pullback = jax.vjp(lambda a: forward(a, arrays), arguments)
            return o, pullback(cotangents[0])[0]

        self.forward, self.forward_backward = forward, forward_backward


def _splash(case: Case, dtype: str) -> tuple[Any, str | None]:
    if case.mask != "causal":
        return None, "splash attention takes no mask that is chosen inside jit, per head"
    if case.K != case.V or case.K % 128:
        return None, f"splash attention takes K = V in multiples of 128, not {case.K} and {case.V}"
    return Splash(case), None


def installed() -> dict[str, Callable[[Case, str], tuple[Any, str | None]]]:
    """Name -> (case, dtype) -> (its passes, why it cannot run)."""
    return {"jax-splash": _splash}
