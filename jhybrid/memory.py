"""Bytes that decoding holds: per row whatever its length, and per token of its context."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.commandline import cell
from jhybrid.mixers import State
from jhybrid.mixers.chunk_routed import ChunkRoutedState
from jhybrid.mixers.head_routed_ops import HeadRoutedState
from jhybrid.mixers.softmax import SoftmaxState
from jhybrid.model import HybridLM
from pallas_kernels.array_types import Array, Int


class Usage(NamedTuple):
    """What the caches of one block hold."""

    length: Int[Array, "B"]  # tokens read
    cached: Int[Array, "B H"]  # of them, those whose keys and values are there, by head
    token_bytes: Int[Array, ""]  # keys and values of one token of one of these heads
    refused: Int[Array, "B #H"]  # chunks that had no room; heads of a head-routed block


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Of one block and one row; per token means per token of context."""

    block: int
    mixer: str
    row_bytes: int  # held whatever the length
    cache_bytes_per_token: float  # allocated, for rows of the maximal length
    used_bytes_per_token: float | None = None  # of keys and values that are there
    cached_fraction: float | None = None  # of (token, head) pairs that are there


def memory(
    model: HybridLM, max_length: int, usages: Sequence[Usage | None] | None = None
) -> list[BlockMemory]:
    """By block, for rows of at most `max_length` tokens; with `usages`, also what was used."""
    small, large = (_leaf_bytes(model, length) for length in (max_length, 2 * max_length))
    report = []
    for i, block in enumerate(model.config.blocks):
        cache = sum(a for a, b in zip(small[i], large[i], strict=True) if a != b)
        used = None if usages is None else usages[i]
        report.append(
            BlockMemory(
                block=i,
                mixer=type(block.mixer).__name__.removesuffix("Config"),
                row_bytes=sum(small[i]) - cache,
                cache_bytes_per_token=cache / max_length,
                **({} if used is None else _used(used)),
            )
        )
    return report


def usage(state: State) -> Usage | None:
    """What a block's state holds; None for states without a cache."""
    match state:
        case ChunkRoutedState(keys=keys, values=values):
            open_tokens = (state.length % keys.shape[4])[:, None]
            cached = state.kept * keys.shape[4] + open_tokens
            heads, refused = keys.shape[2], state.refused
        case SoftmaxState(keys=keys, values=values):
            cached = jnp.broadcast_to(state.length[:, None], keys.shape[:2])
            heads, refused = 1, jnp.zeros_like(cached)
        case HeadRoutedState(keys=keys, values=values, recent=recent):
            length = jnp.broadcast_to(state.length[:, None], state.full.shape)
            room = length if recent is None else jnp.minimum(length, recent[0].shape[2])
            cached = jnp.where(state.full, length, room)
            heads, refused = 1, jnp.sum(state.refused, 1, keepdims=True, dtype=jnp.int32)
        case _:
            return None
    token_bytes = heads * (keys.shape[-1] + values.shape[-1]) * keys.dtype.itemsize
    return Usage(state.length, cached, jnp.int32(token_bytes), refused)


def table(report: Sequence[BlockMemory]) -> str:
    """One line per block and their sum."""
    lines = [f"{'block':>5} {'mixer':<16} {'B/row':>11} {'B/token':>10} {'used':>10} {'cached':>7}"]
    for item in report:
        lines.append(
            f"{item.block:>5} {item.mixer:<16} {item.row_bytes:>11} "
            f"{item.cache_bytes_per_token:>10.1f} {cell(item.used_bytes_per_token, '10.1f')} "
            f"{cell(item.cached_fraction, '7.3f')}"
        )
    used = [r.used_bytes_per_token for r in report if r.used_bytes_per_token is not None]
    lines.append(
        f"{'all':>5} {'':<16} {sum(r.row_bytes for r in report):>11} "
        f"{sum(r.cache_bytes_per_token for r in report):>10.1f} "
        f"{cell(sum(used) if used else None, '10.1f')}"
    )
    return "\n".join(lines)


def _used(usage: Usage) -> dict[str, float]:
    tokens, cached = int(np.sum(usage.length)), int(np.sum(usage.cached))
    pairs = tokens * usage.cached.shape[1]
    return {
        "used_bytes_per_token": cached * int(usage.token_bytes) / tokens,
        "cached_fraction": cached / pairs,
    }


def _leaf_bytes(model: HybridLM, max_length: int) -> list[list[int]]:
    """Sizes of the arrays of each block's state for one row."""
    states = jax.eval_shape(lambda: model.initial_state(1, max_length))
    return [
        [math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state)] for state in states
    ]
