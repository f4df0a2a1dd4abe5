"""One model in one use: a training step, reading rows, decoding; its time and memory."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.benchmark.rows import Row
from jhybrid.benchmark.work import (
    random_routes,
    random_weights,
    routed_fraction,
    state_after,
    with_room,
)
from jhybrid.config import Experiment, ModelConfig
from jhybrid.decoding import PREFILL_TOKENS, prefill, prefill_piece
from jhybrid.errors import UserError, first_line
from jhybrid.memory import memory
from jhybrid.mixers import Context
from jhybrid.model import HybridLM, flops_per_token, parameter_count
from jhybrid.parameters import flatten
from jhybrid.sharding import make_mesh
from jhybrid.training.metrics import model_flops_utilization
from jhybrid.training.step import Program
from pallas_kernels.array_types import Array
from pallas_kernels.benchmark import median_ms

DECODED = 32  # tokens of each row in one program
DECODE_BATCHES = 5


def measure(experiment: Experiment, mode: str, shape: tuple[int, int], fraction: float) -> Row:
    """The row of one model; a failure, as for want of memory, becomes a note."""
    row = Row(experiment.name, parameter_count(experiment.model), mode, *shape)
    try:
        if mode == "train":
            return _train(row, experiment)
        return _infer(row, experiment, fraction)
    except UserError:
        raise
    except Exception as error:  # out of memory, or a kernel that cannot: the others go on
        return dataclasses.replace(row, note=f"{type(error).__name__}: {first_line(error)}")


def _train(row: Row, experiment: Experiment) -> Row:
    B, T = row.rows, row.tokens
    optimizer = dataclasses.replace(experiment.optimizer, accumulation_steps=1)
    shape = dataclasses.replace(experiment.data, batch_size=B, sequence_length=T)
    experiment = dataclasses.replace(experiment, optimizer=optimizer, data=shape)
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        program = Program(experiment, mesh)
        tokens = np.random.default_rng(0).integers(0, experiment.model.vocab_size, (B, T), np.int32)
        positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "positions": positions}
        batch = program.put_whole_batch(batch | {"segment_ids": np.zeros_like(tokens)})
        weights = flatten(random_weights(experiment.model)[1])
        carry = [program.init(np.asarray([0, 0], np.uint32), weights), None]
        step = program.train_step.lower(carry[0], batch).compile()

        def run() -> Any:
            carry[:] = step(carry[0], batch)
            return carry[1]["loss"]

        ms = median_ms(run)
        routing = jax.device_get(carry[1]["routing"])
    chosen = [np.mean(found["softmax_fraction"]) for found in routing.values()]
    kept = float(np.mean(chosen)) if chosen else None
    flops = flops_per_token(experiment.model, T, softmax_fraction=kept or 0.0)
    speed = 1e3 * B * T / ms
    return dataclasses.replace(
        row,
        softmax_fraction=kept,
        ms=ms,
        tokens_per_second=speed,
        mfu=model_flops_utilization(speed, flops, list(mesh.devices.flat)),
        peak_bytes=peak_bytes(step),
    )


def _infer(row: Row, experiment: Experiment, fraction: float) -> Row:
    B, T = row.rows, row.tokens
    config = with_room(experiment.model, fraction)
    graphdef, weights = random_weights(config)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, config.vocab_size)
    routes = random_routes(config, B, T, fraction)
    room = T
    if row.mode == "decode":
        room += decoded_tokens()
        state = jax.jit(functools.partial(state_after, graphdef, B, T, room))(weights, routes)
        hidden = jnp.ones((B, config.dim), config.compute_dtype)
        ms, step = time_decoding(graphdef, weights, hidden, state, T)
    else:
        use = functools.partial(_read_whole if row.mode == "forward" else _read_pieces, graphdef)
        step = jax.jit(use).lower(weights, tokens, routes).compile()
        ms = median_ms(lambda: step(weights, tokens, routes))
    held = state_bytes(nnx.merge(graphdef, weights), room)
    return dataclasses.replace(
        row,
        softmax_fraction=routed_fraction(config, routes),
        ms=ms,
        tokens_per_second=1e3 * (B if row.mode == "decode" else B * T) / ms,
        peak_bytes=peak_bytes(step),
        state_bytes=None if row.mode == "forward" else int(B * held),
    )


def decoded_tokens() -> int:
    return DECODED * (DECODE_BATCHES + 1)  # one batch warms up


def state_bytes(model: HybridLM, room: int) -> float:
    """Of one row of `room` tokens."""
    return sum(r.row_bytes + room * r.cache_bytes_per_token for r in memory(model, room))


def most_rows(models: Sequence[tuple[ModelConfig, float]], tokens: int, available: int) -> int:
    """The largest power of two of rows of `tokens` tokens whose states, and weights, fit with a
    tenth of the memory left, in every model at its softmax fraction.

    Raises UserError where not one does.
    """
    rows = math.inf
    for model, fraction in models:
        config = with_room(model, fraction)
        abstract = nnx.eval_shape(lambda config=config: HybridLM(config, rngs=nnx.Rngs(0)))
        weights = parameter_count(config) * jnp.dtype(config.param_dtype).itemsize
        rows = min(
            rows, (0.9 * available - weights) / state_bytes(abstract, tokens + decoded_tokens())
        )
    if rows < 1:
        raise UserError(f"--decode mostx{tokens}: not one row has room in {available} bytes")
    return 2 ** int(math.log2(rows))


def _read_whole(graphdef, weights, tokens, routes) -> Array:
    model = nnx.merge(graphdef, weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    output = model(tokens, Context(positions=positions, routes=routes))
    return model.logits(output.hidden[:, -1])


def _read_pieces(graphdef, weights, tokens, routes) -> tuple[Array, Any]:
    model = nnx.merge(graphdef, weights).unstacked()
    B, T = tokens.shape
    state = model.initial_state(B, T)
    lengths = jnp.full((B,), T, jnp.int32)
    piece = prefill_piece(model.config, T, PREFILL_TOKENS)
    return prefill(model, tokens, lengths, state, piece, routes=routes)


def time_decoding(graphdef, weights, hidden, state, length: int) -> tuple[float, Any]:
    """Milliseconds per token of all rows: median over batches of tokens decoded in one program."""

    def advance(weights, hidden, state, length):
        model = nnx.merge(graphdef, weights).unstacked()

        def one(carry, step):
            hidden, state = carry
            token = jnp.argmax(model.logits(hidden), -1)[:, None]
            positions = jnp.full(token.shape, length + step, jnp.int32)
            output = model(token, Context(positions=positions, decided=True), state)
            return (output.hidden[:, 0], output.state), None

        carry, _ = jax.lax.scan(one, (hidden, state), jnp.arange(DECODED))
        return carry

    step = jax.jit(advance, donate_argnums=(1, 2))
    step = step.lower(weights, hidden, state, jnp.int32(length)).compile()
    times = []
    for batch in range(DECODE_BATCHES + 1):
        start = time.perf_counter()
        hidden, state = step(weights, hidden, state, jnp.int32(length + batch * DECODED))
        jax.block_until_ready(hidden)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:]) / DECODED, step  # the first warms up


def peak_bytes(compiled) -> int | None:
    found = compiled.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes
