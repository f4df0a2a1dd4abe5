"""Block-sparse attention from its contract, one pair at a time, in float64 NumPy.

It shares no code with the package: whether a pair is visible is decided by Python `if`s.
"""

import jax
import numpy as np

from pallas_kernels.block_sparse_attention import block_mask


def shows(mask, b: int, head: tuple[int, int, int], i: int, p: int, j: int, start: int) -> bool:
    """Whether the mask shows key j to query i at position p; head = (h, H, G)."""
    h, H, G = head
    match mask:
        case block_mask.Causal():
            return True
        case block_mask.Streaming(sink_blocks, local_blocks, size):
            sink = j // size < start // size + sink_blocks
            return sink or j // size > p // size - local_blocks
        case block_mask.Blocks(keep, size):
            return bool(keep[b, h * keep.shape[1] // H, i // size, j // size])
        case block_mask.Chunks(selected, size):
            own = j // size == p // size
            return own or bool(selected[b, h * selected.shape[1] // H, j // size])
        case block_mask.ByHead(route, when_true, when_false, size):
            choice = route[b, h * G // H]
            choice = choice if choice.ndim == 0 else choice[i // size]
            return shows(when_true if choice else when_false, b, head, i, p, j, start)
    raise TypeError(type(mask))


def carries_bias(mask, b: int, head: tuple[int, int, int], i: int, p: int, j: int) -> bool:
    """Whether a visible pair joins two chunks of a `from_chunks` mask."""
    h, H, G = head
    match mask:
        case block_mask.Chunks(_, size):
            return j // size != p // size
        case block_mask.ByHead(route, when_true, when_false, size):
            choice = route[b, h * G // H]
            choice = choice if choice.ndim == 0 else choice[i // size]
            return carries_bias(when_true if choice else when_false, b, head, i, p, j)
    return False


def chunk_size(mask) -> int:
    match mask:
        case block_mask.Chunks(_, size):
            return size
        case block_mask.ByHead(_, when_true, when_false, _):
            return chunk_size(when_true) or chunk_size(when_false)
    return 0


def pairs(arguments: dict) -> tuple[np.ndarray, np.ndarray]:
    """(visible, chunk whose bias the pair carries or -1), both [B, H, T, S]."""
    (B, T, H, _), (S, G) = arguments["q"].shape, arguments["k"].shape[1:3]
    mask = jax.tree.map(np.asarray, arguments["mask"])
    offset = arguments.get("q_offset")
    offset = np.broadcast_to(S - T if offset is None else np.asarray(offset), (B,))
    ids = arguments.get("segment_ids")
    key_ids = arguments.get("kv_segment_ids")
    ids = None if ids is None else np.asarray(ids)
    key_ids = ids if key_ids is None else np.asarray(key_ids)
    window, size = arguments.get("window"), chunk_size(mask)
    visible = np.zeros((B, H, T, S), bool)
    biased = np.full((B, H, T, S), -1)
    for b, h, i, j in np.ndindex(B, H, T, S):
        p, start, head = int(offset[b]) + i, 0, (h, H, G)
        if j > p or (window is not None and p - j >= window):
            continue
        if ids is not None:
            if ids[b, i] != key_ids[b, j] or ids[b, i] < 0:
                continue
            start = j
            while start > 0 and key_ids[b, start - 1] == key_ids[b, j]:
                start -= 1
        if shows(mask, b, head, i, p, j, start):
            visible[b, h, i, j] = True
            if carries_bias(mask, b, head, i, p, j):
                biased[b, h, i, j] = j // size
    return visible, biased


def attention(arguments: dict, visible: np.ndarray, biased: np.ndarray):
    """(o [B, T, H, V], lse [B, H, T])."""
    q, k, v = (np.asarray(arguments[name], np.float64) for name in "qkv")
    (B, T, H, K), G = q.shape, k.shape[2]
    bias, cap = arguments.get("block_bias"), arguments.get("softcap")
    scale = arguments.get("scale") or K**-0.5
    o, lse = np.zeros((B, T, H, v.shape[-1])), np.full((B, H, T), -np.inf)
    for b, h, i in np.ndindex(B, H, T):
        seen = np.flatnonzero(visible[b, h, i])
        if seen.size == 0:
            continue
        logits = scale * k[b, seen, h * G // H] @ q[b, i, h]
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        if bias is not None:
            row = np.asarray(bias, np.float64)[b, h * bias.shape[1] // H]
            chunk = biased[b, h, i, seen]
            logits = logits + np.where(chunk >= 0, row[chunk], 0)
        largest = logits.max()
        lse[b, h, i] = largest + np.log(np.exp(logits - largest).sum())
        o[b, i, h] = np.exp(logits - lse[b, h, i]) @ v[b, seen, h * G // H]
    return o, lse
