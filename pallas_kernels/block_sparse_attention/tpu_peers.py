"""Other TPU attention for the same problem, compiled beside ours by `tpu_schedule`."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.block_sparse_attention import libraries
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.block_sparse_attention.cases import Case


class Dense:
    """attend(q, k, v) -> o of a causal row, and its gradient for the cotangent of o."""

    def __init__(self, attend: Callable):
        def forward(arguments, arrays):
            del arrays
            return attend(*(arguments[name] for name in "qkv"))

        def forward_backward(arguments, arrays, cotangents):
            o, pullback = jax.vjp(lambda a: forward(a, arrays), arguments)
            return o, pullback(cotangents[0])[0]

        self.forward, self.forward_backward = forward, forward_backward


def _splash(case: Case, dtype: str) -> tuple[Any, str | None]:
    if case.mask != "causal":
        return None, "splash attention takes no mask that is chosen inside jit, per head"
    if case.K != case.V or case.K % 128:
        return None, f"splash attention takes K = V in multiples of 128, not {case.K} and {case.V}"
    options: dict = dict.fromkeys(("segment_ids", "kv_segment_ids"))

    def attend(q, k, v):
        return libraries.splash(q, k, v, BlockMask.causal(), scale=case.K**-0.5, **options)

    return Dense(attend), None


def _tokamax(case: Case, dtype: str) -> tuple[Any, str | None]:
    del dtype
    if case.mask != "causal":
        return None, "tokamax's kernel is compared on causal rows only"
    tokamax: Any = importlib.import_module("tokamax")
    options = {"is_causal": True, "implementation": "mosaic"}
    return Dense(lambda q, k, v: tokamax.dot_product_attention(q, k, v, **options)), None


def installed() -> dict[str, Callable[[Case, str], tuple[Any, str | None]]]:
    """Name -> (case, dtype) -> (its passes, why it cannot run)."""
    there = importlib.util.find_spec("tokamax") is not None
    return {"jax-splash": _splash} | ({"tokamax": _tokamax} if there else {})
