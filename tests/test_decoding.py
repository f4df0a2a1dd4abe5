"""Generation equals running the whole model again for every token, in memory that is bounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import LINEAR, ROUTED, SOFTMAX, VOCAB, build, tiny, tokens

from configs import nats_l_hybrid_380m
from jhybrid import decoding
from jhybrid.benchmark import work
from jhybrid.config import ChunkRoutedConfig
from jhybrid.errors import UserError
from jhybrid.memory import memory
from jhybrid.mixers.head_cache import PAGE_TOKENS
from jhybrid.model import Context, HybridLM
from jhybrid.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = np.array([9, 1, 14])  # inside, at the start and across chunks of 8
NEW = 11


def generate(*arguments, **options):
    return decoding.generate(*arguments, **options).tokens


def by_full_forward(model: HybridLM, text: np.ndarray, lengths: np.ndarray, count: int):
    """The likeliest continuations, each token from a forward pass over everything before it."""
    B, T = text.shape
    padded = np.zeros((B, T + count), np.int32)
    padded[:, :T] = text

    @jax.jit
    def likeliest(padded):
        positions = jnp.broadcast_to(jnp.arange(T + count), padded.shape)
        return jnp.argmax(model.logits(model(padded, Context(positions=positions)).hidden), -1)

    new = np.zeros((B, count), np.int32)
    for step in range(count):
        for row, length in enumerate(lengths):
            padded[row, length + step :] = 0  # what follows must not matter
        choices = np.asarray(likeliest(padded))
        for row, length in enumerate(lengths):
            new[row, step] = choices[row, length + step - 1]
            padded[row, length + step] = new[row, step]
    return new


def test_greedy_generation_equals_repeated_full_forwards_for_unequal_prompts():
    model = build(tiny(LINEAR, SOFTMAX, ROUTED))
    text = tokens(3, 14)
    expected = by_full_forward(model, text, LENGTHS, NEW)
    for row, length in enumerate(LENGTHS):  # whatever lies in the padding
        text[row, length:] = VOCAB - 1
    assert len(np.unique(expected)) > 3  # the continuation says something
    for piece in (5, 14):  # pieces end inside, at and after the prompts' ends
        actual = generate(model, text, LENGTHS, max_new_tokens=NEW, prefill_tokens=piece)
        assert actual.shape == (3, NEW)
        assert actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, expected)


def test_after_its_stop_token_a_row_repeats_it_and_other_rows_go_on():
    model = build(tiny(LINEAR))
    text = tokens(3, 14)
    free = np.asarray(generate(model, text, LENGTHS, max_new_tokens=NEW))
    stop = int(free[0, 3])
    stopped = np.asarray(generate(model, text, LENGTHS, max_new_tokens=NEW, stop_token=stop))
    for row in range(3):
        hits = np.flatnonzero(free[row] == stop)
        end = hits[0] if hits.size else NEW
        np.testing.assert_array_equal(stopped[row, :end], free[row, :end])
        assert (stopped[row, end:] == stop).all()
    assert (stopped[0, 3:] == stop).all()


def test_sampling_follows_the_key_and_the_temperature():
    model = build(tiny(LINEAR))
    text, lengths = np.repeat(tokens(1, 6), 400, axis=0), np.full(400, 6)

    def draw(seed, temperature):
        choice = Sampling(temperature=temperature)
        keys = jax.random.split(jax.random.key(seed), 400)
        return np.asarray(
            generate(model, text, lengths, max_new_tokens=2, keys=keys, choice=choice)
        )

    np.testing.assert_array_equal(draw(1, 1.0), draw(1, 1.0))
    assert (draw(1, 1.0) != draw(2, 1.0)).any()

    @jax.jit
    def distribution(text):
        positions = jnp.broadcast_to(jnp.arange(6), (1, 6))
        hidden = model(text, Context(positions=positions)).hidden
        return jax.nn.softmax(model.logits(hidden[0, -1]) / 0.7)

    p = np.asarray(distribution(text[:1]))
    seen = np.bincount(draw(3, 0.7)[:, 0], minlength=VOCAB) / 400
    assert np.abs(seen - p).max() < 0.1  # four standard deviations of a fraction of 400
    cold = draw(3, 1e-3)
    np.testing.assert_array_equal(cold, generate(model, text, lengths, max_new_tokens=2))


def test_a_drawn_continuation_does_not_depend_on_the_other_rows():
    model, text = build(tiny(LINEAR)), tokens(3, 14)
    keys = jax.random.split(jax.random.key(5), 3)
    draw = functools.partial(
        generate, model, max_new_tokens=NEW, choice=Sampling(temperature=1.0, top_k=9, top_p=0.9)
    )
    together = draw(text, LENGTHS, keys=keys)
    alone = draw(text[2:], LENGTHS[2:], keys=keys[2:])
    np.testing.assert_array_equal(together[2:], alone)


def with_room(capacity: float, overflow: str) -> HybridLM:
    """Two chunk-routed blocks of which the second has little room."""
    limited = dataclasses.replace(ROUTED, kv_capacity=capacity, kv_overflow=overflow)
    return build(tiny(ROUTED, limited))


@pytest.mark.slow
def test_a_full_cache_stops_generation_or_sends_chunks_to_the_memory_as_configured():
    text, lengths = tokens(2, 40), np.array([40, 33])
    with pytest.raises(UserError, match=r"blocks\.1\.mixer\.kv_capacity=0\.25: a head has no room"):
        decoding.generate(with_room(0.25, "error"), text, lengths, max_new_tokens=8)
    bounded = decoding.generate(with_room(0.25, "linear"), text, lengths, max_new_tokens=8)
    assert np.any(bounded.usages[1].refused)
    assert (np.asarray(bounded.usages[1].cached) // 8).max() == 2


@pytest.mark.slow
def test_memory_tells_what_rows_and_tokens_take():
    half = dataclasses.replace(ROUTED, kv_capacity=0.5, kv_overflow="linear")
    model = build(tiny(LINEAR, SOFTMAX, half))
    linear, softmax, routed = memory(model, 64)
    assert [r.mixer for r in (linear, softmax, routed)] == [
        "GatedDeltaNet",
        "Softmax",
        "ChunkRouted",
    ]
    assert linear.cache_bytes_per_token == 0
    assert softmax.cache_bytes_per_token == 2 * (8 + 8) * 4  # heads * (K + V) * fp32
    every_token = 4 * (4 + 8) * 4
    assert routed.cache_bytes_per_token == every_token * (0.5 * 64 + 8) / 64  # and an open chunk
    state = 2 * 8 * 8 * 4  # H K V fp32; 3 inputs of 3 * H * 8 channels; one length
    assert linear.row_bytes == state + 3 * 3 * 16 * 4 + 4
    text, lengths = tokens(2, 40), np.array([40, 33])
    usages = decoding.generate(model, text, lengths, max_new_tokens=8).usages
    _, softmax, routed = memory(model, 48, usages)
    assert softmax.cached_fraction == 1
    assert softmax.used_bytes_per_token == 2 * (8 + 8) * 4
    assert 0 < routed.cached_fraction < 1
    assert routed.used_bytes_per_token == pytest.approx(routed.cached_fraction * every_token)


def test_a_step_reads_no_page_behind_the_newest_token_of_a_head():
    """Any of the NaNs there would reach the output if it were read, whatever its weight."""
    model = build(tiny(SOFTMAX, ROUTED))
    graphdef, weights = nnx.split(model)
    length = jnp.array([70, 130])
    softmax, routed = (s._replace(length=length) for s in model.initial_state(2, 4 * PAGE_TOKENS))
    routed = routed._replace(kept=jnp.array([[7, 3], [8, 0]]))
    open_page, open_slot = (length // PAGE_TOKENS)[:, None], routed.kept[:, :, None]

    @jax.jit
    def step(weights, state):
        context = Context(positions=length[:, None])
        return nnx.merge(graphdef, weights)(jnp.zeros((2, 1), jnp.int32), context, state).hidden

    def spoil_page(cache):  # [B, G, S, K]
        behind = jnp.arange(cache.shape[2]) // PAGE_TOKENS > open_page
        assert behind.any(1).all()
        return jnp.where(behind[:, None, :, None], jnp.nan, cache)

    def spoil_slot(cache):  # [B, H, R, M, C, K]
        behind = jnp.arange(cache.shape[3]) > open_slot
        return jnp.where(behind[:, :, None, :, None, None], jnp.nan, cache)

    spoiled = (
        softmax._replace(keys=spoil_page(softmax.keys), values=spoil_page(softmax.values)),
        routed._replace(keys=spoil_slot(routed.keys), values=spoil_slot(routed.values)),
    )
    np.testing.assert_array_equal(step(weights, spoiled), step(weights, (softmax, routed)))


def abstract(config):
    return nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))


def test_keys_and_values_take_the_kept_fraction_of_what_softmax_layers_take():
    """At 128K tokens, of the published hybrid: at most a tenth more than the fraction itself."""
    config = nats_l_hybrid_380m.config().model
    for fraction in (0.25, 0.1):
        limited = work.with_room(config, fraction)
        report = memory(abstract(limited), 131_072)
        mixers = [block.mixer for block in limited.blocks]
        own = [2 * m.num_heads * (m.key_dim + m.value_dim) for m in mixers]
        for mixer, found, every_token in zip(mixers, report, own, strict=True):
            routed = isinstance(mixer, ChunkRoutedConfig)
            assert found.cache_bytes_per_token <= 1.1 * fraction * every_token * routed
            assert found.cache_bytes_per_token >= fraction * every_token * routed


@pytest.mark.parametrize("mixer", [SOFTMAX, ROUTED], ids=["softmax", "chunk_routed"])
def test_a_decoding_step_updates_the_caches_in_place(mixer):
    """What a loop of steps needs besides its donated state must not grow like the caches do.

    XLA's CPU matrix product copies its right operand into its own order, one layer's keys at a
    time; the limit is what the keys and values of one of the three layers take.
    """
    model = build(tiny(mixer, mixer, mixer, channels=False))
    graphdef, weights = nnx.split(model)

    def steps(weights, state):
        model = nnx.merge(graphdef, weights).unstacked()

        def step(i, carry):
            token, state = carry
            output = model(token, Context(positions=jnp.full((2, 1), i)), state)
            return jnp.argmax(model.logits(output.hidden), -1).astype(jnp.int32), output.state

        return jax.lax.fori_loop(0, 4, step, (jnp.zeros((2, 1), jnp.int32), state))

    def compiled_bytes(length: int) -> tuple[int, int]:
        """(of the state, of temporaries)"""
        state = jax.eval_shape(lambda: model.initial_state(2, length))
        compiled = jax.jit(steps, donate_argnums=1).lower(weights, state).compile()
        found = compiled.memory_analysis()
        assert found is not None
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
        assert found.alias_size_in_bytes == size  # all of it comes back where it was
        return size, found.temp_size_in_bytes

    (short, short_temporaries), (long, long_temporaries) = map(compiled_bytes, (1024, 4096))
    assert long_temporaries - short_temporaries < (long - short) / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 1, "prefill_tokens": 0}, "prefill_tokens=0 must be at least 1"),
        (
            {"max_new_tokens": 1, "choice": Sampling(temperature=0.5)},
            "temperature=0.5 needs keys",
        ),
        (
            {"max_new_tokens": 1, "lengths": np.array([5])},
            r"lengths=\[5\] must lie between 1 and 4",
        ),
        (
            {"max_new_tokens": 1, "lengths": np.array([0])},
            r"lengths=\[0\] must lie between 1 and 4",
        ),
    ],
)
def test_impossible_requests_say_which_argument_is_wrong(options, message):
    with pytest.raises(UserError, match=message):
        generate(
            build(tiny(LINEAR)), **{"tokens": tokens(1, 4), "lengths": np.array([4]), **options}
        )
