"""What the implementations share: options, list lengths, and queries as the lists see them."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Int

NOWHERE = 2**30  # position of a token that no query sees


class Logits(NamedTuple):
    """softcap tanh(scale q . k / softcap), or scale q . k."""

    scale: float
    softcap: float | None


def visible(
    pages: Int[Array, "B G n"], starts: Int[Array, "B G n"], positions: Int[Array, "B t"], C: int
) -> Bool[Array, "B G t n C"]:
    """Which tokens of the listed pages each query sees."""
    position = starts[..., None] + jnp.arange(C)  # [B, G, n, C]
    before = position[:, :, None] <= positions[:, None, :, None, None]
    return before & (pages >= 0)[:, :, None, :, None]


class Lists(NamedTuple):
    """The L = B G lists as the kernels read them."""

    pages: Int[Array, "L N"]  # 0 where there is none
    starts: Int[Array, "L N"]  # NOWHERE where there is none
    lengths: Int[Array, "L"]  # entries up to the last page that some query of the row sees
    lowest: Int[Array, "B"]  # the first position of a row's queries
    positions: Int[Array, "B r"]  # of a list's queries; -1 for padding

    @classmethod
    def of(
        cls,
        pages: Int[Array, "B G N"],
        starts: Int[Array, "B G N"],
        positions: Int[Array, "B t"],
        *,
        group: int,
        entries: int,
        rows: int,
    ) -> "Lists":
        """Lists of whole multiples of `entries`, for whole multiples of `rows` queries, `group`
        query heads to a list."""
        B, G, N = pages.shape
        there = pages >= 0
        seen = there & (starts <= positions.max(1)[:, None, None])
        length = jnp.where(seen, jnp.arange(1, N + 1), 0).max(2)
        of_queries = jnp.repeat(positions, group, axis=1)
        rest = ((0, 0), (0, -N % entries))
        return cls(
            jnp.pad(jnp.where(there, pages, 0).reshape(B * G, N), rest),
            jnp.pad(
                jnp.where(there, starts, NOWHERE).reshape(B * G, N), rest, constant_values=NOWHERE
            ),
            length.reshape(B * G),
            positions.min(1),
            jnp.pad(of_queries, ((0, 0), (0, -of_queries.shape[1] % rows)), constant_values=-1),
        )


def by_list(q: Float[Array, "B t H K"], G: int) -> Float[Array, "L r K"]:
    """Queries of each list, L = B G lists of r = t H / G queries."""
    B, t, H, K = q.shape
    return q.reshape(B, t, G, H // G, K).swapaxes(1, 2).reshape(B * G, t * H // G, K)


def by_head(
    o: Float[Array, "L r V"], lse: Float[Array, "L r"], B: int, t: int
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """The inverse of `by_list` for results: o [B, t, H, V] and lse [B, H, t]."""
    G, group, V = o.shape[0] // B, o.shape[1] // t, o.shape[2]
    o = o.reshape(B, G, t, group, V).swapaxes(1, 2).reshape(B, t, G * group, V)
    return o, lse.reshape(B, G, t, group).swapaxes(2, 3).reshape(B, G * group, t)


def merge(
    o: Float[Array, "n *rows V"], lse: Float[Array, "n *rows"]
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Attention over all of n disjoint sets of keys from that over each; -inf is an empty set's."""
    largest = lse.max(0)
    base = jnp.where(largest == -jnp.inf, 0, largest)
    share = jnp.exp(lse - base)
    weight = share.sum(0)
    some = weight > 0
    weight = jnp.where(some, weight, 1)
    o = (share[..., None] * o).sum(0) / weight[..., None]
    return o, jnp.where(some, base + jnp.log(weight), -jnp.inf)
