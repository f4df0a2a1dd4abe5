"""Named shapes with drawn inputs and masks, for the tests and the benchmark alike.

Tags: `ci` is small enough for two CPU cores; `bench` are long rows and published head sizes;
`quick` is the benchmark's choice on a CPU.
"""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array
from pallas_kernels.block_sparse_attention.api import Problem
from pallas_kernels.block_sparse_attention.block_mask import BlockMask
from pallas_kernels.blocks import cdiv
from pallas_kernels.work import Work


def accepted(dtype: str) -> dict[str, float]:
    """The largest rms(out - ref) / rms(ref) of each output and gradient, by dtype of q, k and v."""
    names = ("o", "lse", "dq", "dk", "dv", "dblock_bias")
    return dict.fromkeys(names, {"float64": 1e-10, "float32": 1e-5}.get(dtype, 5e-3))


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One problem: sizes, options, and how its mask is drawn.

    mask: "causal"; "streaming" with one sink block; "blocks" or "chunks", each kept with
    probability `density`, the diagonal always; "mixed", half of the heads causal and half
    streaming; "routed", chunks, blocks or streaming at random for each head and query block.
    """

    name: str
    B: int
    T: int
    S: int
    H: int
    G: int
    K: int
    V: int
    rows: int  # of the mask's arrays
    tags: frozenset[str] = frozenset()
    mask: str = "causal"
    block_size: int = 128
    density: float = 0.25
    local_blocks: int = 2
    block_bias: bool = False
    q_offset: tuple[int, ...] | None = None
    documents: int = 0  # packed documents per row, followed by padding; 0: one, without ids
    window: int | None = None
    softcap: float | None = None

    @property
    def shape(self) -> str:
        return "x".join(str(getattr(self, size)) for size in ("B", "T", "H", "G", "K", "V"))

    @property
    def options(self) -> dict:
        """Keyword arguments of the op that are not arrays."""
        return {"window": self.window, "softcap": self.softcap}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("o", "lse")

    def problem(self, dtype: str) -> Problem:
        """What the implementations' `unsupported` looks at."""
        arguments, fixed, _ = jax.eval_shape(lambda key: self.draw(key, dtype), jax.random.key(0))
        return Problem(
            *(arguments[name] for name in "qkv"),
            mask=fixed["mask"],
            block_bias=self.block_bias,
            q_offset=self.q_offset is not None,
            segment_ids=bool(self.documents),
            window=self.window,
            softcap=self.softcap,
        )

    def work(self, dtype: str, backward: bool) -> Work:
        """2 (K + V) operations a visible pair, 3.5 times that with gradients; whole causal rows."""
        if self.T != self.S or self.T % self.block_size or self.documents or self.window:
            raise ValueError(f"{self.name}: only pairs of whole rows and blocks are counted")
        arguments, _, outputs = jax.eval_shape(lambda key: self.draw(key, dtype), jax.random.key(0))
        given, produced = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for tree in (arguments, outputs)
        )
        b = self.block_size
        kept = np.tril(self._kept(np.random.default_rng(0)))
        own = np.trace(kept, axis1=-2, axis2=-1).sum()
        pairs = ((kept.sum() - own) * b * b + own * b * (b + 1) / 2) * self.H / kept.shape[1]
        return Work(
            units=pairs / 128**2,
            unit="128 x 128 visible pairs",
            flops=(3.5 if backward else 1) * 2.0 * (self.K + self.V) * pairs,
            bytes=3 * given + 2 * produced if backward else given + produced,
        )

    def _kept(self, rng: np.random.Generator) -> np.ndarray:
        """[B, heads or rows, N, N]: the pairs of blocks that `_mask` shows, causality aside."""
        N = cdiv(self.S, self.block_size)
        key, query = np.arange(N), np.arange(N)[:, None]
        causal = np.ones((N, N), bool)
        streaming = (key < 1) | (query - key < self.local_blocks)
        if self.mask in ("causal", "streaming", "mixed"):
            kinds = {"causal": [causal], "streaming": [streaming], "mixed": [causal, streaming]}
            return np.broadcast_to(
                np.stack(kinds[self.mask]), (self.B, len(kinds[self.mask]), N, N)
            )
        own = np.eye(N, dtype=bool)
        selected = rng.random((self.B, self.rows, N)) < self.density
        if self.mask == "chunks":
            return selected[:, :, None] | own
        return (rng.random((self.B, self.rows, N, N)) < self.density) | own

    def times(self, factor: int) -> "Case":
        """The case with `factor` times as many queries and keys."""
        return dataclasses.replace(self, T=factor * self.T, S=factor * self.S)

    def cut(self, tokens: int) -> "Case":
        """One row of the case's first `tokens` queries, with as many keys fewer."""
        T = min(self.T, tokens)
        return dataclasses.replace(
            self,
            B=1,
            T=T,
            S=self.S - self.T + T,
            q_offset=None if self.q_offset is None else self.q_offset[:1],
        )

    def draw(self, key: Array, dtype) -> tuple[dict[str, Array], dict, tuple[Array, Array]]:
        """Differentiable arguments, the other arrays, and cotangents of (o, lse).

        Under tracing (`jax.eval_shape`) only the shapes are meant.
        """
        B, T, S, H, G, K, V = self.B, self.T, self.S, self.H, self.G, self.K, self.V
        accumulator = jnp.promote_types(dtype, jnp.float32)
        # NumPy draws, because a compilation for every shape costs seconds on a CPU
        traced = isinstance(key, jax.core.Tracer)
        rng = np.random.default_rng(0 if traced else np.asarray(jax.random.key_data(key)))

        def normal(*shape, dtype=dtype):
            drawn = jnp.zeros(shape) if traced else rng.standard_normal(shape, np.float32)
            return jnp.asarray(drawn, dtype)

        arguments = {
            "q": normal(B, T, H, K),
            "k": normal(B, S, G, K),
            "v": normal(B, S, G, V),
        }
        cotangents = (normal(B, T, H, V), normal(B, H, T, dtype=accumulator))
        fixed: dict = {"mask": self._mask(rng)}
        if self.block_bias:
            chunks = cdiv(S, self.block_size)
            arguments["block_bias"] = normal(B, self.rows, chunks, dtype=accumulator)
        if self.q_offset is not None:
            fixed["q_offset"] = jnp.asarray(self.q_offset, jnp.int32)
        if self.documents:
            fixed["segment_ids"] = _documents(rng, B, T, self.documents)
            if S != T:
                fixed["kv_segment_ids"] = _documents(rng, B, S, self.documents)
        return arguments, fixed, cotangents

    def _mask(self, rng: np.random.Generator) -> BlockMask:
        B, G, b = self.B, self.G, self.block_size
        N, query_blocks = cdiv(self.S, b), cdiv(self.T, b)
        streaming = BlockMask.streaming(1, self.local_blocks, b)
        if self.mask == "causal":
            return BlockMask.causal()
        if self.mask == "streaming":
            return streaming
        if self.mask == "mixed":
            causal = np.broadcast_to(np.arange(G) < G // 2, (B, G))
            return BlockMask.by_head(jnp.asarray(causal), BlockMask.causal(), streaming)
        selected = rng.random((B, self.rows, N)) < self.density
        chunks = BlockMask.from_chunks(jnp.asarray(selected), b)
        if self.mask == "chunks":
            return chunks
        keep = rng.random((B, self.rows, query_blocks, N)) < self.density
        keep |= np.eye(query_blocks, N, dtype=bool)
        blocks = BlockMask.from_blocks(jnp.asarray(keep), b)
        if self.mask == "blocks":
            return blocks
        assert self.mask == "routed", self.mask
        by_block = jnp.asarray(rng.random((B, G, query_blocks)) < 0.5)
        by_head = jnp.asarray(rng.random((B, G)) < 0.5)
        return BlockMask.by_head(by_block, chunks, BlockMask.by_head(by_head, blocks, streaming))


def _documents(rng: np.random.Generator, B: int, length: int, count: int) -> Array:
    """Ids 0 .. count - 1 in this order at random lengths, then padding."""
    ends = rng.integers(1, length, (B, 1, count))
    ids = (np.arange(length)[:, None] >= ends).sum(-1)
    return jnp.asarray(np.where(ids == count, -1, ids), jnp.int32)


def _case(name: str, shape: tuple[int, int, int, int], *tags: str, **options) -> Case:
    """shape = (B, T, H, K); S, G, V and rows default to T, H, K and H."""
    B, T, H, K = shape
    sizes: dict = {"S": T, "G": H, "V": K, "rows": H} | options
    return Case(name=name, B=B, T=T, H=H, K=K, tags=frozenset(tags), **sizes)


_32K = (1, 32768, 16, 128)
_CHUNKS: dict = {"mask": "chunks", "block_size": 64, "V": 128, "block_bias": True}

CASES: tuple[Case, ...] = (
    _case("single-pair", (1, 1, 1, 8), "ci"),
    _case("causal", (2, 48, 4, 16), "ci", G=2),
    _case("one-query", (2, 1, 4, 16), "ci", S=37, G=2, q_offset=(36, 11)),
    _case("streaming", (2, 67, 2, 16), "ci", V=24, mask="streaming", block_size=8),
    _case("blocks", (2, 45, 4, 16), "ci", S=70, G=2, V=8, mask="blocks", block_size=16, rows=2),
    _case(
        "chunks",
        (2, 75, 6, 8),
        "ci",
        V=16,
        mask="chunks",
        block_size=16,
        rows=3,
        block_bias=True,
    ),
    _case(
        "chunks-capped-offset",
        (2, 20, 4, 8),
        "ci",
        S=61,
        G=1,
        mask="chunks",
        block_size=8,
        rows=1,
        block_bias=True,
        q_offset=(33, -7),
        softcap=2.0,
    ),
    _case(
        "mixed-packed-windowed",
        (2, 64, 4, 8),
        "ci",
        mask="mixed",
        block_size=8,
        documents=3,
        window=29,
    ),
    _case(
        "everything",
        (2, 41, 8, 8),
        "ci",
        S=66,
        G=4,
        V=16,
        rows=2,
        mask="routed",
        block_size=8,
        density=0.5,
        block_bias=True,
        q_offset=(25, 13),
        documents=2,
        window=50,
        softcap=5.0,
    ),
    _case("2k-chunks", (1, 2048, 4, 64), "quick", density=0.3, **_CHUNKS),
    _case("32k-causal", _32K, "bench"),
    _case("64k-causal", (1, 65536, 16, 128)),
    *(
        _case(f"32k-blocks-{density:g}", _32K, "bench", mask="blocks", density=density)
        for density in (1.0, 0.5, 0.25, 0.125, 0.1, 0.0625)
    ),
    _case("4k-blocks-0.25", (8, 4096, 16, 128), "bench", mask="blocks"),
    _case("32k-mixed", _32K, "bench", mask="mixed", local_blocks=16),
    _case("natsl-380m", (8, 4096, 12, 64), "bench", rows=6, **_CHUNKS),
    _case("natsl-380m-32k", (1, 32768, 12, 64), "bench", rows=6, **_CHUNKS),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
