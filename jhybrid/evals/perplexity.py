"""Loss, perplexity and bits per byte of running text, by context length.

The tokens are cut into consecutive windows of L predictions that do not overlap; each window is
read from nothing, so a token sees between 0 and L - 1 tokens before it. Every token but the very
first is predicted exactly once at every L, which makes the rows comparable:

    loss = -sum log p(token) / tokens      perplexity = exp(loss)
    bits per byte = -sum log2 p(token) / UTF-8 bytes of the tokens

End-of-text tokens are read but not scored: they stand for no bytes.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.losses import likeliest_and_likelihoods
from jhybrid.mixers.context import Context
from jhybrid.model import HybridLM
from pallas_kernels.array_types import Bool, Float, Int

LogLikelihoods = Callable[[np.ndarray, np.ndarray], np.ndarray]


def windows(
    tokens: Int[np.ndarray, "n"], length: int
) -> tuple[Int[np.ndarray, "W L"], Int[np.ndarray, "W L"]]:
    """Inputs and targets; the last window is filled up with token 0 and target -1."""
    count = math.ceil((len(tokens) - 1) / length)
    inputs = np.zeros(count * length, np.int32)
    targets = np.full(count * length, -1, np.int32)
    inputs[: len(tokens) - 1] = tokens[:-1]
    targets[: len(tokens) - 1] = tokens[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)


def scorer(model: HybridLM) -> LogLikelihoods:
    """(inputs [B, L], targets [B, L]) -> log p(target) [B, L], 0 where the target is negative.

    What follows a row's last target is padding, which no router reads.
    """
    graphdef, weights = nnx.split(model)
    return lambda inputs, targets: np.asarray(score(graphdef, weights, inputs, targets)[1])


@functools.partial(jax.jit, static_argnums=0)  # models of one config share a program
def score(
    graphdef: nnx.GraphDef,
    weights: Any,
    inputs: Int[jax.Array, "B L"],
    targets: Int[jax.Array, "B L"],
) -> tuple[Bool[jax.Array, "B L"], Float[jax.Array, "B L"]]:
    """Whether the target is the likeliest token, and log p(target), 0 where it is negative."""
    model = nnx.merge(graphdef, weights)
    place = jnp.arange(inputs.shape[1])
    lengths = jnp.max(jnp.where(targets >= 0, place + 1, 0), 1)
    context = Context(positions=jnp.broadcast_to(place, inputs.shape), lengths=lengths)
    return likeliest_and_likelihoods(model, model(inputs, context).hidden, targets)


def perplexity(
    log_likelihoods: LogLikelihoods,
    tokens: Int[np.ndarray, "n"],
    byte_lengths: Int[np.ndarray, "vocab"],
    *,
    length: int,
    batch_size: int,
) -> dict[str, Any]:
    """One row of results: the text's tokens in windows of `length`."""
    if len(tokens) <= length:
        return {"result": f"does not fit, needs a text of > {length} tokens, has {len(tokens)}"}
    inputs, targets = windows(tokens, length)
    targets[(targets >= 0) & (byte_lengths[targets] == 0)] = -1
    loss = np.zeros(targets.shape)
    batch_size = min(batch_size, len(inputs))
    for rows in _batches(len(inputs), batch_size):
        # The last batch repeats its last window, so that one shape is compiled.
        padded = np.pad(rows, (0, batch_size - len(rows)), mode="edge")
        loss[rows] = -log_likelihoods(inputs[padded], targets[padded])[: len(rows)]
    scored = targets >= 0
    num_tokens, num_bytes = int(scored.sum()), int(byte_lengths[targets[scored]].sum())
    mean = float(loss.sum() / num_tokens)
    return {
        "loss": round(mean, 6),
        "standard_error": _standard_error(loss.sum(1), scored.sum(1), mean),
        "perplexity": round(math.exp(min(mean, 700.0)), 4),
        "bits_per_byte": round(float(loss.sum()) / math.log(2) / num_bytes, 6),
        "windows": len(inputs),
        "tokens": num_tokens,
        "bytes": num_bytes,
        "loss_by_position": list(_by_position(loss, scored)),
    }


def _batches(count: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def _standard_error(sums: np.ndarray, counts: np.ndarray, mean: float) -> float | None:
    """Of a ratio of sums over windows, which are taken as independent."""
    n = len(sums)
    if n == 1:
        return None
    spread = np.sum((sums - mean * counts) ** 2) * n / (n - 1)
    return round(float(np.sqrt(spread) / counts.sum()), 6)


def _by_position(loss: np.ndarray, scored: np.ndarray) -> Iterator[dict[str, Any]]:
    """Mean loss of the tokens with 0..63, 64..127, 128..255, ... tokens of context before them."""
    start, stop = 0, 64
    while start < loss.shape[1]:
        stop = min(stop, loss.shape[1])
        count = int(scored[:, start:stop].sum())
        value = round(float(loss[:, start:stop].sum()) / count, 6) if count else None
        yield {"positions": f"{start}-{stop - 1}", "loss": value}
        start, stop = stop, 2 * stop
