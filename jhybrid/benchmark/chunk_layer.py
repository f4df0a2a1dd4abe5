"""Times one chunk-routed layer of the 380M model, beside the authors' released layer where it runs.

    python -m jhybrid.benchmark.chunk_layer --shape 8x4096 --shape 1x32768

The released layer (automl/NeuralAttentionSearchLinear, BSD-3-Clause) is the package `nats`: clone
the repository and put its `src` on PYTHONPATH, beside PyTorch with Triton, einops and
flash-linear-attention 0.4.0. Both layers have random weights and decide by their own routers,
forward alone and forward with all gradients, in bf16; the fraction of chunks that each sent to
softmax is printed. Without it the reason is printed and ours is timed alone.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid import commandline
from jhybrid.benchmark.work import random_weights
from jhybrid.config import BlockConfig, ChunkRoutedConfig, ModelConfig
from jhybrid.errors import first_line
from jhybrid.mixers import Context
from pallas_kernels.array_types import Array, Float
from pallas_kernels.benchmark import median_ms

DIM = 1024
LAYER = ChunkRoutedConfig(num_heads=6, key_dim=128, value_dim=256, num_softmax_heads=12)

CAUSES = "needs PyTorch with CUDA and the package `nats`, for the authors' layer"


def ours(shape: tuple[int, int]) -> tuple[float, float, float]:
    """(ms forward, ms forward and backward, fraction of chunks sent to softmax)."""
    block = BlockConfig(mixer=LAYER, channel_mixer=None)
    model = nnx.merge(*random_weights(ModelConfig(vocab_size=1, dim=DIM, blocks=(block,))))
    graphdef, stacked = nnx.split(model.groups[0][0].mixer)
    weights = jax.tree.map(lambda stack: stack[0], stacked)
    x, dy = (jax.random.normal(jax.random.key(i), (*shape, DIM), "bfloat16") for i in range(2))
    context = Context(positions=jnp.broadcast_to(jnp.arange(shape[1]), shape))

    def layer(weights: nnx.State, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        y, _, report = nnx.merge(graphdef, weights)(x, None, context)
        return y, report["softmax_fraction"]

    @jax.jit
    def both(weights, x, dy):
        y, pull_back, _ = jax.vjp(layer, weights, x, has_aux=True)
        return y, pull_back(dy)

    forward = jax.jit(layer)
    fraction = float(forward(weights, x)[1].mean())
    times = (median_ms(lambda: forward(weights, x)), median_ms(lambda: both(weights, x, dy)))
    return *times, fraction


def theirs(shape: tuple[int, int]) -> tuple[float, float, float]:
    """The same of the released layer, with the options of its published configs."""
    torch: Any = importlib.import_module("torch")
    released: Any = importlib.import_module("nats.layers.natsl_attn_gdn")
    layer = released.NeuralAttentionSearchLinearAttnGDN(
        hidden_size=DIM,
        head_dim=LAYER.key_dim,
        num_heads=LAYER.num_heads,
        num_attn_heads=LAYER.num_softmax_heads,
        expand_v=LAYER.value_dim // LAYER.key_dim,
        nats_block_size=LAYER.chunk_size,
        ops_for_incomplete_chunks="all",
        attn_qk_norm=True,
        attn_with_short_conv=True,
        decay_for_non_gdn_blocks=True,
        layer_idx=0,
        norm_eps=1e-6,
    )
    layer = layer.cuda().to(torch.bfloat16).train()
    x, dy = (torch.randn((*shape, DIM), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def timed(run: Callable[[], Any]) -> float:
        def whole() -> None:
            run()
            torch.cuda.synchronize()

        return median_ms(whole)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x)[0].backward(dy)

    times = (timed(forward), timed(both))
    return *times, float(layer.attn_fraction.mean())


def unavailable() -> str | None:
    """Why the released layer cannot run here, or None."""
    for package in ("torch", "triton", "fla", "einops", "nats"):
        if importlib.util.find_spec(package) is None:
            return f"{CAUSES}: {package} is not installed"
    torch: Any = importlib.import_module("torch")
    return None if torch.cuda.is_available() else f"{CAUSES}: PyTorch sees no GPU"


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jhybrid.benchmark.chunk_layer",
        description="Time a chunk-routed layer beside the authors' own.",
    )
    parser.add_argument(
        "--shape", action="append", required=True, type=commandline.rows_and_tokens, metavar="BxT"
    )
    return parser


def main() -> int:
    shapes = parser().parse_args().shape
    commandline.use_compile_cache(None)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    layers: dict[str, Callable] = {"ours": ours}
    reason = unavailable()
    if reason is None:
        layers["released"] = theirs
    else:
        print(f"released: {reason}")
    print(
        f"{'layer':<9} {'shape':>10} {'softmax':>8} {'forward ms':>11} {'both ms':>9}", flush=True
    )
    for B, T in shapes:
        for name, measure in layers.items():
            try:
                forward, both, fraction = measure((B, T))
            except Exception as error:  # of either library: the other layer is timed all the same
                print(f"{name:<9} {f'{B}x{T}':>10} {type(error).__name__}: {first_line(error)}")
                continue
            row = f"{name:<9} {f'{B}x{T}':>10} {fraction:>8.3f} {forward:>11.3f} {both:>9.3f}"
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    commandline.run(main)
