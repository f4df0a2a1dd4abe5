"""Named shapes with drawn inputs, for the tests and the benchmark alike.

Tags: `ci` is small enough for two CPU cores; `fla` are shapes flash-linear-attention tests its own
kernels with (github.com/fla-org/flash-linear-attention, tests/ops/test_gla.py, test_kda.py and
test_rwkv6.py); `bench` are the sizes of published models; `quick` is the benchmark's choice on a
CPU.
"""

import dataclasses
import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.blocks import cdiv
from pallas_kernels.gated_delta_rule import cases as delta_rule
from pallas_kernels.gated_linear_attention.api import Problem
from pallas_kernels.work import Work


def accepted(dtype: str) -> dict[str, float]:
    """The largest rms(out - ref) / rms(ref) of each output and gradient, by dtype of q, k and v.

    bf16 and fp16: the limits flash-linear-attention accepts of its own KDA kernels.
    """
    limits = delta_rule.accepted(dtype)
    return limits | {"dbonus": limits["dk"]}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One problem: the rule, sizes, and how its gates are drawn."""

    name: str
    rule: Literal["gla", "rwkv6", "kda"]  # no option, bonus, beta
    B: int
    T: int
    Hk: int
    H: int
    K: int
    V: int
    tags: frozenset[str] = frozenset()
    chunk_size: int = 64
    documents: tuple[int, ...] = ()  # lengths of the packed documents of every row; they sum to T
    decay: float | None = None  # every log decay; None draws log sigmoid(normal) / `decay_divisor`
    decay_divisor: float = 1.0
    undecayed: float = 0.0  # fraction of log decays set to 0

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
        return Problem(
            **{name: getattr(self, name) for name in ("B", "T", "Hk", "H", "K", "V")},
            dtype=dtype,
            chunk_size=self.chunk_size,
            write_mask=False,
            segments=bool(self.documents),
            beta=self.rule == "kda",
            bonus=self.rule == "rwkv6",
        )

    def work(self, dtype: str, backward: bool) -> Work:
        """The recurrence's 4 K V operations a token and value head, 6 with an erase; thrice that
        with gradients."""
        arguments, _, outputs = jax.eval_shape(lambda key: self.draw(key, dtype), jax.random.key(0))
        given, produced = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for tree in (arguments, outputs)
        )
        per_token = (6.0 if self.rule == "kda" else 4.0) * self.H * self.K * self.V
        return Work(
            units=self.B * self.H * cdiv(self.T, 128),
            unit="head and 128 tokens",
            flops=(3 if backward else 1) * per_token * self.B * self.T,
            bytes=3 * given + 2 * produced if backward else given + produced,
        )

    def times(self, factor: int) -> "Case":
        """The case with `factor` times as many tokens in every row."""
        return dataclasses.replace(self, T=factor * self.T, documents=factor * self.documents)

    def cut(self, tokens: int) -> "Case":
        """One row of the case's first `tokens` tokens."""
        return dataclasses.replace(self, B=1, T=min(self.T, tokens), documents=())

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def draw(
        self, key: Array, dtype: str
    ) -> tuple[dict[str, Array], dict[str, Array], tuple[Array, Array]]:
        """Differentiable arguments, integer arguments, and cotangents of (o, final_state)."""
        B, T, Hk, H, K, V = self.B, self.T, self.Hk, self.H, self.K, self.V
        shapes = {
            "q": (B, T, Hk, K),
            "k": (B, T, Hk, K),
            "v": (B, T, H, V),
            "g": (B, T, H, K),
            "initial_state": (B, H, K, V),
            "beta": (B, T, H),
            "bonus": (H, K),
            "decays": (B, T, H, K),
            "do": (B, T, H, V),
            "dstate": (B, H, K, V),
        }
        # One draw for all: each compiles for a fifth of a second.
        ends = list(itertools.accumulate(map(math.prod, shapes.values())))
        wide = jnp.promote_types(dtype, jnp.float32)
        pieces = jnp.split(jax.random.normal(key, (ends[-1],), wide), ends[:-1])
        drawn = {n: x.reshape(shapes[n]) for n, x in zip(shapes, pieces, strict=True)}

        if self.rule == "kda":
            drawn["k"] /= jnp.linalg.norm(drawn["k"], axis=-1, keepdims=True)
        g = jax.nn.log_sigmoid(drawn["g"]) / self.decay_divisor
        if self.decay is not None:
            g = jnp.full_like(g, self.decay)
        decays = jax.scipy.stats.norm.cdf(drawn["decays"]) >= self.undecayed
        arguments = {name: drawn[name].astype(dtype) for name in ("q", "k", "v")}
        arguments |= {"g": jnp.where(decays, g, 0), "initial_state": drawn["initial_state"]}
        if self.rule == "kda":
            arguments["beta"] = jax.nn.sigmoid(drawn["beta"])
        if self.rule == "rwkv6":
            arguments["bonus"] = drawn["bonus"]
        fixed = {}
        if self.documents:
            lengths = jnp.asarray(self.documents)
            ids = jnp.repeat(jnp.arange(len(lengths)), lengths, total_repeat_length=T)
            fixed["segment_ids"] = jnp.broadcast_to(ids, (B, T))
        return arguments, fixed, (drawn["do"].astype(dtype), drawn["dstate"])


def _case(name: str, shape: tuple[int, ...], *tags: str, **options) -> tuple[Case, ...]:
    """The case under each rule."""
    rules = options.pop("rules", ("gla", "rwkv6", "kda"))
    tagged = frozenset(tags)
    return tuple(Case(f"{rule}-{name}", rule, *shape, tags=tagged, **options) for rule in rules)


CASES: tuple[Case, ...] = (
    *_case("one-token", (2, 1, 1, 2, 8, 4), "ci", rules=("rwkv6", "kda")),
    *_case("T65", (2, 65, 2, 2, 16, 24), "ci", "quick"),
    *_case("odd-chunks", (1, 75, 1, 2, 8, 16), "ci", chunk_size=7),
    *_case("packed", (2, 150, 1, 2, 16, 8), "ci", documents=(1, 40, 2, 57, 50)),
    *(
        case
        for name, options in {
            "no-decay": {"decay": 0.0, "rules": ("kda",)},
            "fast-decay": {"decay": -5.0, "rules": ("rwkv6",)},
            "extreme-decay": {"decay": -60.0, "rules": ("gla", "rwkv6")},
            "extreme-mixed": {"decay": -60.0, "undecayed": 0.9},
        }.items()
        for case in _case(name, (1, 140, 1, 2, 16, 16), "ci", **options)
    ),
    *_case("T1000", (1, 1000, 2, 2, 32, 32), "ci", rules=("gla",), decay_divisor=16),
    *_case("fla-63", (1, 63, 1, 1, 64, 64), "fla"),
    *_case("fla-60", (2, 1024, 4, 4, 60, 60), "fla"),
    *_case("fla-strong", (2, 1024, 4, 4, 128, 128), "fla", decay_divisor=0.1),
    *_case("fla-slow", (2, 1024, 4, 4, 128, 128), "fla", decay_divisor=10),
    *_case("fla-2048", (2, 2048, 4, 4, 64, 64), "fla"),
    *_case("fla-packed", (1, 1000, 4, 4, 64, 64), "fla", documents=(256, 244, 500)),
    *_case("32k", (1, 32768, 16, 16, 128, 128), "bench"),
    *_case("340m", (8, 4096, 4, 4, 128, 256), "bench", rules=("gla", "rwkv6")),
    *_case("340m", (8, 4096, 8, 8, 128, 128), "bench", rules=("kda",)),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
