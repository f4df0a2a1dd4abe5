"""Block-sparse attention on Hopper GPUs (Pallas Mosaic GPU): which problems it takes; its passes.

One launch serves all heads, whatever mask each has: `schedule.py` turns the mask into the tiles
that meet, `pallas_gpu_plan.py` deals them out, longest first, and three kernels walk them:
`pallas_gpu_forward.py`, `pallas_gpu_dq.py`, `pallas_gpu_dkv.py`. k and v stay where they are and
only visited tiles are copied in. No atomics: results do not vary between runs. See HOPPER.md.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention import pallas_gpu_plan as planning
from pallas_kernels.block_sparse_attention.block_mask import BlockMask, Chunks, Streaming
from pallas_kernels.block_sparse_attention.pallas_gpu_plan import Plan, Plans
from pallas_kernels.block_sparse_attention.reference import Scene, scene
from pallas_kernels.block_sparse_attention.schedule import (
    Facts,
    facts,
    near_rules,
    visits_by_key,
    visits_by_query,
)
from pallas_kernels.blocks import cdiv, pad_to_multiple
from pallas_kernels.dispatch import KEPT, Target

if TYPE_CHECKING:
    from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import Mask, Setup

JAX_VERSION = "0.11.2"  # Mosaic GPU changes between versions
_CHIPS = ("H100", "H200")
_WIDTHS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256))  # (K, V)
_ROW_ALIGNMENT = 8  # tokens: the copy engine moves whole swizzle tiles of 8 rows
_LARGEST_TILE = 128
_FEWEST_QUERIES = 16  # of a row; below, most of a tile idles


def unsupported(problem: Any, target: Target) -> str | None:
    """Why these kernels cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _CHIPS):
        return f"needs an NVIDIA {' or '.join(_CHIPS)}, not {target.device_kind!r}"
    if jax.__version__ != JAX_VERSION:
        return f"its kernels are written for JAX {JAX_VERSION}, not {jax.__version__}"
    if problem.q.dtype != jnp.bfloat16:
        return f"q, k and v must be bfloat16 (the matrix units round fp32), not {problem.q.dtype}"
    widths = problem.q.shape[3], problem.v.shape[3]
    if widths not in _WIDTHS:
        return f"(K, V) must be one of {_WIDTHS}, not {widths}"
    tiles = planning.largest_tiling(problem.mask)
    if min(tiles) < planning.ROWS:
        sizes = sorted(problem.mask.block_sizes())
        return f"blocks of {sizes} are cut into tiles of {min(tiles)}, below {planning.ROWS}"
    return None


def slower(problem: Any) -> str | None:
    """Why `auto` should take another implementation although these kernels could run, or None."""
    T = problem.q.shape[1]
    if T < _FEWEST_QUERIES:
        return f"one tile of {planning.ROWS} queries walks all keys alone, on rows of {T}"
    return None


def block_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    mask: BlockMask,
    *,
    scale: float,
    block_bias: Float[Array, "B R N"] | None,
    q_offset: int | Int[Array, "*B"] | None,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    window: int | None,
    softcap: float | None,
    plans: Plans | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """See `pallas_kernels.block_sparse_attention`; `plans` are the defaults unless given."""
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import Setup

    (T, K), (S, V) = q.shape[1::2], v.shape[1::2]
    if scale <= 0:  # the kernels compare logits before they scale them
        q, scale = (-q, -scale) if scale < 0 else (0 * q, 1.0)
    everything = scene(mask, T, S, q_offset, segment_ids, kv_segment_ids)
    setup = Setup(scale, window, softcap, near_rules(mask), T, S, interpret)
    plans = plans or planning.plans(mask, K, V, segment_ids is not None)
    return _attend(setup, plans, q, k, v, block_bias, everything)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(setup: "Setup", plans: Plans, q, k, v, block_bias, scene: Scene):
    return _outputs(setup, plans, q, k, v, block_bias, scene)


def _forward(setup: "Setup", plans: Plans, *arrays):
    o, lse = checkpoint_name(_outputs(setup, plans, *arrays), KEPT)
    return (o, lse), (*arrays, o, lse)


def _backward(setup: "Setup", plans: Plans, residuals, cotangents):
    return *_gradients(setup, plans, *residuals, *cotangents), None


_attend.defvjp(_forward, _backward)


# Jitted so that the layers of a model, where their calls are alike, lower each kernel only once.
@partial(jax.jit, static_argnums=(0, 1))
def _outputs(setup: "Setup", plans: Plans, q, k, v, block_bias, scene: Scene):
    from pallas_kernels.block_sparse_attention.pallas_gpu_forward import forward

    mask = by_query(setup, plans.forward, q, k, v, block_bias, scene)
    o, lse = forward(setup, plans.forward, mask, *map(_aligned, (q, k, v)))
    return o[:, : setup.T], lse[..., : setup.T]


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(setup: "Setup", plans: Plans, q, k, v, block_bias, scene: Scene, o, lse, do, dlse):
    """The formulas are in README.md."""
    from pallas_kernels.block_sparse_attention.pallas_gpu_dkv import key_gradients
    from pallas_kernels.block_sparse_attention.pallas_gpu_dq import query_gradient

    do, stats = _rows(do, dlse, o, lse)
    aligned = map(_aligned, (q, do))
    arrays = (*aligned, stats, *map(_aligned, (k, v)))
    mask = by_query(setup, plans.dq, q, k, v, block_bias, scene)
    dq = query_gradient(setup, plans.dq, mask, *arrays)
    mask = by_key(setup, plans.dkv, q, k, v, block_bias, scene)
    dk, dv, by_token = key_gradients(setup, plans.dkv, mask, *arrays)
    dbias = None
    if block_bias is not None:
        (B, R, chunks), H = block_bias.shape, q.shape[2]
        by_row = by_token.reshape(B, R, H // R, -1).sum(2)[..., : setup.S]
        size = _chunk_size(scene.mask)
        by_row = pad_to_multiple(by_row, size, axis=2)
        dbias = by_row.reshape(B, R, chunks, size).sum(3).astype(block_bias.dtype)
    return dq[:, : setup.T], dk[:, : setup.S], dv[:, : setup.S], dbias


def _aligned(x: Float[Array, "B T H d"]) -> Float[Array, "B T8 H d"]:
    return pad_to_multiple(x, _ROW_ALIGNMENT, axis=1)


def _rows(do, dlse, o, lse) -> tuple[Array, Float[Array, "B H 2 Tq"]]:
    """do, and what `query_gradient` calls stats.

    Queries that see nothing pass no gradient on, whatever arrives.
    """
    some = lse > -jnp.inf  # [B, H, T]
    do = jnp.where(some.swapaxes(1, 2)[..., None], do, 0)
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    delta = lax.optimization_barrier(delta).swapaxes(1, 2)  # or XLA sums it once for each use
    exponent = jnp.where(some, lse * (1 / math.log(2)), jnp.inf)
    shift = jnp.where(some, dlse - delta, 0)
    rest = ((0, 0), (0, 0), (0, -lse.shape[2] % _LARGEST_TILE))
    exponent = jnp.pad(exponent, rest, constant_values=jnp.inf)
    return do, jnp.stack([exponent, jnp.pad(shift, rest)], axis=2)


def by_query(setup: "Setup", plan: Plan, q, k, v, block_bias, scene: Scene) -> "Mask":
    """What the kernels over query tiles know of the mask."""
    found = _facts(setup, plan, q, scene)
    visits = visits_by_query(found, plan.tiling)
    size = min(plan.step, plan.tiling.key)
    head_bytes = 2 * k.shape[1] * (k.shape[3] + v.shape[3])
    items = planning.items_by_query(plan, visits, found, scene.offset, head_bytes, k.shape[2])
    rest = _common(setup, plan, block_bias, scene, found, planning.ROWS, size, q.shape[0])
    return rest._replace(items=items, listed=visits.listed)


def by_key(setup: "Setup", plan: Plan, q, k, v, block_bias, scene: Scene) -> "Mask":
    """What the kernel over key tiles knows of the mask."""
    found = _facts(setup, plan, q, scene)
    visits = visits_by_key(found, plan.tiling)
    G = k.shape[2]
    head_bytes = 2 * q.shape[1] * (k.shape[3] + v.shape[3]) * q.shape[2] // G
    items = planning.items_by_key(plan, visits, scene.offset, head_bytes, G)
    rest = _common(setup, plan, block_bias, scene, found, plan.step, planning.ROWS, q.shape[0])
    return rest._replace(items=items, listed=visits.listed, rows=visits.rows, leaf=found.leaf)


def _facts(setup: "Setup", plan: Plan, q, scene: Scene) -> Facts:
    B, T, H, _ = q.shape
    return facts(scene, B, H, T, setup.S, setup.window, plan.tiling)


def _common(
    setup: "Setup",
    plan: Plan,
    block_bias,
    scene: Scene,
    found: Facts,
    queries: int,
    keys: int,
    B: int,
) -> "Mask":
    """The fields of `Mask` that all kernels share, with `runs` of so many queries and keys."""
    from pallas_kernels.block_sparse_attention.pallas_gpu_tiles import Mask

    none = dict.fromkeys(Mask._fields)
    if any(isinstance(leaf, Chunks | Streaming) for leaf in scene.mask.leaves()):
        none["far"] = found.far
    if block_bias is not None:
        unit = 1 / (setup.unit * math.log(2))
        bias = jnp.repeat(
            block_bias.astype(jnp.float32) * unit,
            _chunk_size(scene.mask) // plan.tiling.key,
            axis=-1,
        )
        none["bias"] = bias[..., : cdiv(setup.S, plan.tiling.key)]
    if scene.documents is not None:
        ids = scene.documents  # padding of queries and of keys must never be equal
        queries_, keys_ = (pad_to_multiple(x + 1, _LARGEST_TILE, axis=1) - 1 for x in ids)
        none["query_ids"] = jnp.where(queries_ < 0, -2, queries_).astype(jnp.int32)
        none["key_ids"] = jnp.where(keys_ < 0, -1, keys_).astype(jnp.int32)
        none["query_runs"] = planning.runs(none["query_ids"], queries, -1)
        none["key_runs"] = planning.runs(none["key_ids"], keys, -2)
    return Mask(**none)


def _chunk_size(mask: BlockMask) -> int:
    return next(leaf.chunk_size for leaf in mask.leaves() if isinstance(leaf, Chunks))
