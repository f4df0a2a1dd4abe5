"""Decoding over pages: each mode of a head against block_sparse_attention over the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from kernels.attention_calls import attend, inputs

from pallas_kernels import BlockMask, decode_attention
from pallas_kernels.decode_attention import xla

PAGE, B, T, H, G = 8, 2, 44, 4, 2
WHOLE = inputs(B=B, T=T, H=H, G=G)
decoded = jax.jit(decode_attention, static_argnames=("scale", "softcap"))


def paged(kept, seed=0):
    """Pages in random order for kept [B, G, blocks]: (k_pages, v_pages, pages, starts).

    Every (row, head) has its own pages; unused entries are -1 and stand anywhere in the list.
    """
    rng = np.random.default_rng(seed)
    blocks = kept.shape[2]
    pool = rng.permutation(B * G * blocks).reshape(B, G, blocks)
    cache = {}
    for name in "kv":
        x = np.asarray(WHOLE[name])
        x = np.pad(x, ((0, 0), (0, blocks * PAGE - T), (0, 0), (0, 0)), constant_values=np.nan)
        by_page = x.reshape(B, blocks, PAGE, G, -1).transpose(0, 3, 1, 2, 4)
        cache[name] = np.empty((B * G * blocks, PAGE, x.shape[-1]), np.float32)
        cache[name][pool] = by_page
        # what was never written is zero, and so is a page that nobody keeps
        cache[name] = np.nan_to_num(cache[name])
    order = np.argsort(rng.random((B, G, blocks)), axis=2)
    pages = np.take_along_axis(np.where(kept, pool, -1), order, axis=2)
    starts = np.take_along_axis(np.broadcast_to(np.arange(blocks) * PAGE, kept.shape), order, 2)
    return tuple(map(jnp.asarray, (cache["k"], cache["v"], pages, starts)))


def check(kept, mask, positions, **options):
    positions = np.asarray(positions)
    rows = np.arange(B)[:, None]
    q = WHOLE["q"][rows, positions]
    o, lse = decoded(q, *paged(kept), jnp.asarray(positions), **options)
    whole_o, whole_lse = attend("reference", WHOLE, mask=mask, **options)
    assert_close(o, whole_o[rows, positions], 1e-5, "o")
    wanted = np.moveaxis(np.asarray(whole_lse), 1, 2)[rows, positions]
    assert_close(np.moveaxis(np.asarray(lse), 1, 2), wanted, 1e-5, "lse")


BLOCKS = -(-T // PAGE)
LAST = np.array([[43], [43]])


@pytest.mark.covers("decode_attention", "xla", "forward")
@pytest.mark.parametrize("positions", [LAST, [[0], [17]], [[40, 41, 43], [8, 9, 12]]])
def test_a_full_head_sees_all_earlier_tokens(positions):
    check(np.ones((B, G, BLOCKS), bool), BlockMask.causal(), positions)


def test_sinks_and_a_ring_are_a_streaming_mask():
    block = np.arange(BLOCKS)
    kept = (block < 1) | (43 // PAGE - block < 2)
    kept = np.broadcast_to(kept, (B, G, BLOCKS))
    check(kept, BlockMask.streaming(1, 2, PAGE), [[41, 43], [40, 42]])


def test_kept_chunks_and_the_open_one_are_a_chunk_mask():
    selected = np.random.default_rng(1).random((B, G, BLOCKS)) < 0.5
    kept = selected | (np.arange(BLOCKS) == 43 // PAGE)
    check(kept, BlockMask.from_chunks(jnp.asarray(selected), PAGE), LAST)


def test_heads_of_different_modes_share_a_call():
    block = np.arange(BLOCKS)
    streaming = (block < 1) | (43 // PAGE - block < 2)
    kept = np.stack([np.stack([np.ones(BLOCKS, bool), streaming])] * B)
    mask = BlockMask.by_head(
        jnp.array([[True, False]] * B), BlockMask.causal(), BlockMask.streaming(1, 2, PAGE)
    )
    check(kept, mask, LAST, softcap=2.0, scale=0.5)


def test_groups_of_pages_add_up(monkeypatch):
    kept = np.ones((B, G, BLOCKS), bool)
    arguments = WHOLE["q"][:, -1:], *paged(kept), jnp.asarray(LAST)
    whole = decode_attention(*arguments)
    monkeypatch.setattr(xla, "GROUP_TOKENS", 4 * PAGE)  # 6 pages in groups of 4
    for found, wanted, name in zip(decode_attention(*arguments), whole, ("o", "lse"), strict=True):
        assert_close(found, wanted, 1e-6, name)


def test_old_tokens_of_a_page_written_again_are_hidden():
    kept = np.ones((B, G, BLOCKS), bool)
    k, v, pages, starts = paged(kept)
    q, positions = WHOLE["q"][:, 42:43], jnp.full((B, 1), 42)
    before = decode_attention(q, k, v, pages, starts, positions)
    last = np.asarray(pages)[np.asarray(starts) == 40]
    k, v = (x.at[last, 3:].set(1e3) for x in (k, v))  # position 43 and later
    after = decode_attention(q, k, v, pages, starts, positions)
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_head_without_pages_gives_nothing():
    k, v, pages, starts = paged(np.ones((B, G, BLOCKS), bool))
    o, lse = decode_attention(
        WHOLE["q"][:, :1], k, v, pages.at[:, 0].set(-1), starts, jnp.full((B, 1), 43)
    )
    assert not np.any(o[:, :, :2]) and np.all(lse[:, :2] == -np.inf)
    assert np.all(np.isfinite(lse[:, 2:]))


def call(**changes):
    k, v, pages, starts = paged(np.ones((B, G, BLOCKS), bool))
    good = dict(q=WHOLE["q"][:, :1], k_pages=k, v_pages=v, pages=pages, starts=starts)
    return decode_attention(**{**good, "positions": jnp.zeros((B, 1), jnp.int32), **changes})


BAD = {
    "rank": (dict(k_pages=jnp.ones((4, 8))), ValueError, "k_pages must have 3 dimensions"),
    "dtypes": (dict(v_pages=jnp.ones((24, 8, 8), jnp.bfloat16)), TypeError, "v_pages is bfloat16"),
    "page sizes": (dict(v_pages=jnp.ones((24, 4, 8))), ValueError, r"\(24, 8\) .*\(24, 4\)"),
    "widths": (dict(q=jnp.ones((B, 1, H, 6))), ValueError, "head dim 6, k_pages has 8"),
    "lists": (dict(q=jnp.ones((B, 1, 3, 8))), ValueError, "3 query heads .* of 2 lists"),
    "batch": (dict(q=jnp.ones((3, 1, H, 8))), ValueError, "batch 3, pages has batch 2"),
    "starts": (dict(starts=jnp.zeros((B, G, 5), int)), ValueError, r"\(2, 2, 5\), pages has"),
    "positions": (dict(positions=jnp.zeros((B, 2), int)), ValueError, r"\[2, 1\], got \[2, 2\]"),
    "float pages": (dict(pages=jnp.zeros((B, G, 6))), TypeError, "pages must be integer"),
    "no pages": (dict(pages=jnp.zeros((B, G, 0), int)), ValueError, "pages is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_that_names_it(case):
    changes, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    assert "\n" not in str(caught.value)
