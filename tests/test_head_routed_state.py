"""Decoding with routed heads: whatever the cut, the whole row's outputs; and what is remembered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from closeness import assert_close
from flax import nnx
from mixer_cases import build, inputs, positions
from test_head_routed import BLOCK, FA_SSA, FA_XA, LENGTH, XA_SSA, decided, with_routes

from configs import elastic_llama31_8b
from jhybrid.block_groups import find_groups
from jhybrid.config import HeadRoutedConfig, MeshConfig
from jhybrid.decoding import generate
from jhybrid.errors import UserError
from jhybrid.memory import memory
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from jhybrid.sharding import make_mesh
from jhybrid.training.backbone import without_routers

CAPPED = dataclasses.replace(FA_SSA, kv_capacity=0.5, sink_blocks=2, local_blocks=1)
NO_SINK = dataclasses.replace(FA_SSA, sink_blocks=0, local_blocks=3)
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")


def routes_for(config):
    """One row per cut; every pair of decisions there is room for."""
    pairs = np.array([[1, 0], [0, 1], [0, 0], [1, 1]])[: 3 if config.kv_capacity < 1 else 4]
    return pairs[np.arange(LENGTH) % len(pairs)]


def full_rows(case, routes):
    x = jnp.tile(inputs(LENGTH), (LENGTH, 1, 1))
    return x, case(x, None, with_routes(x, routes))[0]


def take(x, start, count):
    index = start[:, None] + jnp.arange(count)
    clipped = jnp.minimum(index, x.shape[1] - 1)
    return jnp.take_along_axis(x, clipped[..., None], 1), index


def assert_continues(y, full, index, valid):
    expected = jnp.take_along_axis(full, jnp.minimum(index, full.shape[1] - 1)[..., None], 1)
    assert float(jnp.abs(jnp.where(valid[..., None], y - expected, 0)).max()) < 1e-12


def begun(case, x, cuts, routes):
    """The first cuts_b tokens of row b, with garbage where the padding is."""
    prompts, index = take(x, jnp.zeros_like(cuts), LENGTH)
    prompts = jnp.where((index < cuts[:, None])[..., None], prompts, 1e3)
    state = case.mixer.initial_state(LENGTH, LENGTH)
    context = Context(positions=index, lengths=cuts, routes=decided(routes))
    y, state, _ = case(prompts, state, context)
    return y, state, index


@pytest.mark.parametrize("config", [FA_SSA, CAPPED], ids=["trimmed", "capped"])
def test_prefill_at_every_cut_then_decoding_equals_the_full_row(config):
    case, routes = build(config), routes_for(config)
    x, full = full_rows(case, routes)
    cuts = jnp.arange(LENGTH)
    y, state, index = begun(case, x, cuts, routes)
    assert_continues(y, full, index, index < cuts[:, None])
    for _ in range(LENGTH):
        token, index = take(x, state.length, 1)
        going = index < LENGTH
        context = Context(positions=index, lengths=going[:, 0] * 1, routes=decided(routes))
        y, state, _ = case(token, state, context)
        assert_continues(y, full, index, going)
    np.testing.assert_array_equal(state.length, LENGTH)
    np.testing.assert_array_equal(state.full, routes)


@pytest.mark.parametrize("config", [FA_SSA, CAPPED, NO_SINK], ids=["trimmed", "capped", "no_sink"])
def test_several_tokens_at_once_continue_from_every_cut(config):
    case, routes = build(config), routes_for(config)
    x, full = full_rows(case, routes)
    cuts = jnp.arange(LENGTH)
    _, state, _ = begun(case, x, cuts, routes)
    for count in (5, LENGTH):
        start = state.length
        rest, index = take(x, start, count)
        lengths = jnp.clip(LENGTH - start, 0, count)
        context = Context(positions=index, lengths=lengths, routes=decided(routes))
        y, state, _ = case(rest, state, context)
        assert_continues(y, full, index, index < (start + lengths)[:, None])
    np.testing.assert_array_equal(state.length, LENGTH)


def test_a_row_without_new_tokens_keeps_its_state():
    case, routes = build(FA_SSA), routes_for(FA_SSA)
    x, _ = full_rows(case, routes)
    _, before, _ = begun(case, x, jnp.arange(LENGTH), routes)
    for count in (1, 4):
        token, index = take(x, before.length, count)
        nothing = jnp.zeros(LENGTH, jnp.int32)
        _, after, _ = case(token, before, Context(positions=index, lengths=nothing))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old, new)


def test_the_prompt_decides_for_each_row_and_later_turns_do_not():
    case, x = build(FA_SSA), inputs(LENGTH, batch=8, seed=6)
    lengths = jnp.arange(8) + 13
    state = case.mixer.initial_state(8, 2 * LENGTH)
    _, state, report = case(x, state, positions(x, lengths=lengths))
    _, _, whole = case(x, None, positions(x, lengths=lengths))
    np.testing.assert_array_equal(state.full, whole["decisions"][:, 0])
    assert 0 < state.full.sum() < state.full.size
    _, later, after = case(-3 * x, state, Context(positions=x[..., 0].astype(int) * 0 + LENGTH))
    np.testing.assert_array_equal(later.full, state.full)
    np.testing.assert_array_equal(after["decisions"], report["decisions"])


@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(FA_SSA, decode="full"), FA_XA, dataclasses.replace(XA_SSA, decode="full")],
    ids=["FA-SSA", "FA-XA", "XA-SSA"],
)
def test_untrimmed_heads_see_every_token_after_the_prompt(config):
    case = build(config)
    x = inputs(LENGTH, batch=4, seed=2)
    routes = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
    state = case.mixer.initial_state(4, LENGTH)
    assert state.recent is None
    prompt = with_routes(x[:, :21], routes)
    y, state, _ = case(x[:, :21], state, prompt)
    assert_close(y, case(x[:, :21], None, prompt)[0], 1e-12, "prompt")
    dense = build(FA_SSA)(x, None, with_routes(x, [[1, 1]] * 4))[0]
    for t in range(21, LENGTH):
        step = Context(positions=jnp.full((4, 1), t))
        y, state, _ = case(x[:, t : t + 1], state, step)
        assert_close(y[:, 0], dense[:, t], 1e-12, f"token {t}")


def test_retrieval_heads_on_xattention_keep_everything_and_sparse_ones_a_ring():
    case = build(XA_SSA)
    x = inputs(LENGTH, batch=4, seed=2)
    routes = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
    state = case.mixer.initial_state(4, LENGTH)
    y, state, _ = case(x[:, :21], state, with_routes(x[:, :21], routes))
    prompt = case(x[:, :21], None, with_routes(x[:, :21], routes))[0]
    assert_close(y, prompt, 1e-12, "prompt")
    reference = build(FA_SSA)(x, None, with_routes(x, routes))[0]
    for t in range(21, LENGTH):
        y, state, _ = case(x[:, t : t + 1], state, Context(positions=jnp.full((4, 1), t)))
        assert_close(y[:, 0], reference[:, t], 1e-12, f"token {t}")


def test_a_head_without_room_becomes_sparse_and_is_counted():
    case, x = build(CAPPED), inputs(LENGTH, batch=2)
    state = case.mixer.initial_state(2, LENGTH)
    y, state, report = case(x, state, with_routes(x, [[1, 1], [0, 1]]))
    np.testing.assert_array_equal(state.full, [[1, 0], [0, 1]])
    np.testing.assert_array_equal(state.refused, [[0, 1], [0, 0]])
    np.testing.assert_array_equal(report["decisions"][:, 0], state.full)
    assert_close(y, case(x, None, with_routes(x, [[1, 0], [0, 1]]))[0], 1e-12)


@pytest.mark.parametrize("config", [FA_SSA, CAPPED], ids=["trimmed", "capped"])
def test_sharded_over_rows_and_heads_equals_one_device(config):
    case, x = build(config), inputs(LENGTH, batch=2)
    routes = [[1, 0], [0, 1]]

    def run(params, x):
        state = case.mixer.initial_state(2, LENGTH)
        prompt = with_routes(x[:, :20], routes)
        first, state, _ = case.apply(params, x[:, :20], state, prompt)
        step = Context(positions=jnp.full((2, 1), 20))
        return jnp.concatenate([first, case.apply(params, x[:, 20:21], state, step)[0]], 1)

    expected = case(x[:, :21], None, with_routes(x[:, :21], routes))[0]
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2))):
        assert_close(jax.jit(run)(case.params, x), expected, 1e-12)


def small_model(**fields):
    """Two head-routed blocks of two key/value heads."""
    attention = dataclasses.replace(tiny_models.SOFTMAX, num_heads=2)
    mixer = HeadRoutedConfig(
        attention=attention, block_size=BLOCK, local_blocks=2, stride=2, pool_tokens=3, **fields
    )
    model = nnx.merge(*nnx.split(tiny_models.build(tiny_models.tiny(mixer, mixer), seed=3)))
    for router in (stack.mixer.router for group in model.groups for stack in group):
        for part in (router.task_in, router.task_out, router.route_in, router.route_hidden):
            part.weight[...] *= 10
            part.bias[...] *= 0
        router.route_out.bias[...] *= 0  # so that rows and heads differ
    return model


@pytest.mark.slow
def test_generation_reads_the_whole_prompt_before_it_decides():
    model, prompts = small_model(), tiny_models.tokens(3, 21)
    lengths = np.array([21, 17, 9])
    whole = generate(model, prompts, lengths, max_new_tokens=6)
    pieces = generate(model, prompts, lengths, max_new_tokens=6, prefill_tokens=5)
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)
    alone = generate(model, prompts[1:2], lengths[1:2], max_new_tokens=6)
    np.testing.assert_array_equal(alone.tokens[0], whole.tokens[1])


def test_memory_counts_whole_caches_rings_and_refused_heads():
    model, prompts, lengths = small_model(), tiny_models.tokens(2, 20), np.array([20, 20])
    used = generate(model, prompts, lengths, max_new_tokens=5).usages
    full = [np.asarray(u.cached) == 24 for u in used]  # the last token was not read
    assert all(
        np.asarray(u.cached)[~f].tolist() == [12] * int((~f).sum())
        for u, f in zip(used, full, strict=True)
    )
    assert 0 < np.mean(full) < 1
    report = memory(model, 64, used)
    token = 2 * 8 * 4  # a key and a value of eight float32
    for item, fraction in zip(report, (f.mean() for f in full), strict=True):
        assert item.cache_bytes_per_token == 2 * token
        assert item.row_bytes >= 2 * 12 * token  # 1 + 2 blocks for both heads
        assert item.cached_fraction == pytest.approx(fraction + (1 - fraction) / 2)
    capped = memory(small_model(kv_capacity=0.5), 64)
    assert capped[0].cache_bytes_per_token == token


def test_blocks_of_one_stack_may_have_rooms_of_their_own():
    alike = small_model()
    own = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, kv_capacity=room))
        for block, room in zip(alike.config.blocks, (0.5, 1.0), strict=True)
    )
    assert find_groups(own) == find_groups(alike.config.blocks)
    model = nnx.merge(*nnx.split(alike))
    model.config = dataclasses.replace(alike.config, blocks=own)
    slots = [state.keys.shape[1] for state in model.initial_state(2, 32)]
    assert slots == [1, 2]
    assert [x.cache_bytes_per_token for x in memory(model, 64)] == [2 * 8 * 4, 4 * 8 * 4]
    for unstacked in (model, model.unstacked()):
        assert [s.keys.shape[1] for s in unstacked.initial_state(2, 32)] == slots


def test_decoding_asks_no_router_again():
    case, x = build(FA_SSA), inputs(LENGTH, batch=4, seed=6)
    _, state, _ = case(x, case.mixer.initial_state(4, 2 * LENGTH), positions(x))
    token = x[:, :1] * -3  # would be routed otherwise
    asks, asks_not = (
        Context(positions=jnp.full((4, 1), LENGTH), decided=decided) for decided in (False, True)
    )
    one, other = (case(token, state, context)[:2] for context in (asks, asks_not))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    products = [
        str(jax.make_jaxpr(lambda x, c=context: case(x, state, c)[:2])(token)).count("dot_general")
        for context in (asks, asks_not)
    ]
    assert products[0] - products[1] == 5  # the router's


def test_memory_of_a_long_context_is_that_of_the_full_heads():
    """Llama-3.1-8B's caches at 131,072 tokens with 0.7 of all heads sparse."""
    experiment = elastic_llama31_8b.config()
    length, full = 131_072, [3] * 13 + [2] * 19  # of eight heads: 77 of 256
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, kv_capacity=n / 8))
        for block, n in zip(experiment.model.blocks, full, strict=True)
    )
    config = dataclasses.replace(experiment.model, blocks=blocks)
    backbone = without_routers(config)

    def held(config):
        model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
        return sum(x.row_bytes + length * x.cache_bytes_per_token for x in memory(model, length))

    share = held(config) / held(backbone)
    rings = 2_176 / length  # of a sink block and sixteen local ones, for every head
    assert share == pytest.approx(77 / 256 + rings, abs=1e-4)
    assert share < 0.35


@pytest.mark.slow
def test_generation_without_room_for_the_full_heads_is_refused_or_allowed():
    prompts, lengths = tiny_models.tokens(8, 20), np.full(8, 20)
    full = [
        np.asarray(u.cached) == 21
        for u in generate(small_model(), prompts, lengths, max_new_tokens=2).usages
    ]
    assert max(f.sum(1).max() for f in full) == 2  # some row wants both heads of a block
    with pytest.raises(
        UserError, match=r"kv_capacity=0\.5: there is no room for 1 more full heads"
    ):
        generate(small_model(kv_capacity=0.5), prompts, lengths, max_new_tokens=2)
    allowed = small_model(kv_capacity=0.5, kv_overflow="sparse")
    found = generate(allowed, prompts, lengths, max_new_tokens=2)
    assert found.tokens.shape == (8, 2)
