"""What every mixer promises: one result however its rows are cut, packed, padded or sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from mixer_cases import CHUNK, CONFIGS, build, build_bfloat16, by_name, inputs, positions

from jhybrid.config import MeshConfig
from jhybrid.mixers import Context
from jhybrid.sharding import make_mesh

LENGTH = 27  # three chunks and a part
# One of each way to remember in the default tier; the others share its code.
FIRST = ("softmax", "gated_delta_net", "gla", "hgrn", "mamba2", "rwkv6", "chunk_routed")
every_mixer = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name in FIRST else pytest.mark.slow)
        for name, config in CONFIGS.items()
    ],
)
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")


def full_rows(case):
    """LENGTH equal rows and their outputs; each test cuts or changes row b in its own way."""
    x = jnp.tile(inputs(LENGTH), (LENGTH, 1, 1))
    return x, case.row(x)


def take(x, start, count):
    """Tokens start_b .. start_b + count - 1 of row b, clipped at its end; and their positions."""
    index = start[:, None] + jnp.arange(count)
    clipped = jnp.minimum(index, x.shape[1] - 1)
    return jnp.take_along_axis(x, clipped[..., None], 1), index


def assert_continues(y, full, index, valid):
    """y [B, n, D] equals `full` at `index` wherever `valid`."""
    expected = jnp.take_along_axis(full, jnp.minimum(index, full.shape[1] - 1)[..., None], 1)
    wrong = jnp.where(valid[..., None], y - expected, 0)
    assert float(jnp.abs(wrong).max()) < 1e-12


def prefill(case, x, cuts):
    """The first cuts_b tokens of row b, with garbage where the padding is."""
    prompts, index = take(x, jnp.zeros_like(cuts), LENGTH)
    prompts = jnp.where((index < cuts[:, None])[..., None], prompts, 1e3)
    state = case.mixer.initial_state(LENGTH, LENGTH)
    y, state, _ = case(prompts, state, Context(positions=index, lengths=cuts))
    return y, state, index


@every_mixer
def test_prefill_at_every_cut_then_decoding_equals_the_full_row(config):
    case = build(config)
    x, full = full_rows(case)
    cuts = jnp.arange(LENGTH)
    y, state, index = prefill(case, x, cuts)
    assert_continues(y, full, index, index < cuts[:, None])
    for _ in range(LENGTH):
        token, index = take(x, state.length, 1)
        going = index < LENGTH
        lengths = going[:, 0].astype(cuts.dtype)
        y, state, _ = case(token, state, Context(positions=index, lengths=lengths))
        assert_continues(y, full, index, going)
    np.testing.assert_array_equal(state.length, LENGTH)


@every_mixer
def test_prefill_continues_from_every_cut(config):
    case = build(config)
    x, full = full_rows(case)
    cuts = jnp.arange(LENGTH)
    _, state, _ = prefill(case, x, cuts)
    rest, index = take(x, cuts, LENGTH)
    y, state, _ = case(rest, state, Context(positions=index, lengths=LENGTH - cuts))
    assert_continues(y, full, index, index < LENGTH)
    np.testing.assert_array_equal(state.length, LENGTH)


@every_mixer
def test_a_row_without_new_tokens_keeps_its_state(config):
    case = build(config)
    x, _ = full_rows(case)
    cuts = jnp.arange(LENGTH)
    _, before, _ = prefill(case, x, cuts)
    token, index = take(x, cuts, 1)
    context = Context(positions=index, lengths=jnp.zeros_like(cuts))
    _, after, _ = case(token, before, context)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


@every_mixer
def test_no_token_sees_a_later_one(config):
    case = build(config)
    x, before = full_rows(case)
    row = jnp.arange(LENGTH)
    after = case.row(x.at[row, row].add(3.0))  # row t changes at token t
    for t in range(LENGTH):
        np.testing.assert_array_equal(before[t, :t], after[t, :t])
        assert not np.array_equal(before[t, t], after[t, t])


@every_mixer
def test_packed_documents_equal_documents_alone(config):
    case = build(config)
    x, full = full_rows(case)
    lengths, starts = (13, 8, 3), (0, 16, 24)  # documents start at chunks
    cotangents = inputs(13, batch=3, seed=8)

    def rows(places, fill, documents):
        """Three rows of 32 tokens; document i lies at places[i] = (row, start)."""
        filled = jnp.full((3, 32, *documents[0].shape[1:]), fill, documents[0].dtype)
        for (row, start), document in zip(places, documents, strict=True):
            filled = filled.at[row, start : start + len(document)].set(document)
        return filled

    @jax.jit
    def run(params, x, cotangent, context):
        def loss(params, x):
            y, _, report = case.apply(params, x, None, context)
            return (y * cotangent).sum(), (y, report)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def place(places):
        """Outputs and input gradients by document, parameter gradients, report."""
        context = Context(
            positions=rows(places, 0, [jnp.arange(n) for n in lengths]),
            segment_ids=rows(places, -1, [jnp.full((n,), i) for i, n in enumerate(lengths)]),
        )
        documents = rows(places, 5.0, [x[0, :n] for n in lengths])
        cotangent = rows(places, 0.0, [c[:n] for c, n in zip(cotangents, lengths, strict=True)])
        (_, (y, report)), (grads, dx) = run(case.params, documents, cotangent, context)
        spans = [(r, slice(s, s + n)) for (r, s), n in zip(places, lengths, strict=True)]
        return [y[span] for span in spans], [dx[span] for span in spans], by_name(grads), report

    y, dx, grads, report = place([(i, 0) for i in range(3)])
    packed_y, packed_dx, packed_grads, packed_report = place([(1, start) for start in starts])
    for i, n in enumerate(lengths):
        assert_close(y[i], full[0, :n], 1e-12, f"y of document {i} alone")
        assert_close(packed_y[i], full[0, :n], 1e-12, f"y of document {i} packed")
        assert_close(packed_dx[i], dx[i], 1e-11, f"dx of document {i}")
    for name, expected in grads.items():
        assert_close(packed_grads[name], expected, 1e-11, name, floor=1e-12)
    for name in ("softmax_fraction", "score_margin") if report else ():
        assert_close(packed_report[name], report[name], 1e-12, name)


@every_mixer
def test_sharded_over_rows_and_heads_equals_one_device(config):
    case = build(config)
    x, full = (a[:2, :10] for a in full_rows(case))

    def run(params, x):
        state = case.mixer.initial_state(2, LENGTH)
        prompt, state, _ = case.apply(params, x[:, :9], state, positions(x[:, :9]))
        last = Context(positions=jnp.full((2, 1), 9))
        token, _, _ = case.apply(params, x[:, 9:], state, last)
        return case.apply(params, x, None, positions(x))[0], jnp.concatenate([prompt, token], 1)

    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2))):
        whole, pieces = jax.jit(run)(case.params, x)
    assert_close(whole, full, 1e-12, "full row")
    assert_close(pieces, full, 1e-12, "prefill and decode")


@every_mixer
def test_bfloat16_stays_close_to_float64(config):
    x, full = full_rows(build(config))
    narrow = build_bfloat16(config).row(x[:1].astype("bfloat16"))
    assert narrow.dtype == jnp.bfloat16
    assert_close(narrow, full[:1], 2e-2, "bfloat16")


@every_mixer
def test_the_arrays_of_a_new_state_are_distinct_so_that_it_can_be_donated(config):
    arrays = jax.tree.leaves(build(config).mixer.initial_state(1, 16))
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(arrays)


@every_mixer
def test_packed_rows_cannot_continue_a_state(config):
    case, x = build(config), inputs(CHUNK)
    context = positions(x, segment_ids=jnp.zeros((1, CHUNK), jnp.int32))
    with pytest.raises(ValueError, match="segment_ids"):
        case(x, case.mixer.initial_state(1, CHUNK), context)
