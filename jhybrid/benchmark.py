"""Times training, reading and decoding of whole models with random weights, side by side.

    python -m jhybrid.benchmark --config configs/nats_l_hybrid_380m.py --config configs/gdn_380m.py
        --train 8x4096 --forward 1x131072 --decode 1x131072 --softmax-fraction 0.25 --json out.json

A shape is rows x tokens. `train` is a whole step (loss, gradients, AdamW), `forward` reads rows
from nothing to the last token's logits, `prefill` reads them into a decoding state, piece by piece,
`decode` adds one token to rows of that many tokens (caches of zeros). Weights are random and, but
for `train`, in the compute dtype.

Routers with random weights decide at random, so the work is set instead: `--softmax-fraction` of
the chunks of every head (of the heads of all blocks together, where heads are routed), drawn at
random, in `forward`, `prefill` and `decode`; in `train` the routers decide, and the fraction that
they chose is reported. With several fractions routed models are timed at each. Times are medians
by the host's clock, launches included.

`--decode mostx131072` takes as many rows as all of the models have room for, a power of two.
`--vary model.remat=none,block` times every config once with each of these settings.
`--families all` (or gla,retnet,...) times the Transformer and each of the hybrid study's mixers in
the place of a config's model, and compares them; `--resume` keeps the rows of `--json`:

    python -m jhybrid.benchmark --config configs/hybrid_340m.py --families all --train 8x4096
        --decode 1x4096 --decode 64x4096 --json mixers.json --minutes 8 --resume
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid import benchmark_rows, commandline
from jhybrid.benchmark_rows import TRANSFORMER, Row, table
from jhybrid.config import (
    ChunkRoutedConfig,
    Experiment,
    HeadRoutedConfig,
    ModelConfig,
)
from jhybrid.decoding import PREFILL_TOKENS, prefill, prefill_piece
from jhybrid.errors import UserError, first_line
from jhybrid.memory import memory
from jhybrid.mixers import Context, State
from jhybrid.mixers.chunk_routed import ChunkRoutedState
from jhybrid.mixers.head_routed_ops import HeadRoutedState
from jhybrid.model import HybridLM, flops_per_token, parameter_count
from jhybrid.model_families import FAMILIES, like
from jhybrid.parameters import flatten, matrix_paths, unflatten
from jhybrid.sharding import make_mesh
from jhybrid.softmax_budget import parse_fractions
from jhybrid.training.metrics import model_flops_utilization
from jhybrid.training.step import Program
from pallas_kernels.array_types import Array, Bool
from pallas_kernels.benchmark import median_ms

DECODED = 32  # tokens of each row in one program
DECODE_BATCHES = 5
MODES = ("train", "forward", "prefill", "decode")


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


def shape_or_most(text: str) -> tuple[int | None, int]:
    """`parse_shape`, or None for "most" rows."""
    most, cross, tokens = text.partition("mostx")
    return (None, commandline.positive(tokens)) if cross and not most else parse_shape(text)


def parse_shape(text: str) -> tuple[int, int]:
    """ "8x4096" as (rows, tokens)."""
    rows, cross, tokens = text.partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rows x tokens, as 8x4096")
    return commandline.positive(rows), commandline.positive(tokens)


def variants(path: str, settings: Sequence[str], vary: str | None) -> list[Experiment]:
    """The config with `settings`, once for each value of `vary` ("a.b=c,d") and named by it."""
    if vary is None:
        return [commandline.load_config(path, settings)]
    field, _, values = vary.partition("=")
    found = []
    for value in values.split(","):
        experiment = commandline.load_config(path, [*settings, f"{field}={value}"])
        found.append(dataclasses.replace(experiment, name=f"{experiment.name}.{value}"))
    return found


def routes(model: ModelConfig, mode: str) -> bool:
    """Whether a softmax fraction changes what is timed."""
    routed = (ChunkRoutedConfig, HeadRoutedConfig)
    return mode != "train" and any(isinstance(block.mixer, routed) for block in model.blocks)


def _most_here(mode: str, models: Sequence[tuple[ModelConfig, float]], tokens: int) -> int:
    stats = jax.devices()[0].memory_stats()
    if mode != "decode" or not stats:
        raise UserError(f"--{mode} mostx{tokens}: for --decode, on devices that know their memory")
    return most_rows(models, tokens, stats["bytes_limit"])


def of_families(experiment: Experiment, names: str) -> list[Experiment]:
    """The experiment with models of each family, as deep, and first with the Transformer."""
    chosen = FAMILIES if names == "all" else names.split(",")
    old, depth = experiment.model, len(experiment.model.blocks)
    return [
        dataclasses.replace(experiment, name=name, model=like(old, name, "pure", depth=depth))
        for name in dict.fromkeys((TRANSFORMER, *chosen))
    ]


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.benchmark", description="Time whole models with random weights."
    )
    parser.add_argument("--config", action="append", required=True, metavar="FILE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="in each config"
    )
    for mode in MODES:
        parser.add_argument(
            f"--{mode}", action="append", default=[], type=shape_or_most, metavar="BxT"
        )
    parser.add_argument("--vary", metavar="a.b=c,d", help="each config with each of these settings")
    parser.add_argument("--softmax-fraction", default="0.25", help="of chunks or heads; or several")
    parser.add_argument("--families", metavar="NAMES", help="all, or as gla,retnet")
    parser.add_argument("--json", type=Path, help="also write the rows")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json")
    parser.add_argument("--minutes", type=commandline.minutes, help="time no row after so many")
    return parser


def main() -> int:
    began = time.monotonic()
    arguments = parser().parse_args()
    fractions = parse_fractions(arguments.softmax_fraction, "--softmax-fraction")
    experiments = [
        experiment
        for path in arguments.config
        for experiment in variants(path, arguments.set, arguments.vary)
    ]
    if arguments.families is not None:
        found = [of_families(experiment, arguments.families) for experiment in experiments]
        experiments = [experiment for of_config in found for experiment in of_config]
    if arguments.resume and len(fractions) > 1:
        raise UserError("--resume: with one --softmax-fraction")
    commandline.use_compile_cache(None)
    commandline.draw_by_kernel()
    work = list(_work(arguments, experiments, fractions))
    if not work:
        raise UserError(f"nothing to time: name a shape by --{', --'.join(MODES)}")
    device = jax.devices()[0].device_kind
    rows = benchmark_rows.kept(arguments.json, device) if arguments.resume else []
    done = {(row.name, row.mode, (row.rows, row.tokens)) for row in rows}
    print(f"jax {jax.__version__}, {jax.device_count()} x {device}", flush=True)
    print(table(rows), flush=True)
    for experiment, mode, shape, fraction in work:
        if (experiment.name, mode, shape) in done:
            continue
        if time.monotonic() - began > 60 * (arguments.minutes or math.inf):
            print("stopped after --minutes; --resume times the rest", flush=True)
            break
        rows.append(measure(experiment, mode, shape, fraction))
        print(table(rows).splitlines()[-1], flush=True)
        if arguments.json is not None:
            benchmark_rows.write(arguments.json, rows, device)
    return 0


def _work(
    arguments: argparse.Namespace, experiments: Sequence[Experiment], fractions: Sequence[float]
) -> Iterator[tuple[Experiment, str, tuple[int, int], float]]:
    """What `measure` is asked for, in order."""
    for mode in MODES:
        models = [
            (experiment, fraction)
            for experiment in experiments
            for fraction in (fractions if routes(experiment.model, mode) else fractions[:1])
        ]
        for count, tokens in getattr(arguments, mode):
            if count is None:
                count = _most_here(mode, [(e.model, f) for e, f in models], tokens)
            for experiment, fraction in models:
                yield experiment, mode, (count, tokens), fraction


if __name__ == "__main__":
    commandline.run(main)
