"""The work that benchmarks set: random weights, routes of given shares, states after them."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.config import ChunkRoutedConfig, HeadRoutedConfig, ModelConfig
from jhybrid.errors import UserError
from jhybrid.mixers import State
from jhybrid.mixers.chunk_routed import ChunkRoutedState
from jhybrid.mixers.head_routed_ops import HeadRoutedState
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten, matrix_paths, unflatten
from pallas_kernels.array_types import Array, Bool


def with_room(model: ModelConfig, fraction: float) -> ModelConfig:
    """With room for the routes of the benchmark, and no more; weights in the compute dtype."""
    blocks, full = [], iter(full_heads(model, fraction))
    for block in model.blocks:
        match mixer := block.mixer:
            case ChunkRoutedConfig():
                mixer = dataclasses.replace(mixer, kv_capacity=fraction, kv_overflow="linear")
            case HeadRoutedConfig():
                room = max(next(full), 1) / mixer.attention.num_kv_heads
                mixer = dataclasses.replace(mixer, kv_capacity=room, kv_overflow="sparse")
        blocks.append(dataclasses.replace(block, mixer=mixer))
    return dataclasses.replace(model, blocks=tuple(blocks), param_dtype=model.compute_dtype)


def full_heads(model: ModelConfig, fraction: float) -> list[int]:
    """How many heads of each head-routed block are full: `fraction` of all, spread evenly."""
    mixers = (block.mixer for block in model.blocks)
    heads = [m.attention.num_kv_heads for m in mixers if isinstance(m, HeadRoutedConfig)]
    ends = [round(fraction * total) for total in itertools.accumulate(heads)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def random_weights(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Normal matrices of standard deviation 1 / sqrt(inputs), all else ones.

    One small program for each shape: the initialisers of a whole model compile for minutes.
    """
    graphdef, template = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))
    matrices = matrix_paths(template)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5

    leaves = {}
    for i, (path, leaf) in enumerate(flatten(template).items()):
        key = jax.random.key(i, impl="rbg")
        drawn = path in matrices
        leaves[path] = draw(key, leaf.shape, leaf.dtype) if drawn else jnp.ones_like(leaf)
    return graphdef, unflatten(template, leaves)


def random_routes(
    config: ModelConfig, B: int, T: int, fraction: float
) -> Bool[Array, "*L B N H"] | None:
    """Decisions: for all chunk-routed blocks round(fraction N) chunks of each head, or for each
    block `full_heads` of the heads of every row. None without such blocks.

    Raises UserError where one array cannot serve all of the model's routed blocks.
    """
    L, mixers = len(config.blocks), [block.mixer for block in config.blocks]
    chunked = {
        (-(-T // mixer.chunk_size), mixer.num_heads)
        for mixer in mixers
        if isinstance(mixer, ChunkRoutedConfig)
    }
    routed = [isinstance(mixer, HeadRoutedConfig) for mixer in mixers]
    heads = {m.attention.num_kv_heads for m in mixers if isinstance(m, HeadRoutedConfig)}
    if len(chunked) + len(heads) > 1:
        raise UserError("model.blocks: routed blocks of different shapes cannot be benchmarked")
    draw = functools.partial(jax.random.permutation, jax.random.key(2), independent=True)
    if chunked:
        N, H = chunked.pop()
        ranks = jnp.broadcast_to(jnp.arange(N)[:, None], (B, N, H))
        return draw(ranks, axis=1) < round(fraction * N)
    if heads:
        full = iter(full_heads(config, fraction))
        counts = jnp.asarray([next(full) if here else 0 for here in routed])
        ranks = jnp.broadcast_to(jnp.arange(G := heads.pop()), (L, B, 1, G))
        return draw(ranks, axis=3) < counts[:, None, None, None]
    return None


def routed_fraction(config: ModelConfig, routes: Bool[Array, "*L B N H"] | None) -> float | None:
    """The share of True among the decisions of routed blocks."""
    if routes is None or routes.ndim == 3:
        return None if routes is None else float(jnp.mean(routes))
    routed = [isinstance(block.mixer, HeadRoutedConfig) for block in config.blocks]
    return float(jnp.mean(routes[np.asarray(routed)]))


def state_after(graphdef, B: int, T: int, room: int, weights, routes) -> tuple[State, ...]:
    """States that have read T tokens as `routes` say; the work does not depend on what was read."""
    length = jnp.full((B,), T, jnp.int32)

    def fill(block: int, state: State) -> State:
        match state:
            case ChunkRoutedState():
                return state._replace(length=length, kept=routes.sum(1, dtype=jnp.int32))
            case HeadRoutedState():
                return state._replace(length=length, full=routes[block][:, 0])
            case _:
                return state._replace(length=length)

    states = nnx.merge(graphdef, weights).initial_state(B, room)
    return tuple(fill(block, state) for block, state in enumerate(states))
