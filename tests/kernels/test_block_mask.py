"""BlockMask: its algebra on drawn selections, its pytree, and the errors of bad input."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given
from hypothesis.extra.numpy import arrays
from kernels.attention_calls import inputs

from pallas_kernels import BlockMask, block_sparse_attention

# One shape for all properties, so that each compiles once: T = S = 20 in blocks of 4.
ARGUMENTS = inputs(B=1, T=20, H=4, G=2)
N, BLOCK = 5, 4
selections = arrays(bool, (1, 4, N))
block_selections = arrays(bool, (1, 4, N, N))
routes = arrays(bool, (1, 2))
block_routes = arrays(bool, (1, 2, N))
offsets = st.integers(-25, 25)


@functools.cache
def compiled(implementation="xla"):
    return jax.jit(
        lambda mask, offset, arguments: block_sparse_attention(
            **arguments, mask=mask, q_offset=offset, implementation=implementation
        )
    )


def attend(mask, offset=0, arguments=ARGUMENTS):
    o, lse = compiled()(mask, jnp.asarray(offset, jnp.int32), arguments)
    return np.asarray(o), np.asarray(lse)


def assert_equal_masks(first, second, offset=0):
    for actual, expected, name in zip(
        attend(first, offset), attend(second, offset), ("o", "lse"), strict=True
    ):
        assert_close(actual, expected, 1e-6, name)


def chunks(selected):
    return BlockMask.from_chunks(jnp.asarray(selected), BLOCK)


def blocks(keep):
    return BlockMask.from_blocks(jnp.asarray(keep), BLOCK)


@given(selections)
def test_selected_chunks_are_blocks_with_the_diagonal(selected):
    keep = np.broadcast_to(selected[:, :, None], (1, 4, N, N)) | np.eye(N, dtype=bool)
    assert_equal_masks(chunks(selected), blocks(keep))


@given(block_selections)
def test_blocks_after_the_query_do_not_matter(keep):
    assert_equal_masks(blocks(keep), blocks(keep | ~np.tri(N, dtype=bool)))


@given(block_selections, routes)
def test_swapping_the_route_swaps_the_masks(keep, route):
    a, b = blocks(keep), BlockMask.streaming(1, 1, BLOCK)
    route = jnp.asarray(route)
    assert_equal_masks(BlockMask.by_head(route, a, b), BlockMask.by_head(~route, b, a))


@given(selections, block_selections, block_routes)
def test_each_head_and_query_block_gets_the_mask_of_its_route(selected, keep, route):
    a, b = chunks(selected), blocks(keep)
    o, lse = attend(BlockMask.by_head(jnp.asarray(route), a, b))
    by_token = np.repeat(np.repeat(route, 2, axis=1), BLOCK, axis=2)  # [1, H, T]
    (o_a, lse_a), (o_b, lse_b) = attend(a), attend(b)
    assert_close(lse, np.where(by_token, lse_a, lse_b), 1e-6, "lse")
    choice = by_token.swapaxes(1, 2)[..., None]
    assert_close(o, np.where(choice, o_a, o_b), 1e-6, "o")


@given(routes, routes, block_selections)
def test_choices_nest(outer, inner, keep):
    outer, inner = jnp.asarray(outer), jnp.asarray(inner)
    a, b = blocks(keep), BlockMask.causal()
    nested = BlockMask.by_head(outer, BlockMask.by_head(inner, a, b), b)
    assert_equal_masks(nested, BlockMask.by_head(outer & inner, a, b))


@given(block_selections, offsets)
def test_the_implementations_agree_at_any_offset(keep, offset):
    mask = BlockMask.by_head(
        jnp.asarray([[True, False]]), blocks(keep), BlockMask.streaming(1, 2, BLOCK)
    )
    expected = compiled("reference")(mask, jnp.asarray(offset, jnp.int32), ARGUMENTS)
    for actual, wanted, name in zip(attend(mask, offset), expected, ("o", "lse"), strict=True):
        assert_close(actual, wanted, 1e-5, name)


@given(block_selections, block_selections)
def test_parts_merge_in_any_order_to_the_union(first, second):
    """logaddexp over disjoint sets of keys is associative, also where a part sees nothing."""
    parts = [blocks(x) for x in (first & ~second, second & ~first, first & second)]

    def merge(a, b):
        lse = np.logaddexp(a[1], b[1])
        weights = [np.exp(x - np.where(np.isfinite(lse), lse, 0)) for _, x in (a, b)]
        weighted = (
            w.swapaxes(1, 2)[..., None] * o for w, (o, _) in zip(weights, (a, b), strict=True)
        )
        return sum(weighted), lse

    a, b, c = (attend(part) for part in parts)
    union = attend(blocks(first | second))
    for merged in (merge(merge(a, b), c), merge(a, merge(b, c))):
        assert_close(merged[0], union[0], 1e-5, "o")
        assert_close(merged[1], union[1], 1e-5, "lse")


@given(selections, st.integers(0, 19))
def test_a_later_key_never_changes_an_earlier_query(selected, token):
    mask = BlockMask.by_head(
        jnp.asarray([[True, False]]), chunks(selected), BlockMask.streaming(1, 1, BLOCK)
    )
    changed = ARGUMENTS | {name: ARGUMENTS[name].at[:, token].add(1.0) for name in "kv"}
    before, after = attend(mask)[0], attend(mask, arguments=changed)[0]
    assert np.array_equal(before[:, :token], after[:, :token])
    assert not np.array_equal(before[:, token], after[:, token])


def test_a_mask_is_a_pytree_of_its_selections():
    keep, route = jnp.ones((1, 4, N, N), bool), jnp.ones((1, 2), bool)
    mask = BlockMask.by_head(route, BlockMask.causal(), BlockMask.from_blocks(keep, BLOCK))
    assert [leaf.shape for leaf in jax.tree.leaves(mask)] == [(1, 2), (1, 4, N, N)]
    shapes = jax.eval_shape(lambda mask: mask, mask)
    assert isinstance(shapes, BlockMask)
    other = BlockMask.by_head(~route, BlockMask.causal(), BlockMask.from_blocks(~keep, BLOCK))
    assert jax.tree.structure(mask) == jax.tree.structure(other)
    wider = BlockMask.by_head(route, BlockMask.causal(), BlockMask.from_blocks(keep, 8))
    assert jax.tree.structure(mask) != jax.tree.structure(wider)


def ones(*shape):
    return jnp.ones(shape, bool)


def call(mask=None, implementation="xla", **changes):
    arguments = {**ARGUMENTS, **changes}
    mask = BlockMask.causal() if mask is None else mask
    return block_sparse_attention(**arguments, mask=mask, implementation=implementation)


BAD = {
    "heads": (
        lambda: call(q=jnp.ones((1, 20, 5, 8))),
        ValueError,
        "5 query heads are not a multiple of 2 key heads",
    ),
    "head dims": (lambda: call(k=jnp.ones((1, 20, 2, 6))), ValueError, "head dim 8, k has 6"),
    "lengths": (lambda: call(v=jnp.ones((1, 19, 2, 8))), ValueError, "20 tokens, v has 19"),
    "batch": (lambda: call(k=jnp.ones((3, 20, 2, 8))), ValueError, "batch 1, k has batch 3"),
    "rank": (lambda: call(q=jnp.ones((20, 4, 8))), ValueError, r"q must be .*\(20, 4, 8\)"),
    "dtypes": (
        lambda: call(k=ARGUMENTS["k"].astype(jnp.bfloat16)),
        TypeError,
        "q is float32 but k is bfloat16",
    ),
    "integers": (lambda: call(q=jnp.ones((1, 20, 4, 8), int)), TypeError, "q must be floating"),
    "not a mask": (lambda: call(mask=ones(1, 4, 5, 5)), TypeError, "mask must be a BlockMask"),
    "key blocks": (
        lambda: call(BlockMask.from_blocks(ones(1, 4, 5, 6), 4)),
        ValueError,
        "6 key blocks, but 20 tokens in blocks of 4 are 5",
    ),
    "query blocks": (
        lambda: call(BlockMask.from_blocks(ones(1, 4, 2, 5), 4)),
        ValueError,
        "2 query blocks, but 20 tokens in blocks of 4 are 5",
    ),
    "chunks": (
        lambda: call(BlockMask.from_chunks(ones(1, 4, 4), 4)),
        ValueError,
        "4 key blocks, but 20 tokens in blocks of 4 are 5",
    ),
    "rows": (
        lambda: call(BlockMask.from_chunks(ones(1, 3, 5), 4)),
        ValueError,
        "3 rows, which do not divide 4 query heads",
    ),
    "mask batch": (
        lambda: call(BlockMask.from_chunks(ones(2, 4, 5), 4)),
        ValueError,
        "selected has batch 2, q has batch 1",
    ),
    "route heads": (
        lambda: call(BlockMask.by_head(ones(1, 4), BlockMask.causal(), BlockMask.causal())),
        ValueError,
        "route has 4 heads, k has 2",
    ),
    "route blocks": (
        lambda: call(
            BlockMask.by_head(ones(1, 2, 3), BlockMask.causal(), BlockMask.streaming(1, 1, 4))
        ),
        ValueError,
        "route has 3 query blocks, but 20 tokens in blocks of 4 are 5",
    ),
    "route over two block sizes": (
        lambda: BlockMask.by_head(
            ones(1, 2, 5), BlockMask.streaming(1, 1, 4), BlockMask.from_chunks(ones(1, 4, 3), 8)
        ),
        ValueError,
        "4 and 8",
    ),
    "inside a choice": (
        lambda: call(
            BlockMask.by_head(
                ones(1, 2), BlockMask.causal(), BlockMask.from_chunks(ones(1, 4, 9), 4)
            )
        ),
        ValueError,
        "9 key blocks",
    ),
    "bias without chunks": (
        lambda: call(block_bias=jnp.zeros((1, 4, 5))),
        ValueError,
        "block_bias needs a from_chunks mask",
    ),
    "bias shape": (
        lambda: call(BlockMask.from_chunks(ones(1, 4, 5), 4), block_bias=jnp.zeros((1, 2, 5))),
        ValueError,
        r"\(1, 2, 5\), selected has \(1, 4, 5\)",
    ),
    "bias dtype": (
        lambda: call(BlockMask.from_chunks(ones(1, 4, 5), 4), block_bias=ones(1, 4, 5)),
        TypeError,
        "block_bias must be floating, got bool",
    ),
    "offset shape": (
        lambda: call(q_offset=jnp.zeros(3, jnp.int32)),
        ValueError,
        r"a scalar or \[1\], got \[3\]",
    ),
    "offset dtype": (lambda: call(q_offset=jnp.zeros(())), TypeError, "q_offset must be integer"),
    "window": (lambda: call(window=0), ValueError, "window=0 must be >= 1"),
    "softcap": (lambda: call(softcap=0.0), ValueError, "softcap=0.0 must be > 0"),
    "traced scale": (lambda: call(scale=jnp.ones(())), TypeError, "scale must be a Python number"),
    "segment shape": (
        lambda: call(segment_ids=jnp.zeros((1, 19), jnp.int32)),
        ValueError,
        r"segment_ids must be \[1, 20\], got \[1, 19\]",
    ),
    "segments of queries only": (
        lambda: call(
            k=jnp.ones((1, 24, 2, 8)),
            v=jnp.ones((1, 24, 2, 8)),
            segment_ids=jnp.zeros((1, 20), jnp.int32),
        ),
        ValueError,
        "20 queries and 24 keys need kv_segment_ids",
    ),
    "segments of keys only": (
        lambda: call(kv_segment_ids=jnp.zeros((1, 20), jnp.int32)),
        ValueError,
        "kv_segment_ids needs segment_ids",
    ),
    "selection dtype": (
        lambda: BlockMask.from_chunks(jnp.ones((1, 4, 5)), 4),
        TypeError,
        "selected must be bool, got float32",
    ),
    "selection rank": (
        lambda: BlockMask.from_blocks(ones(1, 4, 5), 4),
        ValueError,
        "keep must have 4 dimensions, got 3",
    ),
    "block size": (lambda: BlockMask.streaming(1, 1, 0), ValueError, "block_size=0"),
    "local blocks": (lambda: BlockMask.streaming(1, 0), ValueError, "local_blocks=0"),
    "unknown implementation": (
        lambda: call(implementation="triton"),
        ValueError,
        "implementation='triton'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_that_names_it(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
