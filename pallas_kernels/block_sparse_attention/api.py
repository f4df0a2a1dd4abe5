"""Public block-sparse attention: the contract, its checks, and the implementation table."""

import dataclasses
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention import (
    libraries,
    pallas_gpu,
    pallas_tpu,
    reference,
    xla,
)
from pallas_kernels.block_sparse_attention.block_mask import BlockMask, Chunks
from pallas_kernels.dispatch import Candidate, Implementation, Table, resolve


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What decides which implementation runs: shapes, dtypes and options, never values."""

    q: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct
    v: jax.ShapeDtypeStruct
    mask: BlockMask  # of ShapeDtypeStruct
    block_bias: bool
    q_offset: bool
    segment_ids: bool
    window: int | None
    softcap: float | None


def block_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    mask: BlockMask,
    *,
    scale: float | None = None,
    block_bias: Float[Array, "B R N"] | None = None,
    q_offset: int | Int[Array, "*B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """Softmax attention over the keys that `mask` shows to each query, for each head its own.

        a_ij = cap(scale q_i . k_j) + bias_ij          cap(x) = softcap tanh(x / softcap)
        lse_i = log sum_{j in Vis(i)} exp(a_ij)        o_i = sum_{j in Vis(i)} exp(a_ij - lse_i) v_j

    Query i stands at key position p = q_offset + i. Key j is in Vis(i) when j <= p, the mask shows
    j to the query, p - j < window, and both carry the same segment id >= 0. Query head h uses
    key/value head h // (H / G) and row h // (H / R) of the mask's arrays. A query that sees no key
    gets o = 0, lse = -inf and zero gradients.

    Accumulation is in fp32 (float64 for float64 inputs); o has the dtype of v. Gradients reach
    q, k, v and block_bias, from o and from lse, so that attentions over disjoint sets of keys merge
    exactly: o = sum_n exp(lse_n - lse) o_n with lse = logsumexp_n lse_n.

    Args:
      mask: a `BlockMask`; the README of this package has its algebra.
      scale: K ** -0.5 by default.
      block_bias: bias_ij of the pairs that join two chunks of a `from_chunks` mask, by key chunk;
        0 on all other pairs. Its shape is that of `selected`.
      q_offset: scalar or [B], any sign, may be traced; S - T by default.
      segment_ids: packed documents; negative ids are padding, which sees and is seen by nothing.
      kv_segment_ids: the same array by default.
      window: number of latest keys a query may see, its own included.
      implementation: see `IMPLEMENTATIONS`.
    """
    options = Options(
        scale=scale,
        block_bias=block_bias,
        q_offset=q_offset,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        window=window,
        softcap=softcap,
    )
    op = "block_sparse_attention", IMPLEMENTATIONS, implementation
    return _run(*op, q, k, v, mask, options)


class Options(TypedDict, total=False):
    """What `block_sparse_attention` takes by name, and says of it."""

    scale: float | None
    block_bias: Float[Array, "B R N"] | None
    q_offset: int | Int[Array, "*B"] | None
    segment_ids: Int[Array, "B T"] | None
    kv_segment_ids: Int[Array, "B S"] | None
    window: int | None
    softcap: float | None


def block_sparse_attention_output(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    mask: BlockMask,
    *,
    implementation: Implementation = "auto",
    **options: Unpack[Options],
) -> Float[Array, "B T H V"]:
    """o of `block_sparse_attention`, whose arguments these are, where nobody asks for lse.

    Kernels that cannot give lse with a gradient may then run: `auto` takes cuDNN on H100 and H200
    and splash attention on TPUs for the whole causal rows that they take (`libraries.py`).
    """
    op = "block_sparse_attention_output", OUTPUT_IMPLEMENTATIONS, implementation
    return _run(*op, q, k, v, mask, options)


def _run(
    op: str, table: Table, implementation: Implementation, q, k, v, mask, options: Options
) -> Any:
    """Checks, chooses and runs."""
    if unknown := sorted(set(options) - set(Options.__annotations__)):
        raise TypeError(f"{op} has no option {unknown[0]!r}")
    given: dict[str, Any] = {name: options.get(name) for name in Options.__annotations__}
    _check_tensors(q, k, v)
    _check_mask(q, k, mask, given["block_bias"])
    others = {name: x for name, x in given.items() if name != "block_bias"}
    _check_options(q, k, **others)
    problem = Problem(
        q=jax.ShapeDtypeStruct(q.shape, q.dtype),
        k=jax.ShapeDtypeStruct(k.shape, k.dtype),
        v=jax.ShapeDtypeStruct(v.shape, v.dtype),
        mask=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), mask),
        block_bias=given["block_bias"] is not None,
        q_offset=given["q_offset"] is not None,
        segment_ids=given["segment_ids"] is not None,
        window=given["window"],
        softcap=given["softcap"],
    )
    given["scale"] = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    return resolve(op, table, implementation, problem).run(q, k, v, mask, **given)


def _check_tensors(q: Array, k: Array, v: Array) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must be [batch, time, heads, dim], got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {array.dtype}")
        if array.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {array.dtype}")
        if 0 in array.shape:
            raise ValueError(f"{name} is empty: {array.shape}")
    for name, array in (("k", k), ("v", v)):
        if array.shape[0] != q.shape[0]:
            raise ValueError(f"q has batch {q.shape[0]}, {name} has batch {array.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens, v has {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, v has {v.shape[2]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}")


def _check_mask(q: Array, k: Array, mask: BlockMask, block_bias: Array | None) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask, got {type(mask).__name__}")
    (B, T, H, _), (S, G) = q.shape, k.shape[1:3]
    mask.check(B, H, G, T, S)
    if block_bias is None:
        return
    chunks = [leaf for leaf in mask.leaves() if isinstance(leaf, Chunks)]
    if not chunks:
        raise ValueError("block_bias needs a from_chunks mask, there is none in the mask")
    if not jnp.issubdtype(block_bias.dtype, jnp.floating):
        raise TypeError(f"block_bias must be floating, got {block_bias.dtype}")
    for leaf in chunks:
        if leaf.selected.shape != block_bias.shape:
            raise ValueError(
                f"block_bias has shape {block_bias.shape}, selected has {leaf.selected.shape}"
            )
        if leaf.chunk_size != chunks[0].chunk_size:
            raise ValueError(
                f"block_bias needs one chunk size, the mask has {chunks[0].chunk_size} "
                f"and {leaf.chunk_size}"
            )


def _check_options(
    q: Array,
    k: Array,
    scale: float | None,
    q_offset: int | Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    window: int | None,
    softcap: float | None,
) -> None:
    (B, T), S = q.shape[:2], k.shape[1]
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale must be a Python number, got {type(scale).__name__}")
    if window is not None and not isinstance(window, int):
        raise TypeError(f"window must be a Python integer, got {type(window).__name__}")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be >= 1")
    if softcap is not None and not isinstance(softcap, int | float):
        raise TypeError(f"softcap must be a Python number, got {type(softcap).__name__}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be > 0")
    if isinstance(q_offset, float):
        raise TypeError(f"q_offset={q_offset} must be an integer")
    if q_offset is not None and not isinstance(q_offset, int):
        if not jnp.issubdtype(q_offset.dtype, jnp.integer):
            raise TypeError(f"q_offset must be integer, got {q_offset.dtype}")
        if q_offset.shape not in ((), (B,)):
            raise ValueError(f"q_offset must be a scalar or [{B}], got {list(q_offset.shape)}")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids needs segment_ids")
    if segment_ids is not None and kv_segment_ids is None and T != S:
        raise ValueError(f"{T} queries and {S} keys need kv_segment_ids beside segment_ids")
    for name, ids, length in (
        ("segment_ids", segment_ids, T),
        ("kv_segment_ids", kv_segment_ids, S),
    ):
        if ids is None:
            continue
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"{name} must be integer, got {ids.dtype}")
        if ids.shape != (B, length):
            raise ValueError(f"{name} must be [{B}, {length}], got {list(ids.shape)}")


IMPLEMENTATIONS: Table = {
    "reference": Candidate(reference.block_sparse_attention),
    "xla": Candidate(xla.block_sparse_attention),
    "pallas_tpu": Candidate(
        pallas_tpu.block_sparse_attention, pallas_tpu.unsupported, names_kept=True
    ),
    "pallas_gpu": Candidate(
        pallas_gpu.block_sparse_attention,
        pallas_gpu.unsupported,
        pallas_gpu.slower,
        names_kept=True,
    ),
}


def _output_alone(candidate: Candidate) -> Candidate:
    return dataclasses.replace(candidate, run=lambda *x, **options: candidate.run(*x, **options)[0])


OUTPUT_IMPLEMENTATIONS: Table = {
    **{name: _output_alone(candidate) for name, candidate in IMPLEMENTATIONS.items()},
    "cudnn": Candidate(libraries.cudnn, libraries.cudnn_unsupported),
    "splash": Candidate(libraries.splash, libraries.splash_unsupported),
}
