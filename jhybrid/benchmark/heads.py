"""Times a head-routed model beside the same model on cuDNN's full attention.

    python -m jhybrid.benchmark.heads --config configs/elastic_llama31_8b.py --json out.json

Weights are random and routes are set, so that the work is that of published sparsities:

    router    one layer's decision from its keys, at each length of `--prefill`
    prefill   a row read to its last token's logits: full attention by cuDNN, then FA-SSA and XA-SSA
              with `--sparse` of all heads sparse. XAttention's choice of blocks is computed as ever
              and then replaced by `--kept` of the blocks, spread evenly.
    decode    one token to each row of `--decode`, `--decode-sparse` of all heads sparse
    launch    one layer's heads, full and sparse in one launch, against gathering either kind into a
              launch of its own and scattering the results, with 1 to G - 1 of G heads sparse

With t_attn all layers' attention by cuDNN, t_rest the rest of that model's time and w the share of
attention's work that is left, prefill cannot be faster than

    bound = (t_attn + t_rest) / (w t_attn + t_rest)

Every result is printed when it is there and `--json` rewritten, so that what is cut off keeps what
it has. Times are by the host's clock; a program of more than five seconds is timed once.
"""

import argparse
import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid import commandline
from jhybrid.benchmark import head_layer as layer
from jhybrid.benchmark import models, work
from jhybrid.config import ModelConfig
from jhybrid.errors import UserError, first_line
from jhybrid.memory import memory
from jhybrid.mixers import Context, head_routed_ops, softmax
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten, unflatten
from jhybrid.training.backbone import without_routers
from pallas_kernels.array_types import Array
from pallas_kernels.benchmark import median_ms

PARTS = ("router", "prefill", "decode", "launch")
GIB = 2**30
# Speed-ups of Llama-3.1-8B over its backbone on FlashAttention 2 (arXiv 2601.17367, figures 8b and
# 12b).
PUBLISHED = {
    "FA-SSA": {65_536: 1.65, 131_072: 2.10, 262_144: 2.54},
    "XA-SSA": {65_536: 1.70, 131_072: 2.29, 262_144: 3.28},
}


class Results:
    """What was measured, printed line by line and kept in a file."""

    def __init__(self, path: Path | None):
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._facts = {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
        }
        print(" ".join(f"{name}={value}" for name, value in self._facts.items()), flush=True)

    def add(self, part: str, **values: Any) -> None:
        self._rows.append({"part": part, **values})
        shown = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
            if value is not None
        )
        print(f"{part:<8} {' '.join(shown)}", flush=True)
        if self._path is not None:
            text = json.dumps({**self._facts, "rows": self._rows}, indent=1) + "\n"
            commandline.write_text(self._path, text, "--json")

    def attempt(self, part: str, run: Callable[[], Any], **where: Any) -> Any:
        """`run()`, or None and a row with the reason if the device refuses."""
        try:
            return run()
        except jax.errors.JaxRuntimeError as error:
            self.add(part, **where, failed=first_line(error))
            return None


# ---- Whole models ----


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A model's reading of rows."""

    run: Callable[[], Any]
    seconds: float  # of lowering and compiling
    gib: float | None


def read(graphdef: nnx.GraphDef, weights: Any, tokens: Array, routes: Array | None) -> Any:
    """The last token's logits; and the routers' scores, which nothing else here would ask for."""
    model = nnx.merge(graphdef, weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    output = model(tokens, Context(positions=positions, routes=routes))
    margins = [report["score_margin"] for report in output.reports.values()]
    return model.logits(output.hidden[:, -1]), margins


class Prefill:
    """Models of the same weights, in the compute dtype."""

    def __init__(self, settings: layer.Settings):
        self.settings = settings
        self.config = work.with_room(settings.config, 1 - settings.sparse)
        _, weights = work.random_weights(self.config)
        self.weights = flatten(weights)

    def compiled(self, config: ModelConfig, T: int, routes: Array | None) -> Compiled:
        start = time.perf_counter()
        abstract = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
        graphdef, template = nnx.split(abstract)
        weights = unflatten(template, self.weights)
        tokens = jax.random.randint(jax.random.key(1), (1, T), 0, config.vocab_size)
        use = jax.jit(functools.partial(read, graphdef))
        step = use.lower(weights, tokens, routes).compile()
        held = models.peak_bytes(step)
        return Compiled(
            lambda: step(weights, tokens, routes),
            time.perf_counter() - start,
            None if held is None else held / GIB,
        )

    def at(self, T: int, results: Results) -> None:
        """Rows of cuDNN's attention, of that model, and of both modes of ours."""
        settings, part = self.settings, "prefill"
        L = len(self.config.blocks)
        dense = functools.partial(layer.dense_attention, by=settings.dense)
        q, k, v = layer.heads(settings, T)
        alone = jax.jit(dense)
        attention = results.attempt(part, lambda: median_ms(lambda: alone(q, k, v)), tokens=T)
        results.add(part, tokens=T, model="full", layer_attention_ms=attention)
        with layer.replaced(softmax, "block_sparse_attention_output", dense):
            full = self.timed(without_routers(self.config), T, None, results, model="full")
        routes = work.random_routes(self.config, 1, T, 1 - settings.sparse)
        for mode in PUBLISHED:
            config = _in_mode(self.config, mode)
            mixer = dataclasses.replace(settings.mixer, mode=mode)
            select = functools.partial(layer.forced_selection, settings.kept)
            with layer.replaced(head_routed_ops, "xattention_select", select):
                attend = jax.jit(
                    functools.partial(head_routed_ops.attend, config=mixer, implementation="auto")
                )
                route = None if routes is None else routes[0, :, 0]
                own = results.attempt(
                    part, lambda a=attend, r=route: median_ms(lambda: a(q, k, v, r, None)), tokens=T
                )
                results.add(part, tokens=T, model=mode, layer_attention_ms=own)
                ms = self.timed(config, T, routes, results, model=mode)
            if attention is None or full is None or ms is None:
                continue
            full_share = work.routed_fraction(config, routes) or 0.0
            kept = self.kept_work(mode, T, full_share)
            attending = L * attention
            bound = full / (kept * attending + full - attending)
            results.add(
                part,
                tokens=T,
                model=mode,
                msr=1 - full_share,
                kept_work=kept,
                speedup=full / ms,
                bound=bound,
                of_bound=full / ms / bound,
                paper=PUBLISHED[mode].get(T),
            )

    def timed(
        self, config: ModelConfig, T: int, routes: Array | None, results: Results, model: str
    ) -> float | None:
        compiled = results.attempt(
            "prefill", lambda: self.compiled(config, T, routes), tokens=T, model=model
        )
        if compiled is None:
            return None
        ms = results.attempt("prefill", lambda: median_ms(compiled.run), tokens=T, model=model)
        facts = {"compile_seconds": compiled.seconds, "peak_gib": compiled.gib}
        results.add("prefill", tokens=T, model=model, ms=ms, **facts)
        return ms

    def kept_work(self, mode: str, T: int, full: float) -> float:
        """w: attention's operations with the share `full` of full heads, of full attention's."""
        mixer = dataclasses.replace(self.settings.mixer, mode="FA-SSA")
        every = mixer.attention.mixing_flops(T, 1.0)
        blocks = -(-T // mixer.block_size)
        shape = (1, mixer.attention.num_heads, blocks, blocks)
        kept = layer.spread_blocks(self.settings.kept, shape).sum() / shape[1]
        retrieval = float(kept / (blocks * (blocks + 1) / 2)) if mode == "XA-SSA" else 1.0
        return full * retrieval + (1 - full) * mixer.mixing_flops(T, 0.0) / every


def _in_mode(config: ModelConfig, mode: Any) -> ModelConfig:
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mode=mode))
        for block in config.blocks
    )
    return dataclasses.replace(config, blocks=blocks)


def decode(settings: layer.Settings, B: int, T: int, results: Results) -> None:
    fraction = 1 - settings.decode_sparse
    routed = work.with_room(settings.config, fraction)
    routes = work.random_routes(routed, B, T, fraction)
    room = T + models.decoded_tokens()
    times, held, weight_bytes = [], [], 0
    for name, config in (("full", without_routers(routed)), ("FA-SSA", routed)):

        def run(config: ModelConfig = config) -> float:
            graphdef, weights = work.random_weights(config)
            start = functools.partial(work.state_after, graphdef, B, T, room)
            state = jax.jit(start)(weights, routes)
            hidden = jnp.ones((B, config.dim), config.compute_dtype)
            return models.time_decoding(graphdef, weights, hidden, state, T)[0]

        abstract = nnx.eval_shape(lambda c=config: HybridLM(c, rngs=nnx.Rngs(0)))
        read = flatten(nnx.state(abstract))
        if not config.tied_head:
            del read["embed"]  # a row of it
        weight_bytes = sum(x.size * x.dtype.itemsize for x in read.values())
        cache = sum(x.row_bytes + room * x.cache_bytes_per_token for x in memory(abstract, room))
        held.append(B * cache)
        ms = results.attempt("decode", run, rows=B, tokens=T, model=name)
        results.add("decode", rows=B, tokens=T, model=name, ms=ms, cache_gib=B * cache / GIB)
        times.append(ms)
    results.add(
        "decode",
        rows=B,
        tokens=T,
        msr=1 - (work.routed_fraction(routed, routes) or 0.0),
        cache_bytes_of_full=held[1] / held[0],
        speedup=None if None in times else times[0] / times[1],
        bound_by_bytes=(weight_bytes + held[0]) / (weight_bytes + held[1]),
    )


# ---- The command ----


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.benchmark.heads", description="Time head-routed models."
    )
    parser.add_argument("--config", default="configs/elastic_llama31_8b.py", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--depth", type=commandline.positive, help="only so many of the blocks")
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order")
    parser.add_argument("--prefill", default="65536,131072,262144", metavar="T,T")
    parser.add_argument("--decode", default="1x131072,4x131072", metavar="BxT,BxT")
    parser.add_argument("--launch", default="16384,32768,65536,131072,262144", metavar="T,T")
    parser.add_argument("--sparse", type=float, default=0.65, help="of the heads, in prefill")
    parser.add_argument("--decode-sparse", type=float, default=0.7)
    parser.add_argument("--kept", type=float, default=0.28, help="of XAttention's blocks")
    parser.add_argument("--dense", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--json", type=Path, help="also write the results")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    for name in ("sparse", "decode_sparse", "kept"):
        if not 0 < getattr(arguments, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {getattr(arguments, name)}: must lie in (0, 1)")
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--parts {min(unknown)}: known are {', '.join(PARTS)}")
    model = commandline.load_config(arguments.config, arguments.set).model
    settings = layer.Settings(
        config=dataclasses.replace(model, blocks=model.blocks[: arguments.depth]),
        sparse=arguments.sparse,
        decode_sparse=arguments.decode_sparse,
        kept=arguments.kept,
        dense=arguments.dense,
    )
    lengths, launched = _lengths(arguments.prefill), _lengths(arguments.launch)
    shapes = [commandline.rows_and_tokens(text) for text in arguments.decode.split(",")]
    _ = settings.mixer  # may refuse
    commandline.use_compile_cache(None)
    results = Results(arguments.json)
    for part in parts:
        if part == "router":
            for T in lengths:
                results.add("router", tokens=T, layer_ms=layer.time_router(settings, T))
        elif part == "prefill":
            prefill = Prefill(settings)
            for T in lengths:
                prefill.at(T, results)
            del prefill  # and its weights
        elif part == "decode":
            for B, T in shapes:
                decode(settings, B, T, results)
        else:
            for T in launched:
                for row in layer.launches(settings, T):
                    results.add("launch", **row)
    return 0


def _lengths(text: str) -> Sequence[int]:
    return [commandline.positive(item) for item in text.split(",")]


if __name__ == "__main__":
    commandline.run(main)
