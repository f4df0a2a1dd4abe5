"""Other packages' TPU kernels for the same problem, compiled beside ours by `tpu_schedule`."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.gated_delta_rule.cases import Case


class DeltanetTpu:
    """`chunk_gdn` of deltanet-tpu (maelie-labs): no initial state, no final state."""

    def __init__(self):
        import deltanet_tpu  # pyright: ignore[reportMissingImports]

        def forward(arguments, integers):
            del integers
            return deltanet_tpu.chunk_gdn(*(arguments[x] for x in ("q", "k", "v", "g", "beta")))

        def forward_backward(arguments, integers, cotangents):
            o, pullback = jax.vjp(lambda a: forward(a, integers), arguments)
            return o, pullback(cotangents[0])[0]

        self.forward, self.forward_backward = forward, forward_backward


def _deltanet_tpu(case: Case, dtype: str) -> tuple[Any, str | None]:
    if (case.K, case.V) != (128, 128):
        return None, f"deltanet-tpu takes K = V = 128, not {case.K} and {case.V}"
    if case.write_mask or case.documents or dtype != "bfloat16":
        return None, "compared on plain bfloat16 rows only"
    return DeltanetTpu(), None


def installed() -> dict[str, Callable[[Case, str], tuple[Any, str | None]]]:
    """Name -> (case, dtype) -> (its passes, why it cannot run), of the packages installed."""
    return {"deltanet-tpu": _deltanet_tpu} if importlib.util.find_spec("deltanet_tpu") else {}
