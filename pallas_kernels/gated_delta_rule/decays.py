"""How much of one token's write is left at another, within a chunk and across its two ends."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Int

_FRACTION = 256.0  # log decays are summed in steps of 1 / 256, and the rest apart


class Decays(NamedTuple):
    """Decay factors of a chunk in [0, 1]; zero across a document boundary. G = [N, B, Hk, R]."""

    pair: Float[Array, "*G C C"]  # from token j to token i >= j; zero for j > i
    into: Float[Array, "*G C"]  # from the state entering the chunk to token i
    out: Float[Array, "*G C"]  # from token j to the state leaving the chunk
    through: Float[Array, "*G"]  # from the state entering the chunk to the state leaving it


def reset_counts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How often the segment id has changed up to and including each token."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)


class Visible(NamedTuple):
    """What no document boundary hides within a chunk and across its ends, as members of Decays.

    Leading axes are [N, B], of size 1 without documents.
    """

    pair: Bool[Array, "N B C C"]
    into: Bool[Array, "N B C"]
    out: Bool[Array, "N B C"]
    through: Bool[Array, "N B"]


def visible(resets: tuple[Int[Array, "N B"], Int[Array, "N B C"]] | None, tile: int) -> Visible:
    """`resets` count document boundaries: before the chunk, and up to each of its tokens."""
    if resets is None:
        resets = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, tile), jnp.int32)
    before, count = resets
    last = count[..., -1:]
    return Visible(
        pair=count[..., :, None] == count[..., None, :],
        into=count == before[..., None],
        out=count == last,
        through=last[..., 0] == before,
    )


def coarse_and_fine_sums(
    g: Float[Array, "*batch"], axis: int
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Cumulative sums of g as coarse + fine, whose differences stay accurate after a strong decay.

    `coarse` is a multiple of 1 / 256, exact in fp32 up to 65536, `fine` a small remainder.
    """
    coarse = jnp.round(g * _FRACTION) / _FRACTION
    return jnp.cumsum(coarse, axis), jnp.cumsum(g - coarse, axis)


@jax.custom_vjp
def chunk_decays(
    g: Float[Array, "*G C"],
    resets: tuple[Int[Array, "N B"], Int[Array, "N B C"]] | None,
) -> Decays:
    """The decay factors of every chunk from its log decays g; `resets` as for `visible`.

    Only differences of cumulative sums are exponentiated, so no factor exceeds 1, and they stay
    accurate when one strong decay (g = -60) makes the sums large beside differences that matter
    (1e-3).
    """
    coarse, fine = coarse_and_fine_sums(g, -1)
    seen = Visible(*(x[:, :, None, None] for x in visible(resets, g.shape[-1])))

    def factor(until, since, visible):
        log_decay = (coarse[until] - coarse[since]) + (fine[until] - fine[since])
        return jnp.where(visible, jnp.exp(jnp.where(visible, log_decay, 0)), 0)

    row, column = (..., slice(None), None), (..., None, slice(None))
    whole = coarse + fine
    return Decays(
        pair=factor(row, column, jnp.tri(g.shape[-1], dtype=bool) & seen.pair),
        into=jnp.where(seen.into, jnp.exp(whole), 0),
        out=factor((..., slice(-1, None)), (...,), seen.out),
        through=jnp.where(seen.through, jnp.exp(whole[..., -1]), 0),
    )


def log_decay_gradient(
    pair: Float[Array, "*G C C"],
    into: Float[Array, "*G C"],
    out: Float[Array, "*G C"],
    through: Float[Array, "*G"],
) -> Float[Array, "*G C"]:
    """The gradient of g from (factor times gradient of factor) of each member of `Decays`.

    g_l is in every pair with i >= l > j, in `into` of tokens i >= l, in `out` of tokens j < l, and
    in `through`.
    """
    crossing = jnp.tril(pair, -1)
    return accumulate(crossing.sum(-1) - crossing.sum(-2) + into, out, through[..., None])


def accumulate(
    balance: Float[Array, "*G C"], out: Float[Array, "*G C"], through: Float[Array, "*G #C"]
) -> Float[Array, "*G C"]:
    """The gradient of g, which is in `balance` of later tokens and its own, in `out` of earlier
    ones and in `through`."""
    after = jnp.flip(jnp.cumsum(jnp.flip(balance, -1), -1), -1)
    # Shifted, not `cumsum - out`: the last token's `out` is 1 and would swamp small gradients.
    earlier = jnp.pad(out[..., :-1], [(0, 0)] * (out.ndim - 1) + [(1, 0)])
    return after + jnp.cumsum(earlier, -1) + through


def _decays_forward(g, resets):
    decays = chunk_decays(g, resets)
    return decays, decays


def _decays_backward(decays: Decays, cotangents: Decays):
    return log_decay_gradient(*jax.tree.map(jnp.multiply, decays, cotangents)), None


chunk_decays.defvjp(_decays_forward, _decays_backward)


def write_weights(
    write_mask: Float[Array, "*G U"], unit: int, tile: int
) -> tuple[Float[Array, "*G C C"], Float[Array, "*G C"]]:
    """Weights of chunks of `unit` tokens as factors of `Decays.pair` and `out` of a tile.

    A chunk's writes have its weight in what later chunks see, and weight 1 inside the chunk.
    """
    by_token = jnp.repeat(write_mask, unit, axis=-1)
    chunk = jnp.arange(tile) // unit
    crossing = chunk[:, None] != chunk[None, :]
    return jnp.where(crossing, by_token[..., None, :], 1), by_token


def weighted(decays: Decays, write_mask: Float[Array, "*G U"] | None, unit: int) -> Decays:
    """`decays` with what each chunk writes weighted by `write_mask`."""
    if write_mask is None:
        return decays
    pair, out = write_weights(write_mask, unit, decays.out.shape[-1])
    return decays._replace(pair=decays.pair * pair, out=decays.out * out)
