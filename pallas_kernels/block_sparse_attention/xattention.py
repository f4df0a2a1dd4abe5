"""XAttention's choice of key blocks (Xu et al., arXiv 2503.16428): antidiagonal scores, kept mass.

It only chooses, for `BlockMask.from_blocks`; no gradient passes through the choice. The scores of
one group of query blocks are all that exists at a time.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.block_sparse_attention.block_mask import document_starts
from pallas_kernels.blocks import cdiv, pad_to_multiple, split_chunks

GROUP_TOKENS, PIECES, MAX_SPANS = 4096, 4, 16


def xattention_select(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    *,
    block_size: int = 128,
    stride: int = 16,
    threshold: float = 0.9,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B H N N"]:
    """The key blocks that carry most of each query block's attention, as `from_blocks` takes them.

    With s = `stride`, the tokens stand in tiles of s, and a pair of tiles has the score

        A_in = scale / s sum_{j < s} q_{i s + s - 1 - j} . k_{n s + j}            n <= i

    the sum along one antidiagonal of the s x s pairs. Its softmax over n, summed over the tiles of
    a query block and of a key block, is the mass of that pair of blocks. A query block keeps its
    own block, the first block of its document, and then the heaviest others, in descending order,
    until what it keeps reaches `threshold` of its mass; of equals the earlier.

    Every query head chooses for itself; k is not repeated. A document is a run of equal segment
    ids >= 0. A packed row keeps what its documents keep alone when they start on block boundaries;
    a tile or block shared by two documents is scored as one. A block of padding keeps nothing.

    Args:
      stride: tokens in a tile; it divides `block_size`.
      threshold: in (0, 1].
      scale: K ** -0.5 by default.

    Raises:
      ValueError, TypeError: for shapes, dtypes and sizes that disagree, naming both.
    """
    _check(q, k, block_size, stride, threshold, segment_ids)
    B, T, H, K = q.shape
    G = k.shape[2]
    N, tiles = cdiv(T, block_size), block_size // stride
    # padding tokens, of the row or of its last block, score as zeros
    none_is_padding = segment_ids is None and T % block_size == 0
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)
    real = pad_to_multiple(segment_ids >= 0, block_size, axis=1)
    start = pad_to_multiple(document_starts(segment_ids), block_size, axis=1)
    q, k = (pad_to_multiple(lax.stop_gradient(x), block_size, axis=1) for x in (q, k))
    first_tile, first_block = (_first_start(real, start, size) for size in (stride, block_size))
    factor = (K**-0.5 if scale is None else scale) / stride

    def tiles_of(x, begin, end, blocks, backwards):  # [n, B, G, H / G or 1, blocks * tiles, sK]
        """The tiles of blocks begin .. end - 1 in rows, as products take them, so many blocks at a
        time: laid out once, straight from where they stand."""
        tokens = slice(begin * block_size, end * block_size)
        x = x[:, tokens]
        if not none_is_padding:
            x = jnp.where(real[:, tokens, None, None], x, 0)
        x = x.reshape(B, -1, blocks * tiles, stride, G, x.shape[2] // G, K)
        x = x[:, :, :, ::-1] if backwards else x  # the antidiagonal
        return x.transpose(1, 0, 4, 5, 2, 3, 6).reshape(
            -1, B, G, *x.shape[5:6], blocks * tiles, stride * K
        )

    spans = _spans(N, block_size)
    pieces = _pieces(spans)
    keys = [tiles_of(k, begin, end, end - begin, True)[0, :, :, 0] for begin, end in pieces]
    masses = []
    for begin, end, group in spans:
        used = [n for n, (first, _) in enumerate(pieces) if first < end]
        width = pieces[used[-1]][1]

        def mass_of(given, used=used, width=width, group=group):
            """Query blocks [i, i + group), as rows, against the first `width` key blocks."""
            i, rows = given
            tile = i * tiles + jnp.arange(group * tiles)
            first = lax.dynamic_slice_in_dim(first_tile, i * tiles, group * tiles, axis=1)
            found = [
                _weights(rows, keys[n], tile, first, pieces[n][0] * tiles, tiles, factor)
                for n in used
            ]
            largest = functools.reduce(jnp.maximum, [peak for _, peak in found])
            weights = [x * jnp.exp(peak - largest)[..., None] for x, peak in found]
            weight = jnp.concatenate(weights, axis=-1)  # [B, H, tiles, width]
            total = weight.sum(-1, keepdims=True)
            mass = weight / jnp.where(total == 0, 1, total)
            return mass.reshape(B, H, group, tiles, width).sum(3)

        rows = tiles_of(q, begin, end, group, False)
        if masses:  # or products of spans are merged, and the scores of all exist at once
            rows, _ = lax.optimization_barrier((rows, masses[-1]))
        mass = lax.map(mass_of, (jnp.arange(begin, end, group), rows))  # [n, B, H, group, width]
        mass = mass.transpose(1, 2, 0, 3, 4).reshape(B, H, end - begin, width)
        masses.append(jnp.pad(mass, ((0, 0), (0, 0), (0, 0), (0, N - width))))
    return _heaviest(jnp.concatenate(masses, axis=2), first_block, threshold)


def _first_start(
    real: Bool[Array, "B T"], start: Int[Array, "B T"], size: int
) -> Int[Array, "B N"]:
    """For each piece of `size` tokens: the piece in which its first real token's document starts.

    One after the last piece where the piece holds padding only.
    """
    pieces = real.shape[1] // size
    start = jnp.where(real, start // size, pieces)
    return split_chunks(start, size).min(2)  # later documents of a piece start later


def _weights(
    queries: Float[Array, "B G r i sK"],
    keys: Float[Array, "B G n sK"],
    tile: Int[Array, "i"],
    first: Int[Array, "B i"],
    begin: int,
    tiles: int,
    scale: float,
) -> tuple[Float[Array, "B H i N"], Float[Array, "B H i"]]:
    """exp(score - peak) of each query tile summed over the `tiles` of each key block, and peak.

    Of the key tiles begin, begin + 1, ... those count that lie between `first` and `tile`; peak is
    the largest score among them, -1e30 where there is none.
    """
    exact = jnp.promote_types(queries.dtype, jnp.float32)
    scores = scale * jnp.einsum(
        "bgrik,bgnk->bgrin",
        queries,
        keys,
        precision=lax.Precision.HIGHEST if queries.dtype == exact else None,
        preferred_element_type=exact,
    )
    B, G, r, i, n = scores.shape
    key = begin + jnp.arange(n)
    seen = ((key <= tile[:, None]) & (key >= first[..., None]))[:, None]  # [B, 1, i, n]
    scores = scores.reshape(B, G * r, i, n)
    peak = jnp.max(scores, axis=-1, where=seen, initial=-1e30)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0)
    return split_chunks(weights, tiles, axis=3).sum(4), peak


def _heaviest(
    mass: Float[Array, "B H N N"], first: Int[Array, "B N"], threshold: float
) -> Bool[Array, "B H N N"]:
    """The forced blocks and the shortest prefix of the others that reaches the threshold."""
    key = jnp.arange(mass.shape[-1])
    own, first = key[:, None], first[..., None]
    allowed = ((key <= own) & (key >= first))[:, None]
    forced = allowed & ((key == own) | (key == first))[:, None]
    others = jnp.where(allowed & ~forced, mass, 0)
    descending = jnp.sort(others, axis=-1, descending=True)
    before = jnp.cumsum(descending, axis=-1) - descending
    reached = jnp.where(forced, mass, 0).sum(-1, keepdims=True) + before
    count = (reached < threshold * mass.sum(-1, keepdims=True)).sum(-1, keepdims=True)
    least = jnp.take_along_axis(descending, jnp.maximum(count - 1, 0), axis=-1)
    larger = (others > least).sum(-1, keepdims=True)
    equal = others == least  # of these the earliest, as many as are left to keep
    kept = (others > least) | (equal & (jnp.cumsum(equal, axis=-1) <= count - larger))
    return allowed & (forced | (kept & (count > 0)))


def _spans(N: int, block_size: int) -> list[tuple[int, int, int]]:
    """Cuts N query blocks into (begin, end, blocks at a time), what is no whole group last.

    There are as many as key pieces, in long rows more: what repeats nothing is laid out in place.
    """
    group = max(1, min(GROUP_TOKENS // block_size, N // (2 * PIECES)))
    groups, rest = divmod(N, group)
    most = max(PIECES, min(MAX_SPANS, N * block_size // GROUP_TOKENS))
    length = max(1, cdiv(groups, most)) * group
    spans = [(i, min(i + length, groups * group), group) for i in range(0, groups * group, length)]
    return spans + [(N - rest, N, rest)] * (rest > 0)


def _pieces(spans: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(begin, end) of the key blocks that are multiplied together."""
    together = cdiv(len(spans), PIECES)
    parts = [spans[n : n + together] for n in range(0, len(spans), together)]
    return [(part[0][0], part[-1][1]) for part in parts]


def _check(
    q: Array, k: Array, block_size: int, stride: int, threshold: float, segment_ids: Array | None
) -> None:
    for name, array in (("q", q), ("k", k)):
        if array.ndim != 4:
            raise ValueError(f"{name} must be [batch, time, heads, dim], got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {array.dtype}")
        if 0 in array.shape:
            raise ValueError(f"{name} is empty: {array.shape}")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} but k is {k.dtype}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k has batch {k.shape[0]}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens, k has {k.shape[1]}: whole rows are scored")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}")
    if stride < 1 or block_size < 1 or block_size % stride:
        raise ValueError(f"stride={stride} must divide block_size={block_size}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold} must be in (0, 1]")
    if segment_ids is None:
        return
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integer, got {segment_ids.dtype}")
    if segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be {list(q.shape[:2])}, got {list(segment_ids.shape)}")
