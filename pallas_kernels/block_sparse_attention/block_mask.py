"""Which keys each query may see: `BlockMask`, a pytree of traced arrays with O(blocks) memory.

A mask is a small expression: four leaves (`Causal`, `Streaming`, `Blocks`, `Chunks`) and one
choice between two masks (`ByHead`). Its class and its block sizes are static, its arrays are
traced, so jit compiles once per kind of mask and never again for another selection. Every array
starts with [batch, heads], so one partition spec serves a whole mask. Nothing here looks at
values: `visible` and `inter_chunk` expand a mask over the pairs an implementation asks for.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Int, Shaped
from pallas_kernels.blocks import cdiv

# A bool array, or what a transformation puts in its place: a shape, an axis, a partition spec.
Selection: TypeAlias = Any


class Pairs(NamedTuple):
    """Some queries against all keys: what a mask needs to know of both.

    A query has two addresses. `index` is its place in the query array and picks rows of
    per-query-block arrays; `position` is its place among the keys and decides which blocks are its
    own. They differ by q_offset.
    """

    heads: int
    index: Int[Array, "t"]
    position: Int[Array, "#B t"]
    document_start: Int[Array, "#B S"]  # position of the first key of each key's document

    @property
    def key(self) -> Int[Array, "S"]:
        return jnp.arange(self.document_start.shape[1], dtype=jnp.int32)


class BlockMask:
    """The keys a query may see, before causality, windows and segment ids cut it further.

    Build one with the constructors below. A query at position p (q_offset + index) sees a key at
    position s <= p when the mask says so; p and s count from the start of the key array.
    """

    @staticmethod
    def causal() -> "Causal":
        """Every earlier key and the query's own."""
        return Causal()

    @staticmethod
    def streaming(sink_blocks: int, local_blocks: int, block_size: int = 128) -> "Streaming":
        """The document's first `sink_blocks` blocks and the last `local_blocks`, own included."""
        _require_positive("block_size", block_size)
        _require_positive("local_blocks", local_blocks)
        if sink_blocks < 0:
            raise ValueError(f"sink_blocks={sink_blocks} must be >= 0")
        return Streaming(sink_blocks, local_blocks, block_size)

    @staticmethod
    def from_blocks(keep: Bool[Array, "B R M N"], block_size: int = 128) -> "Blocks":
        """The pairs of query block i // block_size and key block s // block_size kept in `keep`."""
        _require_positive("block_size", block_size)
        _require_bool("keep", keep, (4,))
        return Blocks(keep, block_size)

    @staticmethod
    def from_chunks(selected: Bool[Array, "B R N"], chunk_size: int = 64) -> "Chunks":
        """The query's own chunk causally, and all of every earlier chunk in `selected`."""
        _require_positive("chunk_size", chunk_size)
        _require_bool("selected", selected, (3,))
        return Chunks(selected, chunk_size)

    @staticmethod
    def by_head(
        route: Bool[Array, "B G *M"], when_true: "BlockMask", when_false: "BlockMask"
    ) -> "ByHead":
        """One of two masks for each key/value head, or for each head and query block.

        `route` is [B, G], or [B, G, ceil(T / b)] by query block i // b, where b is the block size
        of the two masks (128 when neither has one). No gradient reaches `route`.
        """
        _require_bool("route", route, (2, 3))
        for name, mask in (("when_true", when_true), ("when_false", when_false)):
            if not isinstance(mask, BlockMask):
                raise TypeError(f"{name} must be a BlockMask, got {type(mask).__name__}")
        sizes = sorted(when_true.block_sizes() | when_false.block_sizes())
        if len(route.shape) == 3 and len(sizes) > 1:
            raise ValueError(
                f"a route by query block needs one block size, its masks have {sizes[0]} "
                f"and {sizes[-1]}"
            )
        return ByHead(route, when_true, when_false, sizes[0] if sizes else 128)

    def block_sizes(self) -> frozenset[int]:
        """The block sizes that occur in the mask."""
        raise NotImplementedError

    def leaves(self) -> "tuple[BlockMask, ...]":
        """The masks `by_head` chooses between; the mask itself when it is not a choice."""
        return (self,)

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        """Raises ValueError where the mask's arrays disagree with q [B,T,H,_] and k [B,S,G,_]."""
        raise NotImplementedError

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        """Whether the mask shows key s to query t; causality is the caller's."""
        raise NotImplementedError

    def inter_chunk(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        """Whether a pair joins two chunks of a `from_chunks` mask, where block_bias applies."""
        return jnp.zeros((1, 1, 1, 1), bool)


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Causal(BlockMask):
    """See `BlockMask.causal`."""

    def block_sizes(self) -> frozenset[int]:
        return frozenset()

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        pass

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        return jnp.ones((1, 1, 1, 1), bool)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(),
    meta_fields=("sink_blocks", "local_blocks", "block_size"),
)
@dataclasses.dataclass(frozen=True)
class Streaming(BlockMask):
    """See `BlockMask.streaming`."""

    sink_blocks: int
    local_blocks: int
    block_size: int

    def block_sizes(self) -> frozenset[int]:
        return frozenset({self.block_size})

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        pass

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        key_block = pairs.key // self.block_size
        first_block = pairs.document_start // self.block_size
        sink = (key_block - first_block < self.sink_blocks)[:, None, None, :]
        distance = (pairs.position // self.block_size)[:, None, :, None] - key_block
        return sink | (distance < self.local_blocks)


@partial(jax.tree_util.register_dataclass, data_fields=("keep",), meta_fields=("block_size",))
@dataclasses.dataclass(frozen=True)
class Blocks(BlockMask):
    """See `BlockMask.from_blocks`."""

    keep: Selection  # [B, R, M, N]
    block_size: int

    def block_sizes(self) -> frozenset[int]:
        return frozenset({self.block_size})

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        _check_batch_and_rows("keep", self.keep.shape, B, H)
        _check_count("keep", "query", self.keep.shape[2], T, self.block_size)
        _check_count("keep", "key", self.keep.shape[3], S, self.block_size)

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        rows = jnp.take(self.keep, pairs.index // self.block_size, axis=2, mode="clip")
        by_key = blocks_to_keys(rows, self.block_size, pairs.document_start.shape[1])
        return rows_to_heads(by_key, pairs.heads)


@partial(jax.tree_util.register_dataclass, data_fields=("selected",), meta_fields=("chunk_size",))
@dataclasses.dataclass(frozen=True)
class Chunks(BlockMask):
    """See `BlockMask.from_chunks`."""

    selected: Selection  # [B, R, N]
    chunk_size: int

    def block_sizes(self) -> frozenset[int]:
        return frozenset({self.chunk_size})

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        _check_batch_and_rows("selected", self.selected.shape, B, H)
        _check_count("selected", "key", self.selected.shape[2], S, self.chunk_size)

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        by_key = blocks_to_keys(self.selected, self.chunk_size, pairs.document_start.shape[1])
        return rows_to_heads(by_key, pairs.heads)[:, :, None, :] | ~self.inter_chunk(pairs)

    def inter_chunk(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        query_chunk = (pairs.position // self.chunk_size)[:, None, :, None]
        return query_chunk > pairs.key // self.chunk_size


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("route", "when_true", "when_false"),
    meta_fields=("block_size",),
)
@dataclasses.dataclass(frozen=True)
class ByHead(BlockMask):
    """See `BlockMask.by_head`."""

    route: Selection  # [B, G] or [B, G, M]
    when_true: BlockMask
    when_false: BlockMask
    block_size: int  # of a route by query block

    def block_sizes(self) -> frozenset[int]:
        return self.when_true.block_sizes() | self.when_false.block_sizes()

    def leaves(self) -> tuple[BlockMask, ...]:
        return self.when_true.leaves() + self.when_false.leaves()

    def check(self, B: int, H: int, G: int, T: int, S: int) -> None:
        shape = self.route.shape
        _check_batch_and_rows("route", shape, B, H)
        if shape[1] != G:
            raise ValueError(f"route has {shape[1]} heads, k has {G} key/value heads")
        if len(shape) == 3:
            _check_count("route", "query", shape[2], T, self.block_size)
        self.when_true.check(B, H, G, T, S)
        self.when_false.check(B, H, G, T, S)

    def visible(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        choice = self._choice(pairs)
        return jnp.where(choice, self.when_true.visible(pairs), self.when_false.visible(pairs))

    def inter_chunk(self, pairs: Pairs) -> Bool[Array, "#B #H #t #S"]:
        choice = self._choice(pairs)
        true, false = self.when_true.inter_chunk(pairs), self.when_false.inter_chunk(pairs)
        return jnp.where(choice, true, false)

    def _choice(self, pairs: Pairs) -> Bool[Array, "B H #t 1"]:
        route = rows_to_heads(self.route, pairs.heads)
        if route.ndim == 2:
            return route[:, :, None, None]
        return jnp.take(route, pairs.index // self.block_size, axis=2, mode="clip")[..., None]


def document_starts(kv_segment_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Position of the first key of each key's document: of its run of equal ids."""
    position = jnp.arange(kv_segment_ids.shape[1], dtype=jnp.int32)
    changes = kv_segment_ids[:, 1:] != kv_segment_ids[:, :-1]
    starts = jnp.pad(changes, ((0, 0), (1, 0))) * position
    return jax.lax.cummax(starts, axis=1)


def rows_to_heads(rows: Shaped[Array, "B R *x"], heads: int) -> Shaped[Array, "B H *x"]:
    """Gives query head h row h // (H / R)."""
    return jnp.repeat(rows, heads // rows.shape[1], axis=1)


def blocks_to_keys(blocks: Shaped[Array, "*x N"], block_size: int, S: int) -> Shaped[Array, "*x S"]:
    """Gives key s the value of block s // block_size."""
    return jnp.repeat(blocks, block_size, axis=-1)[..., :S]


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be >= 1")


def _require_bool(name: str, array: Array, ranks: tuple[int, ...]) -> None:
    if array.dtype != jnp.bool_:
        raise TypeError(f"{name} must be bool, got {array.dtype}")
    if len(array.shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ValueError(f"{name} must have {wanted} dimensions, got {len(array.shape)}")


def _check_batch_and_rows(name: str, shape: tuple[int, ...], B: int, H: int) -> None:
    if shape[0] != B:
        raise ValueError(f"{name} has batch {shape[0]}, q has batch {B}")
    if H % shape[1]:
        raise ValueError(f"{name} has {shape[1]} rows, which do not divide {H} query heads")


def _check_count(name: str, side: str, count: int, length: int, block_size: int) -> None:
    expected = cdiv(length, block_size)
    if count != expected:
        raise ValueError(
            f"{name} has {count} {side} blocks, but {length} tokens in blocks of {block_size} "
            f"are {expected}"
        )
