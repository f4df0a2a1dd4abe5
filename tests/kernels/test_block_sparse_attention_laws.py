"""Laws of block-sparse attention: corners, packing, decoding, merging, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from kernels.attention_calls import (
    attend,
    cotangents_for,
    inputs,
    normal,
    outputs_and_gradients,
    pack,
)

from pallas_kernels import BlockMask, block_sparse_attention

each_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])


FULL = {
    "causal": lambda B, G, N: BlockMask.causal(),
    "every block": lambda B, G, N: BlockMask.from_blocks(jnp.ones((B, 1, N, N), bool), 8),
    "every chunk": lambda B, G, N: BlockMask.from_chunks(jnp.ones((B, 2, N), bool), 8),
    "all local": lambda B, G, N: BlockMask.streaming(0, N, 8),
    "all sink": lambda B, G, N: BlockMask.streaming(N, 1, 8),
    "either": lambda B, G, N: BlockMask.by_head(
        jnp.arange(B * G).reshape(B, G) % 2 == 0,
        BlockMask.causal(),
        BlockMask.from_chunks(jnp.ones((B, 1, N), bool), 8),
    ),
}


@each_implementation
@pytest.mark.parametrize("mask", FULL)
def test_a_mask_that_keeps_everything_is_dense_causal_attention(mask, implementation):
    arguments = inputs(T=37)
    do, dlse = cotangents_for(arguments)

    @jax.jit
    def dense(arguments):
        def op(arguments):
            q, k, v = (arguments[name] for name in "qkv")
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        o, vjp = jax.vjp(op, arguments)
        return {"o": o} | {f"d{name}": x for name, x in vjp(do)[0].items()}

    fixed = {"mask": FULL[mask](2, 2, 5)}
    found = outputs_and_gradients(implementation, arguments, fixed, (do, jnp.zeros_like(dlse)))
    for name, expected in dense(arguments).items():
        assert_close(found[name], expected, 1e-5, name)


@each_implementation
def test_streaming_is_a_block_window_and_a_sink(implementation):
    arguments = inputs(T=53)
    block = np.arange(53) // 8
    distance = block[:, None] - block
    visible = ((distance < 3) | (block < 2)) & np.tri(53, dtype=bool)
    expected = jax.nn.dot_product_attention(*arguments.values(), mask=visible)
    o, _ = attend(implementation, arguments, mask=BlockMask.streaming(2, 3, 8))
    assert_close(o, expected, 1e-5, "o")


@each_implementation
def test_a_window_counts_the_query_itself(implementation):
    arguments = inputs(T=20, G=4)
    o, lse = attend(implementation, arguments, mask=BlockMask.causal(), window=1)
    assert_close(o, arguments["v"], 1e-6, "o")
    own = np.einsum("bthk,bthk->bht", arguments["q"], arguments["k"]) * 8**-0.5
    assert_close(lse, own, 1e-5, "lse")


@each_implementation
def test_one_full_head_among_empty_ones(implementation):
    arguments = inputs(B=1, T=24, H=4, G=4)
    keep = jnp.zeros((1, 4, 3, 3), bool).at[:, 2].set(True)
    fixed = {"mask": BlockMask.from_blocks(keep, 8)}
    cotangents = cotangents_for(arguments)
    found = outputs_and_gradients(implementation, arguments, fixed, cotangents)
    full = outputs_and_gradients(
        implementation, arguments, {"mask": BlockMask.causal()}, cotangents
    )
    for name in ("o", "dq", "dk", "dv"):
        assert_close(found[name][:, :, 2], full[name][:, :, 2], 1e-6, name)
        assert not np.any(found[name][:, :, [0, 1, 3]]), name
    assert_close(found["lse"][:, 2], full["lse"][:, 2], 1e-6, "lse")
    assert np.all(found["lse"][:, [0, 1, 3]] == -np.inf)


@each_implementation
def test_rows_without_a_key_pass_no_gradient_even_of_nan(implementation):
    arguments = inputs(T=12, S=20)
    fixed = {"mask": BlockMask.causal(), "q_offset": jnp.array([-5, 3])}
    do, dlse = cotangents_for(arguments)
    clean = outputs_and_gradients(implementation, arguments, fixed, (do, dlse))
    assert np.all(clean["o"][0, :5] == 0) and np.all(clean["lse"][0, :, :5] == -np.inf)
    assert np.all(np.isfinite(clean["lse"][0, :, 5:])) and np.all(clean["dq"][0, :5] == 0)
    poisoned = (do.at[0, :5].set(jnp.nan), dlse.at[0, :, :5].set(jnp.nan))
    found = outputs_and_gradients(implementation, arguments, fixed, poisoned)
    assert all(np.array_equal(found[name], clean[name]) for name in clean)


@each_implementation
def test_only_chosen_earlier_chunks_have_a_bias_gradient(implementation):
    arguments = inputs(B=1, T=32, H=4, G=4)
    selected = jnp.array([[[True, False, True, True], [False, True, True, False]]])
    arguments["block_bias"] = jnp.zeros((1, 2, 4))
    fixed = {"mask": BlockMask.from_chunks(selected, 8)}
    cotangents = cotangents_for(arguments)
    gradient = outputs_and_gradients(implementation, arguments, fixed, cotangents)["dblock_bias"]
    reached = selected & (jnp.arange(4) < 3)  # nothing lies after the last chunk
    assert np.array_equal(gradient != 0, reached)


@each_implementation
def test_packed_documents_equal_separate_ones(implementation):
    lengths, block = [13, 24, 9], 8
    documents = [inputs(B=1, T=length, seed=length) for length in lengths]
    rng = np.random.default_rng(0)
    blocks = [-(-length // block) for length in lengths]
    selected = [jnp.array(rng.random((1, 4, n)) < 0.5) for n in blocks]
    bias = [normal(n, 1, 4, n) for n in blocks]
    route = [jnp.array([[[True] * n, [False] * n]]) for n in blocks]

    def mask(selected, route):
        return BlockMask.by_head(
            route, BlockMask.from_chunks(selected, block), BlockMask.streaming(1, 1, block)
        )

    row, ids = pack(documents, lengths, block)
    row["block_bias"] = jnp.concatenate(bias, 2)
    fixed = {
        "mask": mask(jnp.concatenate(selected, 2), jnp.concatenate(route, 2)),
        "segment_ids": jnp.array(ids),
    }
    do, dlse = cotangents_for(row)
    packed = outputs_and_gradients(implementation, row, fixed, (do, dlse))
    start = 0
    for n, document in enumerate(documents):
        tokens = slice(start * block, start * block + lengths[n])
        chunks = slice(start, start + blocks[n])
        alone = outputs_and_gradients(
            implementation,
            document | {"block_bias": bias[n]},
            {"mask": mask(selected[n], route[n])},
            (do[:, tokens], dlse[:, :, tokens]),
        )
        for name in ("o", "dq", "dk", "dv"):
            assert_close(packed[name][:, tokens], alone[name], 1e-6, name)
        assert_close(packed["lse"][:, :, tokens], alone["lse"], 1e-6, "lse")
        assert_close(packed["dblock_bias"][:, :, chunks], alone["dblock_bias"], 1e-5, "dbias")
        start += blocks[n]
    padding = ids[0] < 0
    assert np.all(packed["lse"][:, :, padding] == -np.inf)
    for name in ("o", "dq", "dk", "dv"):
        assert not np.any(packed[name][:, padding]), name


@each_implementation
def test_a_query_at_a_traced_position_equals_its_row_of_the_whole(implementation):
    arguments = inputs(B=3, T=40)
    selected = jnp.array(np.random.default_rng(0).random((3, 2, 5)) < 0.5)
    mask = BlockMask.by_head(
        jnp.array([[True, False]] * 3),
        BlockMask.from_chunks(selected, 8),
        BlockMask.streaming(1, 2, 8),
    )

    @jax.jit
    def decode(q, position):
        one = arguments | {"q": q}
        return block_sparse_attention(
            **one, mask=mask, q_offset=position, implementation=implementation
        )

    o, lse = attend(implementation, arguments, mask=mask)
    for position in (jnp.array([0, 17, 39]), jnp.array([8, 7, 25])):
        rows = jnp.arange(3)
        step_o, step_lse = decode(arguments["q"][rows, position][:, None], position)
        assert_close(step_o[:, 0], o[rows, position], 1e-6, "o")
        assert_close(step_lse[..., 0], lse[rows, :, position], 1e-6, "lse")
    assert decode._cache_size() == 1


def merge(parts):
    """Attentions over disjoint sets of keys, as one."""
    lse = jax.nn.logsumexp(jnp.stack([lse for _, lse in parts]), axis=0)
    return sum(jnp.exp(x - lse).swapaxes(1, 2)[..., None] * o for o, x in parts), lse


@each_implementation
def test_attention_over_two_halves_of_the_keys_merges_into_the_whole(implementation):
    arguments = inputs(T=24)
    cotangents = cotangents_for(arguments)
    keep = np.random.default_rng(1).random((2, 4, 3, 3)) < 0.5
    keep |= np.eye(3, dtype=bool)  # where both halves are empty, logsumexp itself gives NaN
    masks = [BlockMask.from_blocks(jnp.asarray(half), 8) for half in (keep, ~keep)]

    @jax.jit
    def run(arguments, masks, cotangents):
        def halves(arguments):
            return merge(
                [
                    block_sparse_attention(**arguments, mask=mask, implementation=implementation)
                    for mask in masks
                ]
            )

        (o, lse), vjp = jax.vjp(halves, arguments)
        return {"o": o, "lse": lse} | {f"d{name}": x for name, x in vjp(cotangents)[0].items()}

    found = run(arguments, masks, cotangents)
    whole = {"mask": BlockMask.causal()}
    expected = outputs_and_gradients(implementation, arguments, whole, cotangents)
    for name in expected:
        assert_close(found[name], expected[name], 1e-5, name)


def routed(selected, route):
    chunks = BlockMask.from_chunks(selected, 8)
    return BlockMask.by_head(route, chunks, BlockMask.streaming(1, 1, 8))


def routed_problem(B=4):
    rng = np.random.default_rng(3)
    arguments = inputs(B=B) | {"block_bias": normal(5, B, 4, 4)}
    selected = jnp.asarray(rng.random((B, 4, 4)) < 0.5)
    route = jnp.asarray(rng.random((B, 2)) < 0.5)
    return arguments, {"mask": routed(selected, route)}, cotangents_for(arguments)


@each_implementation
def test_another_selection_does_not_recompile(implementation):
    compiled = jax.jit(
        lambda arguments, mask: block_sparse_attention(
            **arguments, mask=mask, implementation=implementation
        )
    )
    arguments, rng = inputs(), np.random.default_rng(0)
    outputs = []
    for _ in range(3):
        selected = jnp.asarray(rng.random((2, 2, 4)) < 0.5)
        outputs.append(compiled(arguments, routed(selected, jnp.ones((2, 2), bool)))[0])
    assert compiled._cache_size() == 1
    assert not np.array_equal(outputs[0], outputs[1])


def test_vmap_remat_and_shard_map_change_nothing():
    arguments, fixed, cotangents = routed_problem()
    expected = outputs_and_gradients("xla", arguments, fixed, cotangents)

    def attention(arguments, mask):
        return block_sparse_attention(**arguments, mask=mask, implementation="xla")

    def one_row(arguments, mask):
        added = jax.tree.map(lambda x: x[None], (arguments, mask))
        return jax.tree.map(lambda x: x[0], attention(*added))

    mesh = jax.make_mesh(
        (2, 2),
        ("data", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    P = jax.sharding.PartitionSpec
    by_row = {name: P("data", None, "tensor") for name in "qkv"}
    by_row["block_bias"] = P("data", "tensor")
    transformed = {
        "vmap": jax.vmap(one_row),
        "remat": jax.checkpoint(attention),
        "shard_map": jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(by_row, P("data", "tensor")),
            out_specs=(P("data", None, "tensor"), P("data", "tensor")),
        ),
    }
    for how, function in transformed.items():

        @jax.jit
        def run(arguments, mask, cotangents, function=function):
            (o, lse), vjp = jax.vjp(lambda arguments: function(arguments, mask), arguments)
            return {"o": o, "lse": lse} | {f"d{x}": dx for x, dx in vjp(cotangents)[0].items()}

        found = run(arguments, fixed["mask"], cotangents)
        for name in expected:
            assert_close(found[name], expected[name], 1e-6, f"{how}: {name}")
