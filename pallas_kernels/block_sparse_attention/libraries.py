"""Other libraries' kernels for whole causal rows: cuDNN's on GPUs, JAX's splash attention on TPUs.

They know no mask that is made while the program runs, and no gradient through lse, so they stand in
the table of `block_sparse_attention_output` only. `declines` holds what both cannot take.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import BlockMask, Causal
from pallas_kernels.dispatch import Target

_GPUS = ("H100", "H200")
_TPUS = ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x")
_SPLASH_BLOCKS = (1024, 512, 256, 128)  # the first that divides a row is taken


def declines(problem: Any) -> str | None:
    """Why a problem is not a whole causal row in bf16, or None."""
    (T, K), (S, V) = problem.q.shape[1::2], problem.v.shape[1::2]
    if not isinstance(problem.mask, Causal):
        return f"takes causal masks only, not {type(problem.mask).__name__}"
    for name in ("q_offset", "window", "softcap"):
        if getattr(problem, name) not in (None, False):
            return f"takes no {name} here"
    if T != S:
        return f"takes whole rows, not {T} queries of {S} keys"
    if K != V:
        return f"takes K = V, not {K} and {V}"
    if problem.q.dtype != jnp.bfloat16:
        return f"takes bfloat16, not {problem.q.dtype}"
    return None


def cudnn_unsupported(problem: Any, target: Target) -> str | None:
    """Why cuDNN cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _GPUS):
        return f"is run on {' and '.join(_GPUS)}, not {target.device_kind!r}"
    if problem.segment_ids:
        return "would need a dense bias for segment ids"
    K = problem.q.shape[3]
    if K > 128 or K % 8:
        return f"is run for K in multiples of 8 up to 128, not {K}"
    return declines(problem)


def cudnn(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: BlockMask,
    *,
    scale: float,
    **nothing: Any,
) -> Float[Array, "B T H K"]:
    """Causal attention by cuDNN, forward and backward.

    Its backward pass adds to dq in no fixed order, but for --xla_gpu_deterministic_ops.
    """
    del mask, nothing
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, implementation="cudnn"
    )


def splash_unsupported(problem: Any, target: Target) -> str | None:
    """Why splash attention cannot take `problem` on `target`, or None."""
    if target.platform != "tpu" or target.device_kind not in _TPUS:
        return f"is compiled for {_TPUS}, not {target.device_kind!r}"
    T, K = problem.q.shape[1::2]
    if K % 128:
        return f"takes K in multiples of 128, not {K}"
    if T % _SPLASH_BLOCKS[-1]:
        return f"takes rows of whole blocks of {_SPLASH_BLOCKS[-1]}, not {T} tokens"
    return declines(problem)


def splash(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: BlockMask,
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    interpret: bool = False,
    **nothing: Any,
) -> Float[Array, "B T H K"]:
    """Causal attention by splash attention, whose backward pass has a kernel for dq, so that no
    sums of dq lie in HBM."""
    del mask, nothing
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    (B, T, H, K), G = q.shape, k.shape[2]
    size = next(size for size in _SPLASH_BLOCKS if T % size == 0)
    sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    causal = splash_attention_mask.CausalMask((T, T))
    attend: Any = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([causal] * (H // G)),
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(sizes, size)),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = None
    if segment_ids is not None:
        of_keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        ids = splash_attention_kernel.SegmentIds(segment_ids, of_keys)
    grouped = (scale * q).reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    by_group = jax.vmap(attend, in_axes=(0, 0, 0, None))
    o = jax.vmap(by_group)(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), ids)
    o = o.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    if segment_ids is None:
        return o
    # padding would see padding
    return jnp.where((segment_ids >= 0)[..., None, None], o, 0)
