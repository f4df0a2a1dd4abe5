"""Named shapes with drawn inputs, for the tests and the benchmark alike.

Tags: `ci` is small enough for two CPU cores; `fla` are the shapes flash-linear-attention tests its
own kernels with (github.com/fla-org/flash-linear-attention, tests/ops/test_gated_delta.py);
`bench` are the sizes of published models; `quick` is the benchmark's choice on a CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.blocks import cdiv
from pallas_kernels.gated_delta_rule.api import Problem
from pallas_kernels.memory import Memory
from pallas_kernels.work import Work

_BF16 = {"o": 5e-3, "final_state": 5e-3, "dg": 2e-2, "dbeta": 2e-2, "dwrite_mask": 2e-2}
_BF16 |= dict.fromkeys(("dq", "dk", "dv", "dinitial_state"), 8e-3)


def accepted(dtype: str) -> dict[str, float]:
    """The largest rms(out - ref) / rms(ref) of each output and gradient, by dtype of q, k and v.

    bf16 and fp16: the limits flash-linear-attention accepts of its own kernels.
    """
    exact = {"float64": 1e-10, "float32": 1e-5}
    return dict.fromkeys(_BF16, exact[dtype]) if dtype in exact else _BF16


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One problem: sizes, options, and how its gates are drawn."""

    name: str
    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int
    tags: frozenset[str] = frozenset()
    chunk_size: int = 64
    write_mask: bool = False
    documents: tuple[int, ...] = ()  # lengths of the packed documents of every row; they sum to T
    decay: float | None = None  # every log decay; None draws log sigmoid(normal) / `decay_divisor`
    decay_divisor: float = 1.0
    undecayed: float = 0.0  # fraction of tokens whose log decay is set to 0
    largest_beta: float = 1.0
    identical_keys: bool = False
    beside: str | None = None  # the case whose time this one's is to be compared with

    @property
    def shape(self) -> str:
        return "x".join(str(getattr(self, size)) for size in ("B", "T", "Hk", "H", "K", "V"))

    @property
    def options(self) -> dict:
        """Keyword arguments of the op that are not arrays."""
        return {"chunk_size": self.chunk_size}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("o", "final_state")

    def problem(self, dtype: str) -> Problem:
        """What the implementations' `unsupported` looks at."""
        sizes = {name: getattr(self, name) for name in ("B", "T", "Hk", "H", "K", "V")}
        return Problem(
            **sizes,
            dtype=dtype,
            chunk_size=self.chunk_size,
            write_mask=self.write_mask,
            segments=bool(self.documents),
        )

    def work(self, dtype: str, backward: bool) -> Work:
        """The delta rule's 6 K V operations a token and value head, thrice that with gradients."""
        arguments, _, outputs = jax.eval_shape(lambda key: self.draw(key, dtype), jax.random.key(0))
        given, produced = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for tree in (arguments, outputs)
        )
        return Work(
            units=self.B * self.H * cdiv(self.T, 128),
            unit="head and 128 tokens",
            flops=(3 if backward else 1) * 6.0 * self.B * self.T * self.H * self.K * self.V,
            bytes=3 * given + 2 * produced if backward else given + produced,
        )

    def memory_bounds(self, dtype: str) -> Memory:
        """What forward+backward may hold: kept, 1.2 times FlashQLA's q, k, v, g, beta, A and
        initial state; beside, twice the states of 64-token chunks in `dtype`."""
        item, states = jnp.dtype(dtype).itemsize, self.B * self.H * self.K * self.V
        tokens, chunks = self.B * self.T, cdiv(self.T, 64)
        narrow = 2 * self.Hk * self.K + self.H * (self.V + 64)  # q, k, v, A
        kept = tokens * (item * narrow + 4 * 2 * self.H) + 4 * states
        return Memory(int(1.2 * kept), 2 * item * chunks * states)

    def times(self, factor: int) -> "Case":
        """The case with `factor` times as many tokens in every row."""
        return dataclasses.replace(self, T=factor * self.T, documents=factor * self.documents)

    def cut(self, tokens: int) -> "Case":
        """One row of the case's first `tokens` tokens."""
        T = min(self.T, tokens)
        documents, left = [], T
        for length in self.documents:
            documents.append(min(length, left))
            left -= documents[-1]
        return dataclasses.replace(self, B=1, T=T, documents=tuple(x for x in documents if x))

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def draw(
        self, key: Array, dtype: str
    ) -> tuple[dict[str, Array], dict[str, Array], tuple[Array, Array]]:
        """Differentiable arguments, integer arguments, and cotangents of (o, final_state)."""
        B, T, Hk, H, K, V = self.B, self.T, self.Hk, self.H, self.K, self.V
        accumulator = jnp.promote_types(dtype, jnp.float32)
        keys = iter(jax.random.split(key, 10))

        def normal(*shape):
            return jax.random.normal(next(keys), shape, accumulator)

        def unit(x):
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        q, k = unit(normal(B, T, Hk, K)), unit(normal(B, T, Hk, K))
        if self.identical_keys:
            k = jnp.broadcast_to(k[:, :1], k.shape)
        g = jax.nn.log_sigmoid(normal(B, T, H)) / self.decay_divisor
        if self.decay is not None:
            g = jnp.full_like(g, self.decay)
        g = jnp.where(jax.random.uniform(next(keys), g.shape) < self.undecayed, 0, g)
        arguments = {
            "q": q.astype(dtype),
            "k": k.astype(dtype),
            "v": normal(B, T, H, V).astype(dtype),
            "g": g,
            "beta": self.largest_beta * jax.nn.sigmoid(normal(B, T, H)),
            "initial_state": normal(B, H, K, V),
        }
        if self.write_mask:
            shape = (B, cdiv(T, self.chunk_size), H)
            kept = jax.random.bernoulli(next(keys), 0.7, shape)
            arguments["write_mask"] = kept * (1 + 0.1 * jax.random.normal(next(keys), shape))
        fixed = {}
        if self.documents:
            lengths = jnp.asarray(self.documents)
            ids = jnp.repeat(jnp.arange(len(lengths)), lengths, total_repeat_length=T)
            fixed["segment_ids"] = jnp.broadcast_to(ids, (B, T))
        cotangent_keys = jax.random.split(jax.random.fold_in(key, 1))
        do = jax.random.normal(cotangent_keys[0], (B, T, H, V), accumulator).astype(dtype)
        dstate = jax.random.normal(cotangent_keys[1], (B, H, K, V), accumulator)
        return arguments, fixed, (do, dstate)


def _case(name: str, shape: tuple[int, ...], *tags: str, **options) -> Case:
    return Case(name, *shape, tags=frozenset(tags), **options)


CASES: tuple[Case, ...] = (
    _case("one-token", (1, 1, 1, 1, 16, 16), "ci"),
    _case("T63", (1, 63, 1, 2, 32, 16), "ci"),
    _case("T64", (2, 64, 2, 2, 16, 32), "ci", write_mask=True),
    _case("T65-grouped", (1, 65, 2, 4, 16, 24), "ci", write_mask=True),
    _case("T75", (2, 75, 2, 2, 64, 64), "ci", "quick", decay_divisor=0.01),
    _case("T1000", (1, 1000, 1, 2, 32, 32), "ci", "quick", write_mask=True, undecayed=0.5),
    _case("odd-chunks", (1, 130, 1, 2, 16, 16), "ci", chunk_size=7, write_mask=True),
    _case("packed", (2, 300, 1, 2, 32, 48), "ci", documents=(1, 62, 2, 135, 100), write_mask=True),
    *(
        _case(name, (1, 140, 1, 2, 32, 32), "ci", **options)
        for name, options in {
            "no-decay": {"decay": 0.0},
            "slow-decay": {"decay": -1e-3},
            "fast-decay": {"decay": -5.0},
            "extreme-decay": {"decay": -60.0},
            "extreme-mixed": {"decay": -60.0, "undecayed": 0.9},
            "slow-mixed": {"decay_divisor": 1000.0, "undecayed": 0.5},
            "negative-eigenvalues": {"largest_beta": 2.0},
            "identical-keys": {"decay": 0.0, "identical_keys": True},
            "reflecting-keys": {"decay": 0.0, "identical_keys": True, "largest_beta": 2.0},
        }.items()
    ),
    _case("fla-undecayed", (4, 1024, 4, 4, 128, 128), "fla", undecayed=1.0),
    _case("fla-strong-decay", (2, 75, 4, 4, 64, 64), "fla", decay_divisor=0.01),
    _case("fla-60", (2, 500, 3, 3, 60, 60), "fla"),
    _case("fla-half-undecayed", (2, 1000, 3, 3, 64, 64), "fla", undecayed=0.5),
    _case("fla-100", (3, 1024, 4, 4, 100, 100), "fla"),
    _case("fla-slow-decay", (2, 1500, 4, 4, 128, 128), "fla", decay_divisor=10),
    _case("fla-2048", (4, 2048, 8, 8, 64, 64), "fla"),
    _case("fla-grouped-2", (2, 256, 2, 4, 64, 64), "fla"),
    _case("fla-grouped-4", (2, 512, 2, 8, 64, 64), "fla"),
    _case("fla-grouped-128", (2, 1024, 4, 8, 128, 128), "fla"),
    _case("fla-packed-1", (1, 15, 4, 4, 60, 60), "fla", documents=(15,)),
    _case("fla-packed-3", (1, 1000, 4, 8, 64, 64), "fla", documents=(256, 244, 500)),
    _case(
        "fla-packed-5",
        (1, 2000, 4, 4, 100, 100),
        "fla",
        documents=(15, 85, 200, 900, 800),
        undecayed=0.5,
    ),
    _case("32k", (1, 32768, 16, 16, 128, 128), "bench"),
    _case("32k-packed", (1, 32768, 16, 16, 128, 128), "bench", documents=(4096,) * 8, beside="32k"),
    _case("32k-routed", (1, 32768, 16, 16, 128, 128), "bench", write_mask=True, beside="32k"),
    _case("32k-grouped", (1, 32768, 16, 32, 128, 128), "bench"),
    _case("8k", (1, 8192, 16, 16, 128, 128), "bench"),
    _case("natsl-380m", (8, 4096, 6, 6, 128, 256), "bench"),
    _case(
        "natsl-380m-routed",
        (8, 4096, 6, 6, 128, 256),
        "bench",
        write_mask=True,
        beside="natsl-380m",
    ),
    _case("natsl-380m-long-row", (1, 131072, 6, 6, 128, 256), "bench"),
    _case("natsl-380m-row", (1, 32768, 6, 6, 128, 256), "bench"),
    _case(
        "natsl-380m-packed",
        (1, 32768, 6, 6, 128, 256),
        "bench",
        documents=(4096,) * 8,
        beside="natsl-380m-row",
    ),
    _case("natsl-800m", (8, 4096, 6, 6, 192, 384), "bench", beside="natsl-380m"),
    _case("fla-256-256", (8, 4096, 4, 4, 256, 256), "bench"),
    _case("fla-256-512", (8, 4096, 4, 4, 256, 512), "bench"),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
