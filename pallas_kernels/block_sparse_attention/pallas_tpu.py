"""Block-sparse attention on TPU (Pallas Mosaic): which problems it takes, and its passes.

One launch serves all heads, whatever mask each has: `schedule.py` turns the mask into the tiles
that meet, `pallas_tpu_forward` and `pallas_tpu_backward` walk them. k and v stay where they are and
only visited tiles are copied in. Compiled ahead of time and interpreted; it has not run on a TPU.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import BlockMask, Chunks
from pallas_kernels.block_sparse_attention.pallas_tpu_backward import (
    ByKey,
    Rows,
    key_gradients,
    query_gradient,
)
from pallas_kernels.block_sparse_attention.pallas_tpu_forward import ByQuery, forward
from pallas_kernels.block_sparse_attention.pallas_tpu_tiles import Setup
from pallas_kernels.block_sparse_attention.reference import Scene, scene
from pallas_kernels.block_sparse_attention.schedule import (
    Facts,
    facts,
    near_rules,
    tiling,
    visits_by_key,
    visits_by_query,
)
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks
from pallas_kernels.dispatch import KEPT, Target

_WIDTHS = (64, 128, 256)
_SMALLEST_TILE = 16  # rows of a packed bf16 register


def unsupported(problem: Any, target: Target) -> str | None:
    """Why these kernels cannot take `problem` on `target`, or None."""
    if target.platform != "tpu":
        return f"needs a TPU, not {target.device_kind!r}"
    if problem.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q, k and v must be bfloat16 or float32, not {problem.q.dtype}"
    for name, width in (("K", problem.q.shape[3]), ("V", problem.v.shape[3])):
        if width not in _WIDTHS:
            return f"{name} must be one of {_WIDTHS}, not {width}"
    tiles = tiling(problem.mask, problem.q.shape[1])
    if min(tiles) < _SMALLEST_TILE:
        sizes = sorted(problem.mask.block_sizes())
        return f"blocks of {sizes} are cut into tiles of {min(tiles)}, below {_SMALLEST_TILE}"
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
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """See `pallas_kernels.block_sparse_attention`."""
    T, S = q.shape[1], k.shape[1]
    setup = Setup(scale, window, softcap, tiling(mask, T), near_rules(mask), T, S)
    everything = scene(mask, T, S, q_offset, segment_ids, kv_segment_ids)
    return _attend(setup, q, k, v, block_bias, everything)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setup: Setup, q, k, v, block_bias, scene: Scene):
    return _forward(setup, q, k, v, block_bias, scene)[0]


def _forward(setup: Setup, q, k, v, block_bias, scene: Scene):
    found = _facts(setup, q, scene)
    o, lse = forward(setup, _by_query(setup, block_bias, scene, found), *_tiled(setup, q, k, v))
    o, lse = o[:, :, : setup.T].swapaxes(1, 2), lse.reshape(*lse.shape[:2], -1)[..., : setup.T]
    o, lse = checkpoint_name((o, lse), KEPT)
    return (o, lse), (q, k, v, block_bias, scene, o, lse)


def _backward(setup: Setup, residuals, cotangents):
    """The formulas are in README.md."""
    q, k, v, block_bias, scene, o, lse = residuals
    do, dlse = cotangents
    found = _facts(setup, q, scene)
    tiled = _tiled(setup, q, k, v)
    rows = _rows(setup, tiled[0], do, dlse, o, lse)
    dq = query_gradient(setup, _by_query(setup, block_bias, scene, found), rows, *tiled[1:])
    by_key = _by_key(setup, block_bias, scene, found)
    dk, dv, by_tile = key_gradients(setup, by_key, rows, *tiled[1:])
    dq, dk, dv = (
        x[:, :, :length].swapaxes(1, 2)
        for x, length in ((dq, setup.T), (dk, setup.S), (dv, setup.S))
    )
    dbias = None
    if block_bias is not None:
        (B, R, chunks), H = block_bias.shape, q.shape[2]
        by_row = by_tile.reshape(B, R, H // R, -1).sum(2)
        by_row = pad_to_multiple(by_row, _tiles_per_chunk(setup, scene.mask), axis=2)
        dbias = by_row.reshape(B, R, chunks, -1).sum(3).astype(block_bias.dtype)
    return dq, dk, dv, dbias, None


def _rows(setup: Setup, q, do, dlse, o, lse) -> Rows:
    """Queries that see nothing pass no gradient on, whatever arrives."""
    some = lse > -jnp.inf
    do, o = do.swapaxes(1, 2), o.swapaxes(1, 2)
    do = jnp.where(some[..., None], do, 0)
    delta = (do.astype(lse.dtype) * o.astype(lse.dtype)).sum(-1)
    lse = jnp.where(some, lse, jnp.inf)
    rest = -setup.T % setup.tiling.query
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, rest)), constant_values=jnp.inf)
    shift = pad_to_multiple(jnp.where(some, dlse - delta, 0), setup.tiling.query, axis=2)
    stats = jnp.stack([split_chunks(x, setup.tiling.query, axis=2) for x in (lse, shift)], axis=3)
    return Rows(q, pad_to_multiple(do, setup.tiling.query, axis=2), stats)


_attend.defvjp(_forward, _backward)


def _tiled(setup: Setup, q, k, v):
    """[B, T, H, d] -> [B, H, whole tiles, d]."""
    sizes = setup.tiling.query, setup.tiling.key, setup.tiling.key
    arrays = zip((q, k, v), sizes, strict=True)
    return [pad_to_multiple(x.swapaxes(1, 2), size, axis=2) for x, size in arrays]


def _facts(setup: Setup, q: Array, scene: Scene) -> Facts:
    B, T, H, _ = q.shape
    return facts(scene, B, H, T, setup.S, setup.window, setup.tiling)


def _by_query(setup: Setup, block_bias, scene: Scene, found: Facts) -> ByQuery:
    visits, B = visits_by_query(found, setup.tiling), found.leaf.shape[0]
    rows = jnp.concatenate([visits.rows, found.leaf[..., None]], axis=-1)
    query_ids, key_ids = _ids(setup, scene)
    return ByQuery(
        offset=jnp.broadcast_to(scene.offset, (B,))[:, None, None],
        rows=rows[:, :, :, None],
        listed=visits.listed[:, :, :, None],
        far=found.far,
        bias=_bias(setup, block_bias, scene.mask),
        query_ids=query_ids,
        key_ids=key_ids,
    )


def _by_key(setup: Setup, block_bias, scene: Scene, found: Facts) -> ByKey:
    visits, B = visits_by_key(found, setup.tiling), found.leaf.shape[0]
    query_ids, key_ids = _ids(setup, scene)
    return ByKey(
        offset=jnp.broadcast_to(scene.offset, (B,))[:, None, None],
        rows=visits.rows[:, :, :, None],
        listed=visits.listed[:, :, :, None],
        leaf=found.leaf[:, :, None],
        far=found.far,
        bias=_bias(setup, block_bias, scene.mask),
        query_ids=query_ids,
        key_ids=key_ids,
    )


def _ids(setup: Setup, scene: Scene):
    """Segment ids of queries and keys, [B, tiles, 1, tile]; -1 in padding."""
    if scene.documents is None:
        return None, None
    return (
        split_chunks(pad_to_multiple(ids + 1, size, axis=1) - 1, size)[:, :, None]
        for ids, size in zip(scene.documents, setup.tiling, strict=True)
    )


def _bias(setup: Setup, block_bias, mask: BlockMask):
    """The bias of each key tile, [B, R, 1, N]."""
    if block_bias is None:
        return None
    by_tile = jnp.repeat(block_bias.astype(jnp.float32), _tiles_per_chunk(setup, mask), axis=-1)
    return by_tile[:, :, None, : cdiv(setup.S, setup.tiling.key)]


def _tiles_per_chunk(setup: Setup, mask: BlockMask) -> int:
    size = next(leaf.chunk_size for leaf in mask.leaves() if isinstance(leaf, Chunks))
    return size // setup.tiling.key
