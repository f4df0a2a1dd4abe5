"""Next-token loss and likelihoods without ever holding the logits of a whole batch.

The logits of `loss_chunk_tokens` tokens exist at a time, in the forward pass and, recomputed, in
the backward pass: O(chunk * vocab) memory instead of O(B * T * vocab). Gradients of logits are
rounded to the compute dtype, in which their products are taken; those of the head sum up in fp32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.model import HybridLM, logits_of
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
    hidden = hidden.astype(model.config.compute_dtype)
    return _likelihoods(_tokens_at_once(model, hidden), hidden, model.head_weight, targets)


def likeliest_and_likelihoods(
    model: HybridLM, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Bool[Array, "B T"], Float[Array, "B T"]]:
    """Whether the target is the likeliest token, the first among equals; and its log p."""

    def both(logits: Array, targets: Array) -> tuple[Array, Array]:
        return jnp.argmax(logits, -1) == targets, _of_logits(logits, targets)[0]

    hidden = hidden.astype(model.config.compute_dtype)
    head = model.head_weight.astype(hidden.dtype)
    return _over_time(both, _tokens_at_once(model, hidden), hidden, head, targets)


def _of_logits(
    logits: Float[Array, "B t vocab"], targets: Int[Array, "B t"]
) -> tuple[Float[Array, "B t"], Float[Array, "B t"]]:
    """log p(target), and logsumexp(logits)."""
    # a masked sum partitions over the vocabulary, a gather would not
    picked = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(targets >= 0, picked - total, 0.0), total


def _is_target(
    logits: Float[Array, "B t vocab"], targets: Int[Array, "B t"]
) -> Bool[Array, "B t vocab"]:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _likelihoods(
    length: int,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D vocab"],
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    return _forward(length, hidden, head, targets)[0]


def _forward(length: int, hidden: Array, head: Array, targets: Array) -> tuple[Array, tuple]:
    found = _over_time(_of_logits, length, hidden, head.astype(hidden.dtype), targets)
    likelihoods, total = found
    return likelihoods, (hidden, head, targets, total)


def _backward(length: int, kept: tuple, cotangent: Float[Array, "B T"]) -> tuple:
    """d log p / d logits = [target] - softmax(logits), whose logsumexp was kept."""
    hidden, head, targets, total = kept
    narrow = head.astype(hidden.dtype)
    cotangent = jnp.where(targets >= 0, cotangent, 0.0)

    def of_targets(sums, hidden, targets, total, cotangent):
        logits = constrain(logits_of(hidden, narrow), "batch", "time", "vocab")
        gradient = _is_target(logits, targets) - jnp.exp(logits - total[..., None])
        gradient = (cotangent[..., None] * gradient).astype(hidden.dtype)
        own = jnp.einsum("btd,btv->dv", hidden, gradient, preferred_element_type=sums.dtype)
        return sums + own, jnp.matmul(gradient, narrow.T)

    def nothing(sums, hidden, *_):
        return sums, jnp.zeros_like(hidden)

    def body(sums, chunk):
        return jax.lax.cond(jnp.any(chunk[1] >= 0), of_targets, nothing, sums, *chunk)

    fills = ((hidden, 0), (targets, -1), (total, 0), (cotangent, 0))
    chunks = tuple(_split(x, fill, length) for x, fill in fills)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    sums, of_hidden = jax.lax.scan(body, jnp.zeros(head.shape, wide), chunks)
    return _join(of_hidden, hidden.shape[1]), sums.astype(head.dtype), None


_likelihoods.defvjp(_forward, _backward)


def _tokens_at_once(model: HybridLM, hidden: Float[Array, "B T D"]) -> int:
    """Of each row."""
    B, T, _ = hidden.shape
    rows = B // axis_shards("batch", B)
    return max(1, min(T, model.config.loss_chunk_tokens // rows))


def _split(x: Float[Array, "B T *dims"], fill: int, length: int) -> Float[Array, "N B t *dims"]:
    B, T = x.shape[:2]
    chunks = -(-T // length)
    pad = [(0, 0), (0, chunks * length - T)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(B, chunks, length, *x.shape[2:]), 1, 0)


def _join(x: Float[Array, "N B t *dims"], T: int) -> Float[Array, "B T *dims"]:
    N, B, length = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(B, N * length, *x.shape[3:])[:, :T]


def _over_time(
    of_logits: Callable[[Array, Array], Any],
    length: int,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D vocab"],
    targets: Int[Array, "B T"],
) -> Any:
    """`of_logits(logits, targets)`, arrays [B, t] of t tokens, for all T of them.

    Zeros, and no logits, for t tokens none of which has a target.
    """

    def of_targets(hidden: Array, targets: Array) -> Any:
        logits = constrain(logits_of(hidden, head), "batch", "time", "vocab")  # [B, t, vocab]
        return of_logits(logits, targets)

    def body(_, chunk):
        shapes = jax.eval_shape(of_targets, *chunk)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        asked = jnp.any(chunk[1] >= 0)
        return None, jax.lax.cond(asked, of_targets, lambda *_: zeros, *chunk)

    _, out = jax.lax.scan(body, None, (_split(hidden, 0, length), _split(targets, -1, length)))
    return jax.tree.map(lambda x: _join(x, hidden.shape[1]), out)
