"""Text generation: one prefill of right-padded prompts, then one token per jitted step.

Rows may have prompts of different lengths; every row goes on from its own last token. All shapes
are fixed by the prompt array and `max_new_tokens`, so one compilation serves every call of a size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.errors import UserError
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from pallas_kernels.array_types import Array, Float, Int


def generate(
    model: HybridLM,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, "B"],
    *,
    max_new_tokens: int,
    stop_token: int | None = None,
    key: Array | None = None,
    temperature: float = 0.0,
) -> Int[Array, "B max_new_tokens"]:
    """The continuation of each prompt `tokens[b, :lengths[b]]`, of `max_new_tokens` tokens.

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits /
    temperature) with `key`. After its `stop_token` a row holds nothing but `stop_token`, and the
    loop ends when all rows have stopped.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0:
        raise UserError(f"temperature={temperature} must not be negative")
    if temperature > 0 and key is None:
        raise UserError(f"temperature={temperature} needs a key")
    longest = tokens.shape[1]
    if np.min(lengths) < 1 or np.max(lengths) > longest:
        raise UserError(f"lengths={np.asarray(lengths)} must lie between 1 and {longest}")
    graphdef, weights = nnx.split(model)
    return _generate(
        graphdef,
        weights,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        max_new_tokens=max_new_tokens,
        stop_token=stop_token,
        greedy=temperature == 0,
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "stop_token", "greedy"))
def _generate(
    graphdef: nnx.GraphDef,
    weights: Any,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    key: Array,
    temperature: Float[Array, ""],
    *,
    max_new_tokens: int,
    stop_token: int | None,
    greedy: bool,
) -> Int[Array, "B max_new_tokens"]:
    model = nnx.merge(graphdef, weights).unstacked()
    B, T = tokens.shape

    def choose(hidden: Float[Array, "B D"], step: Int[Array, ""]) -> Int[Array, "B"]:
        logits = model.logits(hidden)
        if greedy:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        step_key = jax.random.fold_in(key, step)
        return jax.random.categorical(step_key, logits / temperature).astype(jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    prompt = model(
        tokens,
        Context(positions=positions, lengths=lengths),
        model.initial_state(B, T + max_new_tokens),
    )
    last = jnp.take_along_axis(prompt.hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    first = choose(last, jnp.int32(0))
    fill = 0 if stop_token is None else stop_token
    new = jnp.full((B, max_new_tokens), fill, jnp.int32).at[:, 0].set(first)

    def stopped(token: Int[Array, "B"]) -> Array:
        return jnp.zeros((B,), bool) if stop_token is None else token == stop_token

    def unfinished(carry) -> Array:
        step, _, done, _, _ = carry
        return (step < max_new_tokens) & ~jnp.all(done)

    def advance(carry):
        step, token, done, state, new = carry
        place = (lengths + step - 1)[:, None]
        output = model(token[:, None], Context(positions=place), state)
        token = jnp.where(done, fill, choose(output.hidden[:, 0], step))
        return step + 1, token, done | stopped(token), output.state, new.at[:, step].set(token)

    carry = (jnp.int32(1), first, stopped(first), prompt.state, new)
    return jax.lax.while_loop(unfinished, advance, carry)[-1]
