"""Generation equals running the whole model again for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LINEAR, ROUTED, SOFTMAX, VOCAB, build, tiny, tokens

from jhybrid.decoding import generate
from jhybrid.errors import UserError
from jhybrid.model import Context, HybridLM

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = np.array([9, 1, 14])  # inside, at the start and across chunks of 8
NEW = 11


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
    actual = generate(model, text, LENGTHS, max_new_tokens=NEW)
    assert actual.shape == (3, NEW)
    assert actual.dtype == jnp.int32
    assert len(np.unique(expected)) > 3  # the continuation says something
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
        key = jax.random.key(seed)
        return np.asarray(
            generate(model, text, lengths, max_new_tokens=2, key=key, temperature=temperature)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ({"max_new_tokens": 1, "temperature": 0.5}, "temperature=0.5 needs a key"),
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
