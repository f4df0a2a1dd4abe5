"""Named caches with drawn queries and lists, for the tests and the benchmark alike."""

import dataclasses
import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array, Bool
from pallas_kernels.blocks import cdiv
from pallas_kernels.decode_attention.api import Problem
from pallas_kernels.work import Work

_OUTPUTS = ("o", "lse")
_ACCEPTED = {"bfloat16": 5e-3, "float32": 1e-5, "float64": 1e-10}


def accepted(dtype: str) -> dict[str, float]:
    """The largest rms(out - ref) / rms(ref) of each output and gradient, by dtype of q."""
    return dict.fromkeys((*_OUTPUTS, "dq", "dk_pages", "dv_pages"), _ACCEPTED[dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """B rows of T tokens in pages of C, and the last t tokens' queries.

    heads: which pages a head keeps. "full": all. "streaming": the first and a ring of the latest
    `ring`. "mixed": the first half of the heads all, the others as streaming. "chunks": each with
    probability `density`, the last always, as chunk routing does.
    """

    name: str
    B: int
    t: int
    T: int
    H: int
    G: int
    K: int
    V: int
    C: int = 64
    tags: frozenset[str] = frozenset()
    heads: str = "full"
    ring: int = 16
    density: float = 0.25
    scattered: bool = False  # whether lists are in random order, with gaps
    softcap: float | None = None

    forward_only = True  # a decoding step has no backward pass
    repeated = "q"  # waits for the outputs of the step before

    @property
    def shape(self) -> str:
        return "x".join(str(getattr(self, size)) for size in ("B", "t", "T", "H", "G", "K", "V"))

    @property
    def options(self) -> dict:
        return {"softcap": self.softcap}

    @property
    def outputs(self) -> tuple[str, ...]:
        return _OUTPUTS

    def problem(self, dtype: str) -> Problem:
        pages, _, kept = self._lists()
        sizes = {name: getattr(self, name) for name in ("B", "t", "H", "G", "K", "V", "C")}
        return Problem(**sizes, P=int(kept.sum()), N=pages.shape[2], dtype=dtype)

    def work(self, dtype: str, backward: bool) -> Work:
        """Every kept token's key and value once; 2 (K + V) operations a query and token."""
        item, tokens = jnp.dtype(dtype).itemsize, int(self._lists()[2].sum()) * self.C
        moved = self.B * self.t * self.H * (self.K + self.V) + tokens * (self.K + self.V)
        return Work(
            units=tokens / 1024,
            unit="1,024 tokens of a list",
            flops=2.0 * (self.K + self.V) * tokens * self.t * self.H // self.G,
            bytes=item * moved,
        )

    def cut(self, tokens: int) -> "Case":
        """One row of at most so many tokens."""
        return dataclasses.replace(self, B=1, T=min(self.T, tokens))

    def times(self, factor: int) -> "Case":
        """The case with rows `factor` times as long."""
        return dataclasses.replace(self, T=factor * self.T)

    def _kept(self, rng: np.random.Generator) -> Bool[np.ndarray, "B G N"]:
        N = cdiv(self.T, self.C)
        page, head = np.arange(N), np.arange(self.G)[:, None]
        streaming = (page < 1) | (page >= N - self.ring)
        if self.heads == "chunks":
            kept = rng.random((self.B, self.G, N)) < self.density
            return kept | (page == N - 1)
        full = {"full": True, "streaming": False, "mixed": head < self.G // 2}[self.heads]
        return np.broadcast_to(full | streaming, (self.B, self.G, N))

    def _lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(pages, starts, kept): random places in a pool that holds the kept pages alone."""
        rng = np.random.default_rng(0)
        kept = self._kept(rng)
        pages = np.full(kept.shape, -1)
        pages[kept] = rng.permutation(int(kept.sum()))
        order = rng.random(kept.shape) if self.scattered else ~kept
        order = np.argsort(order, axis=2, kind="stable")
        longest = kept.shape[2] if self.scattered else int(kept.sum(2).max())
        starts = np.broadcast_to(np.arange(kept.shape[2]) * self.C, kept.shape)
        pages, starts = (np.take_along_axis(x, order, 2)[..., :longest] for x in (pages, starts))
        return pages, starts, kept

    def draw(self, key: Array, dtype) -> tuple[dict[str, Array], dict, tuple[Array, Array]]:
        """Differentiable arguments, lists and positions, and cotangents of (o, lse).

        Under tracing (`jax.eval_shape`) only the shapes are meant.
        """
        pages, starts, kept = self._lists()
        ends = self.T - np.arange(self.B) % min(self.C, self.T - self.t + 1)  # not all of a page
        positions = ends[:, None] - self.t + np.arange(self.t)
        lists = {"pages": pages, "starts": starts, "positions": positions}
        floating, cotangents = self._floating(key, dtype, int(kept.sum()))
        return floating, {k: jnp.asarray(x, jnp.int32) for k, x in lists.items()}, cotangents

    @functools.partial(jax.jit, static_argnums=(0, 2, 3))
    def _floating(self, key: Array, dtype, P: int):
        sizes = {
            "q": (self.B, self.t, self.H, self.K),
            "k_pages": (P, self.C, self.K),
            "v_pages": (P, self.C, self.V),
        }
        keys = jax.random.split(key, 5)
        drawn = {
            name: jax.random.normal(one, size, dtype)
            for one, (name, size) in zip(keys, sizes.items(), strict=False)
        }
        exact = jnp.promote_types(dtype, jnp.float32)
        do = jax.random.normal(keys[3], (self.B, self.t, self.H, self.V), dtype)
        return drawn, (do, jax.random.normal(keys[4], (self.B, self.H, self.t), exact))


def _case(name: str, shape: tuple[int, ...], *tags: str, **options) -> Case:
    """shape = (B, t, T, H, G, K, V)."""
    return Case(name, *shape, tags=frozenset(tags), **options)


CASES: tuple[Case, ...] = (
    _case("one-page", (1, 1, 5, 2, 2, 8, 8), "ci", C=16),
    _case("full", (2, 1, 75, 4, 2, 16, 16), "ci", C=8),
    _case("few-queries", (2, 3, 75, 4, 2, 16, 24), "ci", C=8, scattered=True, softcap=2.0),
    _case("streaming", (2, 1, 93, 4, 4, 8, 8), "ci", C=8, heads="streaming", ring=2),
    _case("mixed", (2, 2, 93, 4, 4, 8, 8), "ci", C=8, heads="mixed", ring=2),
    _case("chunks", (2, 1, 93, 6, 3, 8, 16), "ci", C=8, heads="chunks", density=0.3),
    _case("4k", (2, 1, 4096, 8, 2, 64, 64), "quick"),
    # Llama 3.1 8B's heads
    _case("8k-1", (1, 1, 8192, 32, 8, 128, 128), "bench"),
    _case("128k-1", (1, 1, 131072, 32, 8, 128, 128), "bench"),
    _case("8k-64", (64, 1, 8192, 32, 8, 128, 128), "bench"),
    _case("128k-1-mixed", (1, 1, 131072, 32, 8, 128, 128), "bench", heads="mixed"),
    _case("128k-1-page-128", (1, 1, 131072, 32, 8, 128, 128), "bench", C=128),
    _case("32k-8-four-queries", (8, 4, 32768, 32, 8, 128, 128), "bench"),
    _case("natsl-380m-128k-1", (1, 1, 131072, 12, 12, 64, 128), "bench", heads="chunks"),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
