"""Other GPU kernels timed beside ours by the benchmark: dense causal attention, what density buys.

They know no block masks: each is run on the q, k and v of a case as if its mask were causal, and
compared with the reference on that.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import reference
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.block_sparse_attention.cases import Case

NOTE = "computes every causal pair"


class Dense:
    """attend(q, k, v) -> o, and its gradient for do where it has one."""

    def __init__(self, attend: Callable, differentiable: bool):
        def forward_backward(arguments, do):
            o, pullback = jax.vjp(attend, *(arguments[x] for x in "qkv"))
            return o, pullback(do)

        self.forward = jax.jit(lambda arguments: attend(*(arguments[x] for x in "qkv")))
        self.forward_backward = jax.jit(forward_backward) if differentiable else None


def exact(arguments: dict) -> jax.Array:
    """o of causal attention in fp32."""
    q, k, v = (arguments[x].astype(jnp.float32) for x in "qkv")
    options = dict.fromkeys(
        ("block_bias", "q_offset", "segment_ids", "kv_segment_ids", "window", "softcap")
    )
    attend = functools.partial(
        reference.block_sparse_attention, scale=q.shape[-1] ** -0.5, **options
    )
    return jax.jit(lambda q, k, v: attend(q, k, v, BlockMask.causal())[0])(q, k, v)


def _cudnn(case: Case) -> tuple[Any, str | None]:
    if case.K != case.V or case.K > 128:
        return None, f"cuDNN is run for K = V <= 128, not {case.K} and {case.V}"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return Dense(attend, differentiable=True), None


def _attention_mgpu(case: Case) -> tuple[Any, str | None]:
    """The best of the settings tried on an H200; its shared memory is declared fp16."""
    if case.K != case.V or case.T % 128:
        return None, f"takes K = V and whole blocks of 128, not {case.K}, {case.V} and {case.T}"
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(64, 128, max_concurrent_steps=2, causal=True)

    def attend(q, k, v):
        q, k, v = (x.astype(jnp.float16) for x in (q * q.shape[-1] ** -0.5, k, v))
        return attention_mgpu.attention(q, k, v, config)

    return Dense(attend, differentiable=False), None


def _tokamax(case: Case) -> tuple[Any, str | None]:
    """Its Mosaic GPU kernels; K and V may differ."""
    del case
    if importlib.util.find_spec("tokamax") is None:
        return None, "tokamax is not installed"
    tokamax: Any = importlib.import_module("tokamax")
    attend = functools.partial(
        tokamax.dot_product_attention, is_causal=True, implementation="mosaic"
    )
    return Dense(attend, differentiable=True), None


PEERS: dict[str, Callable[[Case], tuple[Any, str | None]]] = {
    "cudnn dense": _cudnn,
    "tokamax dense": _tokamax,
    "attention_mgpu dense": _attention_mgpu,
}
