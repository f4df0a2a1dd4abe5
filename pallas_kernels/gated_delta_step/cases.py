"""Named shapes with drawn inputs, for the tests and the benchmark alike; tags as elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.checks import Problem
from pallas_kernels.work import Work

# bf16: o is rounded, the state's arithmetic is fp32.
_OUTPUTS = ("o", "state")
_GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dstate")
_ACCEPTED = {"bfloat16": 5e-3, "float32": 1e-5, "float64": 1e-10}


def accepted(dtype: str) -> dict[str, float]:
    """The largest rms(out - ref) / rms(ref) of each output and gradient, by dtype of q, k and v."""
    return dict.fromkeys((*_OUTPUTS, *_GRADIENTS), _ACCEPTED[dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """B rows, each one token further."""

    name: str
    B: int
    Hk: int
    H: int
    K: int
    V: int
    tags: frozenset[str] = frozenset()

    carried = "state"  # the argument that the last output replaces at the next step

    @property
    def shape(self) -> str:
        return "x".join(str(getattr(self, size)) for size in ("B", "Hk", "H", "K", "V"))

    @property
    def options(self) -> dict:
        return {}

    @property
    def outputs(self) -> tuple[str, ...]:
        return _OUTPUTS

    def problem(self, dtype: str) -> Problem:
        sizes = {name: getattr(self, name) for name in ("B", "Hk", "H", "K", "V")}
        options = {"chunk_size": 1, "write_mask": False, "segments": False}
        return Problem(**sizes, T=1, dtype=dtype, **options)

    def work(self, dtype: str, backward: bool) -> Work:
        """The state once in and once out; 8 operations a number of it. No backward pass counts."""
        arguments, _, outputs = jax.eval_shape(lambda key: self.draw(key, dtype), jax.random.key(0))
        moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments, outputs)))
        size = self.B * self.H * self.K * self.V
        return Work(units=self.B * self.H, unit="head", flops=8.0 * size, bytes=moved)

    def cut(self, tokens: int) -> "Case":
        """The case: it has one token."""
        del tokens
        return self

    def times(self, factor: int) -> "Case":
        """The case with `factor` times as many rows."""
        return dataclasses.replace(self, B=factor * self.B)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def draw(
        self, key: Array, dtype: str
    ) -> tuple[dict[str, Array], dict[str, Array], tuple[Array, Array]]:
        """Differentiable arguments, integer arguments (none), and cotangents of (o, state)."""
        B, Hk, H, K, V = self.B, self.Hk, self.H, self.K, self.V
        exact = jnp.promote_types(dtype, jnp.float32)
        keys = iter(jax.random.split(key, 8))

        def normal(*shape):
            return jax.random.normal(next(keys), shape, exact)

        def unit(x):
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        arguments = {
            "q": unit(normal(B, Hk, K)).astype(dtype),
            "k": unit(normal(B, Hk, K)).astype(dtype),
            "v": normal(B, H, V).astype(dtype),
            "g": jax.nn.log_sigmoid(normal(B, H)),
            "beta": 2 * jax.nn.sigmoid(normal(B, H)),
            "state": normal(B, H, K, V),
        }
        return arguments, {}, (normal(B, H, V).astype(dtype), normal(B, H, K, V))


def _case(name: str, shape: tuple[int, ...], *tags: str) -> Case:
    return Case(name, *shape, tags=frozenset(tags))


CASES: tuple[Case, ...] = (
    _case("small", (1, 1, 1, 64, 64), "ci", "quick"),
    _case("grouped", (2, 2, 6, 64, 128), "ci"),
    _case("wide", (1, 1, 1, 192, 384), "ci"),
    _case("1", (1, 16, 32, 128, 128), "bench"),
    _case("64", (64, 16, 32, 128, 128), "bench"),
    _case("256", (256, 16, 32, 128, 128), "bench"),
    _case("natsl-380m-1", (1, 6, 6, 128, 256), "bench"),
    _case("natsl-380m-64", (64, 6, 6, 128, 256), "bench"),
    *(
        _case(f"{name}-{rows}", (rows, *sizes), "bench")
        for name, sizes in {
            "natsl-800m": (6, 6, 192, 384),
            "gdn-340m": (4, 4, 256, 256),
            "fla-256-512": (4, 4, 256, 512),
        }.items()
        for rows in (1, 64, 256)
    ),
)
BY_NAME = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with `tag`, in the order of the table."""
    return tuple(case for case in CASES if tag in case.tags)
