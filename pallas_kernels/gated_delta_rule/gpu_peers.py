"""Other packages' GPU kernels for the same rule, timed beside ours by the benchmark.

Those of PyTorch run in the same process, on the same arrays, which they share through DLPack. None
gets the initial state or returns the final one: plain rows are what all can do.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import reference
from pallas_kernels.gated_delta_rule.cases import Case

NOTE = "without initial and final state"
_NAMES = ("q", "k", "v", "g", "beta")


def exact(arguments: dict) -> jax.Array:
    """o of a row that starts from a state of zeros, in fp32."""
    q, k, v, g, beta = (arguments[x].astype(jnp.float32) for x in _NAMES)
    state = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), jnp.float32)
    rule = functools.partial(
        reference.gated_delta_rule,
        write_mask=None,
        segment_ids=None,
        scale=k.shape[-1] ** -0.5,
        chunk_size=64,
    )
    return jax.jit(lambda *arrays: rule(*arrays, initial_state=state)[0])(q, k, v, g, beta)


class Jax:
    """attend(q, k, v, g, beta) -> o, compiled by JAX, and its gradients for do; or of `names`."""

    def __init__(self, attend: Callable, names: Sequence[str] = _NAMES):
        def forward_backward(arguments, do):
            o, pullback = jax.vjp(attend, *(arguments[x] for x in names))
            return o, pullback(do)

        self.forward = jax.jit(lambda arguments: attend(*(arguments[x] for x in names)))
        self.forward_backward = jax.jit(forward_backward)


class _Pending:
    """A tensor that PyTorch is still computing, with what the benchmark asks of an array."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def block_until_ready(self) -> "_Pending":
        importlib.import_module("torch").cuda.synchronize()
        return self

    def astype(self, dtype: Any) -> jax.Array:
        self.block_until_ready()
        return jnp.from_dlpack(self.tensor.detach()).astype(dtype)


class Torch:
    """The same on PyTorch's tensors."""

    def __init__(self, attend: Callable, names: Sequence[str] = _NAMES):
        self._attend, self._names = attend, names
        self._given: Any = None

    def _tensors(self, arguments: dict) -> list:
        """Copies, once per set of arguments: JAX may free or move what it owns."""
        if self._given is None or self._given[0] is not arguments:
            torch = importlib.import_module("torch")
            jax.block_until_ready(arguments)
            copies = (torch.from_dlpack(arguments[x]).clone() for x in self._names)
            tensors = [copy.requires_grad_() for copy in copies]
            self._given = arguments, tensors
        return self._given[1]

    def forward(self, arguments: dict) -> _Pending:
        tensors = self._tensors(arguments)
        with importlib.import_module("torch").no_grad():
            return _Pending(self._attend(*tensors))

    def forward_backward(self, arguments: dict, do: jax.Array) -> _Pending:
        torch = importlib.import_module("torch")
        tensors = self._tensors(arguments)
        o = self._attend(*tensors)
        return _Pending(torch.autograd.grad(o, tensors, torch.from_dlpack(do))[0])


def _peer(package: str, takes: Callable[[Case], str | None], build: Callable[[Any], Any]):
    """case -> (its kernels, why not)"""

    def bind(case: Case) -> tuple[Any, str | None]:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return None, f"{package.partition('.')[0]} is not installed"
        if case.write_mask or case.documents:
            return None, "compared on plain rows only"
        reason = takes(case)
        return (None, reason) if reason else (build(importlib.import_module(package)), None)

    return bind


def _jla(ops: Any) -> Jax:
    rule = functools.partial(ops.linear_attention, "gated_deltanet", impl="mosaic_gpu")
    return Jax(lambda q, k, v, g, beta: rule(q, k, v, g=g, beta=beta)[0])


def _torch(ops: Any) -> Torch:
    return Torch(lambda *tensors: ops.chunk_gated_delta_rule(*tensors)[0])


def _maxtext(models: Any) -> Jax:
    def rule(q, k, v, g, beta):
        group = v.shape[2] // q.shape[2]
        q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
        chunked = models.jax_chunk_gated_delta_rule
        return chunked(q, k, v, g, beta, chunk_size=64, compute_dtype=v.dtype)[0]

    return Jax(rule)


def _only_128(case: Case) -> str | None:
    square = case.K == case.V == 128
    return None if square else f"takes K = V = 128, not {case.K} and {case.V}"


def _up_to_256(case: Case) -> str | None:
    return None if case.K <= 256 else f"takes K up to 256, not {case.K}"


def _powers_of_two(case: Case) -> str | None:
    narrow = case.K in (64, 128) and case.V in (64, 128, 256)
    return None if narrow else f"runs K 64 or 128 and V up to 256, not {case.K} and {case.V}"


PEERS: dict[str, Callable[[Case], tuple[Any, str | None]]] = {
    "jax-linear-attention": _peer("jla.ops", _powers_of_two, _jla),
    "fla": _peer("fla.ops.gated_delta_rule", _up_to_256, _torch),
    "FlashQLA": _peer("flash_qla", _only_128, _torch),
    "MaxText": _peer("maxtext.models.qwen3", lambda case: None, _maxtext),
}
