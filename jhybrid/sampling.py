"""Which token comes next: the likeliest, or one drawn after temperature, top-k and top-p."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhybrid.errors import UserError
from pallas_kernels.array_types import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int | None = None  # draw among the k likeliest
    top_p: float | None = None  # draw among the likeliest whose probabilities first reach p

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be a number >= 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def limits(self) -> "Limits | None":
        """As arrays, so that other values need no other program; None: no limit."""
        if self.top_k is None and self.top_p is None:
            return None
        top_k = jnp.iinfo(jnp.int32).max if self.top_k is None else self.top_k
        return Limits(jnp.int32(top_k), jnp.float32(1.0 if self.top_p is None else self.top_p))


class Limits(NamedTuple):
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]


def likeliest(logits: Float[Array, "B vocab"]) -> Int[Array, "B"]:
    return jnp.argmax(logits, -1).astype(jnp.int32)


def draw(
    keys: Array,  # [B] random keys
    logits: Float[Array, "B vocab"],
    temperature: Float[Array, ""],
    limits: Limits | None,
) -> Int[Array, "B"]:
    """One token per row from softmax(logits / temperature) within the limits, renormalised.

    Top-k first, then top-p of what is left. Tokens rank by logit, equal ones by id. Token r of the
    ranking survives top-p if the r before it have less than p between them: the first always does.
    """
    scaled = logits / temperature
    if limits is None:
        return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, -1)
    rank = jnp.arange(ranked.shape[-1])
    ranked = jnp.where(rank < limits.top_k, ranked, -jnp.inf)
    p = jax.nn.softmax(ranked)
    before = jnp.cumsum(p, -1) - p
    # rounding may bring the sum to 1 before the end, which must not cut a tail nobody asked to cut
    inside = (before < limits.top_p) | (limits.top_p >= 1) | (rank == 0)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(inside, ranked, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0].astype(jnp.int32)
