"""What a stretch of a row does to the state: an affine map, for rows cut over devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.checks import zeros
from pallas_kernels.gated_delta_rule.api import gated_delta_rule


class StretchMap(NamedTuple):
    """S -> transition S + increment, of the tokens of a stretch; in fp32 or wider."""

    transition: Float[Array, "B H K K"]
    increment: Float[Array, "B H K V"]

    def __call__(self, state: Float[Array, "B H K V"]) -> Float[Array, "B H K V"]:
        """The state after the stretch."""
        return _product(self.transition, state) + self.increment

    def then(self, later: "StretchMap") -> "StretchMap":
        """The map of this stretch and the one that follows it."""
        return StretchMap(_product(later.transition, self.transition), later(self.increment))


def _product(x: Array, y: Array) -> Array:
    return jnp.einsum("bhkw,bhwv->bhkv", x, y, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule_map(
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    write_mask: Float[Array, "B N H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation = "auto",
) -> StretchMap:
    """The map for which `gated_delta_rule(..., initial_state=S)[1]` is transition S + increment.

        transition = prod_t exp(g_t) (I - beta_t k_t k_t^T)     the latest token leftmost
        increment  = the final state that starts from zeros

    written here without mask and documents, which it knows too: a reset inside makes transition 0.
    A reset between two stretches is the caller's to make: the first document of a stretch is taken
    to be the one that enters it. All but the last stretch of a row end with a whole chunk where
    there is a `write_mask`. Differentiable in every floating argument; arguments are the rule's.

    It is the rule itself, of values [V, 0] from the state [0, I], whose final state is [increment,
    transition]: kernels run where they take values of width V + K. Its outputs are thrown away.
    """
    (B, H, V), K = (v.shape[0], *v.shape[2:]), k.shape[-1]
    state = zeros((B, H, K, V + K), jnp.promote_types(k.dtype, jnp.float32), like=(k, v, g, beta))
    _, final = gated_delta_rule(
        k,
        k,
        jnp.pad(v, ((0, 0),) * 3 + ((0, K),)),
        g,
        beta,
        initial_state=state + jnp.eye(K, V + K, V, dtype=state.dtype),
        write_mask=write_mask,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        precision=precision,
        implementation=implementation,
    )
    return StretchMap(final[..., V:], final[..., :V])
