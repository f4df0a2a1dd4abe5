"""Text generation: prefill of right-padded prompts in pieces, then one token per step of a loop.

Rows may have prompts of different lengths; every row goes on from its own last token. All shapes
are fixed by the prompt array and `max_new_tokens`, so one compilation serves every call of a size.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import sampling
from jhybrid.config import ChunkRoutedConfig, HeadRoutedConfig, ModelConfig
from jhybrid.errors import UserError
from jhybrid.memory import Usage, usage
from jhybrid.mixers import Context, State
from jhybrid.model import HybridLM
from jhybrid.sampling import Limits, Sampling
from pallas_kernels.array_types import Array, Bool, Float, Int

PREFILL_TOKENS = 4096  # of each row that are read at a time
GREEDY = Sampling()


class Generation(NamedTuple):
    tokens: Int[Array, "B max_new_tokens"]
    usages: tuple[Usage | None, ...]  # by block, at the end


def generate(
    model: HybridLM,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, "B"],
    *,
    max_new_tokens: int,
    stop_token: int | None = None,
    choice: Sampling = GREEDY,
    keys: Array | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Generation:
    """The continuation of each prompt `tokens[b, :lengths[b]]`, of `max_new_tokens` tokens.

    `keys`, one per row, are what drawing tokens needs; a row's tokens depend on its own prompt and
    key only. After its `stop_token` a row holds nothing but `stop_token`, and the loop ends when
    all rows have stopped. Prompts are read `prefill_tokens` at a time, which bounds the memory of
    activations; with head-routed blocks at once, since the whole prompt decides.

    Raises UserError when a routed block has less room than its router wants, unless the block's
    `kv_overflow` allows it.
    """
    longest = tokens.shape[1]
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if prefill_tokens < 1:
        raise UserError(f"prefill_tokens={prefill_tokens} must be at least 1")
    if not choice.greedy and keys is None:
        raise UserError(f"temperature={choice.temperature} needs keys")
    if np.min(lengths) < 1 or np.max(lengths) > longest:
        raise UserError(f"lengths={np.asarray(lengths)} must lie between 1 and {longest}")
    graphdef, weights = nnx.split(model)
    generation = _generate(
        graphdef,
        weights,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        None if choice.greedy else keys,
        None if choice.greedy else jnp.float32(choice.temperature),
        None if choice.greedy else choice.limits,
        max_new_tokens=max_new_tokens,
        stop_token=stop_token,
        prefill_tokens=prefill_piece(model.config, longest, prefill_tokens),
    )
    require_room(model.config, generation.usages)
    return generation


def prefill_piece(config: ModelConfig, longest: int, wanted: int) -> int:
    """How many tokens of prompts of `longest` tokens are read at a time, at most `wanted`.

    All of them where a router of heads reads the whole prompt first.
    """
    mixers = (block.mixer for block in config.blocks)
    if any(isinstance(mixer, HeadRoutedConfig) and mixer.needs_whole_prompt for mixer in mixers):
        return longest
    return min(wanted, longest)


def require_room(config: ModelConfig, usages: tuple[Usage | None, ...]) -> None:
    """Raises UserError if chunks or heads were turned away from a cache that must not overflow."""
    for i, (block, used) in enumerate(zip(config.blocks, usages, strict=True)):
        mixer = block.mixer
        if not isinstance(mixer, ChunkRoutedConfig | HeadRoutedConfig):
            continue
        refused = 0 if used is None else int(np.max(used.refused))
        if refused and mixer.kv_overflow == "error":
            chunks = isinstance(mixer, ChunkRoutedConfig)
            lacking = f"a head has no room for {refused} more chunks"
            lacking = lacking if chunks else f"there is no room for {refused} more full heads"
            raise UserError(
                f"model.blocks.{i}.mixer.kv_capacity={mixer.kv_capacity}: {lacking}; raise it or "
                f"set kv_overflow={'linear' if chunks else 'sparse'}"
            )


@functools.partial(
    jax.jit, static_argnames=("graphdef", "max_new_tokens", "stop_token", "prefill_tokens")
)
def _generate(
    graphdef: nnx.GraphDef,
    weights: Any,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Array | None,
    temperature: Float[Array, ""] | None,
    limits: Limits | None,
    *,
    max_new_tokens: int,
    stop_token: int | None,
    prefill_tokens: int,
) -> Generation:
    model = nnx.merge(graphdef, weights).unstacked()
    B, T = tokens.shape

    def choose(hidden: Float[Array, "B D"], step: Int[Array, ""]) -> Int[Array, "B"]:
        logits = model.logits(hidden)
        if keys is None or temperature is None:
            return sampling.likeliest(logits)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return sampling.draw(step_keys, logits, temperature, limits)

    state = model.initial_state(B, T + max_new_tokens)
    last, state = prefill(model, tokens, lengths, state, prefill_tokens)
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
        counts = jnp.where(done, 0, 1)
        context = Context(positions=place, lengths=counts, decided=True)
        output = model(token[:, None], context, state)
        token = jnp.where(done, fill, choose(output.hidden[:, 0], step))
        return step + 1, token, done | stopped(token), output.state, new.at[:, step].set(token)

    carry = (jnp.int32(1), first, stopped(first), state, new)
    _, _, _, state, new = jax.lax.while_loop(unfinished, advance, carry)
    return Generation(new, tuple(map(usage, state)))


def prefill(
    model: HybridLM,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    state: tuple[State, ...],
    piece: int,
    routes: Bool[Array, "*L B N H"] | None = None,
) -> tuple[Float[Array, "B D"], tuple[State, ...]]:
    """The hidden vector of each prompt's last token and the state after it, `piece` by `piece`.

    `routes` are decisions by chunk of the whole prompt, for every routed block or by block.
    """
    B, T = tokens.shape
    pieces = -(-T // piece)
    tokens = jnp.pad(tokens, ((0, 0), (0, pieces * piece - T)))

    def read(carry, start: Int[Array, ""]):
        state, last = carry
        context = Context(
            positions=jnp.broadcast_to(start + jnp.arange(piece), (B, piece)),
            lengths=jnp.clip(lengths - start, 0, piece),
            routes=routes,
        )
        output = model(jax.lax.dynamic_slice_in_dim(tokens, start, piece, 1), context, state)
        end = lengths - 1 - start
        here = jnp.take_along_axis(output.hidden, jnp.clip(end, 0, piece - 1)[:, None, None], 1)
        is_here = (end >= 0) & (end < piece)
        return (output.state, jnp.where(is_here[:, None], here[:, 0], last)), None

    nothing = jnp.zeros((B, model.config.dim), model.config.compute_dtype)
    starts = piece * jnp.arange(pieces, dtype=jnp.int32)
    (state, last), _ = jax.lax.scan(read, (state, nothing), starts)
    return last, state
