"""Next-token loss and likelihoods without ever holding the logits of a whole batch.

The logits of `loss_chunk_tokens` tokens exist at a time, in the forward pass and, recomputed, in
the backward pass: O(chunk * vocab) memory instead of O(B * T * vocab).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.model import HybridLM
from jhybrid.sharding import axis_shards, constrain
from pallas_kernels.array_types import Array, Bool, Float, Int


def next_token_loss(
    model: HybridLM, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over tokens of -log p(target) in fp32, and the number of tokens with target >= 0."""
    counted = targets >= 0
    return -jnp.sum(token_log_likelihoods(model, hidden, targets)), jnp.sum(
        counted, dtype=jnp.float32
    )


def token_log_likelihoods(
    model: HybridLM, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """log p(target | the tokens up to here) in fp32; 0 where the target is negative.

        log p = logits[target] - logsumexp(logits)

    Chunks run along time, so that rows stay on their devices.
    """
    return _over_time(_log_likelihoods, model, hidden, targets)


def likeliest_and_likelihoods(
    model: HybridLM, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Bool[Array, "B T"], Float[Array, "B T"]]:
    """Whether the target is the likeliest token, the first among equals; and its log p."""

    def both(logits: Array, targets: Array) -> tuple[Array, Array]:
        return jnp.argmax(logits, -1) == targets, _log_likelihoods(logits, targets)

    return _over_time(both, model, hidden, targets)


def _log_likelihoods(
    logits: Float[Array, "B t vocab"], targets: Int[Array, "B t"]
) -> Float[Array, "B t"]:
    # a masked sum partitions over the vocabulary, a gather would not
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    picked = jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
    likelihood = picked - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(targets >= 0, likelihood, 0.0)


def _over_time(
    of_logits: Callable[[Array, Array], Any],
    model: HybridLM,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
) -> Any:
    """`of_logits(logits, targets)`, arrays [B, t] of t tokens, for all T of them.

    Zeros, and no logits, for t tokens none of which has a target.
    """
    B, T, _ = hidden.shape
    rows = B // axis_shards("batch", B)
    length = max(1, min(T, model.config.loss_chunk_tokens // rows))
    chunks = -(-T // length)

    def split(x: Array, fill: int) -> Array:
        pad = [(0, 0), (0, chunks * length - T)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(B, chunks, length, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, chunks * length)[:, :T]

    @jax.checkpoint
    def of_chunk(hidden: Array, targets: Array) -> Any:
        def of_targets(hidden: Array, targets: Array) -> Any:
            logits = constrain(model.logits(hidden), "batch", "time", "vocab")  # [B, length, vocab]
            return of_logits(logits, targets)

        shapes = jax.eval_shape(of_targets, hidden, targets)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        asked = jnp.any(targets >= 0)
        return jax.lax.cond(asked, of_targets, lambda *_: zeros, hidden, targets)

    def body(_, chunk):
        return None, of_chunk(*chunk)

    _, out = jax.lax.scan(body, None, (split(hidden, 0), split(targets, -1)))
    return jax.tree.map(join, out)
