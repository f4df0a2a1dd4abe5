"""Temperature, top-k and top-p against NumPy, and against the frequencies they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.errors import UserError
from jhybrid.sampling import Sampling, draw, likeliest

LOGITS = np.array([0.3, 2.0, -1.0, 2.0, 0.9, -np.inf, 1.4], np.float32)
DRAWS = 20_000

CASES = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.4),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_k_within_a_tie": Sampling(temperature=1.0, top_k=1),
    "top_k_of_everything": Sampling(temperature=1.3, top_k=99),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "top_p_of_one_token": Sampling(temperature=1.0, top_p=1e-6),
    "top_p_of_everything": Sampling(temperature=1.0, top_p=1.0),
    "both": Sampling(temperature=0.8, top_k=4, top_p=0.8),
}


def distribution(sampling: Sampling) -> np.ndarray:
    """Walks down the ranking token by token, in float64."""
    scaled = LOGITS.astype(np.float64) / sampling.temperature
    ranking = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    ranking = ranking[: sampling.top_k]
    p = np.exp(scaled[ranking] - scaled.max())
    p /= p.sum()
    kept, total = 0, 0.0
    while kept < len(p) and (sampling.top_p is None or total < sampling.top_p):
        total += p[kept]
        kept += 1
    result = np.zeros(len(scaled))
    result[ranking[:kept]] = p[:kept] / total
    return result


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
def test_drawn_tokens_have_the_frequencies_of_the_distribution(sampling):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    logits = jnp.broadcast_to(LOGITS, (DRAWS, len(LOGITS)))
    tokens = jax.jit(draw)(keys, logits, jnp.float32(sampling.temperature), sampling.limits)
    assert tokens.dtype == jnp.int32
    frequencies = np.bincount(tokens, minlength=len(LOGITS)) / DRAWS
    p = distribution(sampling)
    np.testing.assert_array_equal(frequencies[p == 0], 0)
    deviation = np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(frequencies - p) <= 4.5 * deviation).all()


def test_a_row_depends_on_its_own_key_and_logits_only():
    keys = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 11))
    temperature, limits = jnp.float32(1.0), Sampling(temperature=1.0, top_k=7, top_p=0.9).limits
    together = draw(keys, logits, temperature, limits)
    for row in range(6):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(
            together[one], draw(keys[one], logits[one], temperature, limits)
        )


def test_a_full_top_p_cuts_no_tail_however_long():
    vocab = 20_000
    logits = jnp.zeros((128, vocab))
    keys = jax.random.split(jax.random.key(3), 128)
    tokens = draw(keys, logits, jnp.float32(1.0), Sampling(temperature=1.0, top_p=1.0).limits)
    assert int(tokens.max()) > 0.95 * vocab
    half = draw(keys, logits, jnp.float32(1.0), Sampling(temperature=1.0, top_p=0.5).limits)
    assert 0.45 * vocab < int(half.max()) < 0.51 * vocab


def test_the_likeliest_token_is_the_first_of_the_largest():
    np.testing.assert_array_equal(likeliest(jnp.asarray(LOGITS)[None]), [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0 must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a number >= 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p=0\.0 must lie in \(0, 1\]"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5 must lie in \(0, 1\]"),
    ],
)
def test_impossible_settings_say_which(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
