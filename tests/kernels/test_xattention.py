"""XAttention's choice of blocks against its formulas in float64 NumPy; packing; bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_calls import cotangents_for, inputs, outputs_and_gradients, pack

from pallas_kernels import BlockMask, block_sparse_attention, xattention_select


def select(arguments, **options):
    compiled = functools.partial(xattention_select, **options)
    return np.asarray(jax.jit(compiled)(arguments["q"], arguments["k"]))


def select_packed(arguments, ids, **options):
    compiled = functools.partial(xattention_select, **options)
    found = jax.jit(lambda q, k, ids: compiled(q, k, segment_ids=ids))(
        arguments["q"], arguments["k"], jnp.asarray(ids)
    )
    return np.asarray(found)


def masses(q, k, block, stride, scale=None):
    """[N, N] of one head: q, k [T, K], the formulas one tile at a time."""
    T, K = q.shape
    N, tiles = -(-T // block), block // stride
    q, k = (np.pad(np.asarray(x, np.float64), ((0, N * block - T), (0, 0))) for x in (q, k))
    scale = (K**-0.5 if scale is None else scale) / stride
    mass = np.zeros((N, N))
    for i in range(-(-T // stride)):
        logits = [
            scale * sum(q[i * stride + stride - 1 - j] @ k[n * stride + j] for j in range(stride))
            for n in range(i + 1)
        ]
        weights = np.exp(np.array(logits) - max(logits))
        for n, weight in enumerate(weights / weights.sum()):
            mass[i // tiles, n // tiles] += weight
    return mass


def chosen(mass, threshold):
    """The blocks of each row of `mass`: forced ones, then the heaviest until the threshold."""
    keep = np.zeros(mass.shape, bool)
    for row, total in enumerate(mass.sum(1)):
        keep[row, [0, row]] = True
        kept = mass[row, keep[row]].sum()
        for n in np.argsort(-mass[row], kind="stable"):
            if kept >= threshold * total:
                break
            if not keep[row, n]:
                keep[row, n] = True
                kept += mass[row, n]
    return keep


CASES = {
    "the published stride": (dict(B=1, T=640, H=2, G=1, K=16), dict(block_size=128, stride=16)),
    "stride 8": (dict(B=1, T=300, H=2, G=2, K=8), dict(block_size=64, stride=8)),
    "grouped heads": (dict(B=2, T=76, H=4, G=2, K=8), dict(block_size=8, stride=4)),
    "a scale": (dict(B=1, T=64, H=2, G=1, K=8), dict(block_size=8, stride=2, scale=1.5)),
    "one block": (dict(B=1, T=5, H=2, G=1, K=8), dict(block_size=8, stride=4)),
}


@pytest.mark.covers("xattention_select", "xla", "forward")
@pytest.mark.parametrize("threshold", [0.5, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_it_keeps_the_blocks_of_the_formulas(name, threshold):
    sizes, options = CASES[name]
    arguments = inputs(**sizes)
    found = select(arguments, threshold=threshold, **options)
    q, k = np.asarray(arguments["q"]), np.asarray(arguments["k"])
    block, stride, scale = options["block_size"], options["stride"], options.get("scale")
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        key_head = h * k.shape[2] // q.shape[2]
        mass = masses(q[b, :, h], k[b, :, key_head], block, stride, scale)
        assert np.array_equal(found[b, h], chosen(mass, threshold)), (b, h)


@pytest.mark.slow
def test_more_mass_keeps_more_blocks():
    arguments = inputs(B=1, T=128, H=2, G=2)
    counts = [select(arguments, block_size=8, stride=4, threshold=x) for x in (0.3, 0.6, 0.9)]
    assert np.all(counts[0] <= counts[1]) and np.all(counts[1] <= counts[2])
    assert counts[0].sum() < counts[1].sum() < counts[2].sum()


def test_a_needle_is_found():
    """One key block that every query points at is kept, whatever else is."""
    arguments = inputs(B=1, T=128, H=1, G=1)
    direction = jnp.ones(8)
    arguments["q"] = 0.1 * arguments["q"] + direction
    arguments["k"] = (0.1 * arguments["k"]).at[:, 40:48].add(9 * direction)
    keep = select(arguments, block_size=8, stride=4, threshold=0.8)[0, 0]
    assert np.all(keep[5:, 5])
    assert np.array_equal(keep.sum(1)[6:], np.full(10, 3))  # with the first and its own


@pytest.mark.slow
def test_packed_documents_choose_as_they_do_alone():
    lengths, block = [29, 48, 17], 8
    documents = [inputs(B=1, T=length, seed=length) for length in lengths]
    row, ids = pack(documents, lengths, block)
    options = dict(block_size=block, stride=4, threshold=0.7)
    packed = select_packed(row, ids, **options)
    expected, start = np.zeros_like(packed), 0
    for document, length in zip(documents, lengths, strict=True):
        n = -(-length // block)
        own = slice(start, start + n)
        expected[:, :, own, own] = select(document, **options)
        start += n
    assert np.array_equal(packed, expected)


def test_blocks_of_padding_keep_nothing_and_shared_blocks_stay_causal():
    arguments = inputs(B=1, T=48, H=2, G=1)
    ids = np.full((1, 48), -1)
    ids[:, 5:20], ids[:, 20:37] = 0, 1  # two documents share block 2; 37 .. 47 is padding
    keep = select_packed(arguments, ids, block_size=8, stride=4, threshold=1.0)
    assert np.array_equal(keep, np.broadcast_to(keep & np.tri(6, dtype=bool), keep.shape))
    assert not keep[:, :, 5].any()
    assert keep[:, :, range(5), range(5)].all() and keep[:, :, :3, 0].all()
    assert not keep[:, :, 3:5, :2].any() and keep[:, :, 3:5, 2].all()


@pytest.mark.slow
def test_the_choice_is_a_block_mask_without_gradient():
    arguments = inputs(B=2, T=60, H=4, G=2)
    keep = jax.jit(functools.partial(xattention_select, block_size=8, stride=4, threshold=0.6))

    def loss(arguments):
        mask = BlockMask.from_blocks(keep(arguments["q"], arguments["k"]), 8)
        return block_sparse_attention(**arguments, mask=mask, implementation="xla")

    cotangents = cotangents_for(arguments)
    (o, _), vjp = jax.vjp(loss, arguments)
    fixed = {"mask": BlockMask.from_blocks(keep(arguments["q"], arguments["k"]), 8)}
    expected = outputs_and_gradients("xla", arguments, fixed, cotangents)
    np.testing.assert_allclose(o, expected["o"], rtol=1e-5, atol=1e-6)
    for name, gradient in vjp(cotangents)[0].items():
        np.testing.assert_allclose(gradient, expected[f"d{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch():
    arguments = inputs(B=3, T=64)
    options = dict(block_size=8, stride=4, threshold=0.6)
    whole = select(arguments, **options)
    rows = [{name: x[b : b + 1] for name, x in arguments.items()} for b in range(3)]
    alone = [select(row, **options) for row in rows]
    assert np.array_equal(whole, np.concatenate(alone))


def test_the_scores_of_all_tiles_never_exist():
    T, H = 8192, 8
    shape = jax.ShapeDtypeStruct((1, T, H, 16), jnp.float32)
    compiled = jax.jit(functools.partial(xattention_select, stride=8)).lower(shape, shape).compile()
    everything = H * (T // 8) ** 2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < everything


X = jnp.ones((1, 16, 4, 8))
BAD = {
    "lengths": (dict(k=jnp.ones((1, 24, 2, 8))), ValueError, "q has 16 tokens, k has 24"),
    "heads": (dict(k=jnp.ones((1, 16, 3, 8))), ValueError, "4 query heads are not a multiple of 3"),
    "head dims": (dict(k=jnp.ones((1, 16, 2, 6))), ValueError, "head dim 8, k has 6"),
    "batch": (dict(k=jnp.ones((2, 16, 2, 8))), ValueError, "batch 1, k has batch 2"),
    "rank": (dict(k=jnp.ones((16, 2, 8))), ValueError, "k must be"),
    "empty": (dict(k=jnp.ones((1, 0, 2, 8))), ValueError, "k is empty"),
    "dtypes": (dict(k=X.astype(jnp.bfloat16)), TypeError, "q is float32 but k is bfloat16"),
    "integers": (dict(q=jnp.ones((1, 16, 4, 8), int)), TypeError, "q must be floating"),
    "stride": (dict(stride=6), ValueError, "stride=6 must divide block_size=8"),
    "threshold": (dict(threshold=1.5), ValueError, "threshold=1.5 must be in"),
    "no mass": (dict(threshold=0.0), ValueError, "threshold=0.0 must be in"),
    "ids": (
        dict(segment_ids=jnp.zeros((1, 15), jnp.int32)),
        ValueError,
        r"must be \[1, 16\], got \[1, 15\]",
    ),
    "id dtype": (dict(segment_ids=jnp.zeros((1, 16))), TypeError, "segment_ids must be integer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_that_names_it(case):
    changes, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        xattention_select(**{"q": X, "k": X, "block_size": 8, "stride": 4, **changes})
    assert "\n" not in str(caught.value)
