"""One head-routed layer's attention, alone: what `jhybrid.benchmark.heads` times of it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid import routing
from jhybrid.block_groups import find_groups
from jhybrid.config import HeadRoutedConfig, ModelConfig
from jhybrid.errors import UserError
from jhybrid.mixers import head_routed_ops
from jhybrid.mixers.head_routed import HeadRouter
from pallas_kernels import BlockMask, block_sparse_attention, xattention_select
from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.benchmark import median_ms

# One launch over two, by eighths of sparse heads: arXiv 2601.17367, figure 4.
PUBLISHED_LAUNCH = {
    16_384: (1.20, 1.25, 1.33, 1.43, 1.57, 1.83, 2.23),
    32_768: (1.09, 1.11, 1.15, 1.19, 1.28, 1.44, 1.80),
    65_536: (1.03, 1.04, 1.06, 1.09, 1.14, 1.23, 1.46),
    131_072: (1.00, 1.01, 1.02, 1.03, 1.06, 1.11, 1.24),
    262_144: (0.99, 1.00, 1.00, 1.01, 1.02, 1.03, 1.11),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    config: ModelConfig
    sparse: float
    decode_sparse: float
    kept: float
    dense: str  # implementation of jax.nn.dot_product_attention

    @property
    def mixer(self) -> HeadRoutedConfig:
        """Of every block; UserError where they differ or are none."""
        groups = find_groups(self.config.blocks)
        mixer = groups[0].pattern[0].mixer
        if sum(len(group.pattern) for group in groups) > 1 or not isinstance(
            mixer, HeadRoutedConfig
        ):
            raise UserError("--config: every block must be head-routed, all of them alike")
        return mixer


def heads(settings: Settings, T: int) -> tuple[Array, Array, Array]:
    """q, k and v of one row."""
    attention, dtype = settings.mixer.attention, settings.config.compute_dtype
    counts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    q, k, v = (
        draw(jax.random.key(i, impl="rbg"), (1, T, n, attention.head_dim), dtype)
        for i, n in enumerate(counts)
    )
    return q, k, v


def dense_attention(
    q: Float[Array, "B T H K"], k: Array, v: Array, *_: Any, by: str, **__: Any
) -> Float[Array, "B T H K"]:
    """Causal attention `by` cuDNN or XLA, called as `block_sparse_attention_output`."""
    options = {"is_causal": True, "implementation": by}
    return jax.nn.dot_product_attention(q, k, v, **options)


def spread_blocks(kept: float, shape: tuple[int, ...]) -> Bool[Array, "B H N N"]:
    """The first block, the query's own, and the share `kept` of all up to it."""
    h, i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2, 3))
    spread = (37 * j + 11 * i + 53 * h) % 100 < round(100 * kept)  # 37 has no divisor of 100
    return (j <= i) & (spread | (j == 0) | (j == i))


def forced_selection(kept: float, *arguments: Any, **options: Any) -> Bool[Array, "B H N N"]:
    """XAttention's choice, computed and then replaced by `spread_blocks`.

    A choice is causal, so joining what it has above the diagonal adds nothing, but only the values
    say so: the work of choosing stays in the program.
    """
    chosen = xattention_select(*arguments, **options)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, chosen.shape, axis) for axis in (2, 3))
    return spread_blocks(kept, chosen.shape) | (chosen & (j > i))


@contextlib.contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """For what is traced meanwhile."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)


def time_router(settings: Settings, T: int) -> float:
    """Milliseconds of one layer's decision in a call of its own, launches included."""
    mixer, config = settings.mixer, settings.config
    router = nnx.jit(lambda: HeadRouter(mixer.attention.head_dim, config, rngs=nnx.Rngs(0)))()
    graphdef, params = nnx.split(router)

    @jax.jit
    def decide(params: Any, k: Float[Array, "B T G K"], counts: Int[Array, "B"]) -> Array:
        pooled, _ = head_routed_ops.row_means(k, counts, pool_tokens=mixer.pool_tokens)
        return routing.decide(nnx.merge(graphdef, params)(pooled)[..., ::-1]).softmax

    k, counts = heads(settings, T)[1], jnp.asarray([T])
    return median_ms(lambda: decide(params, k, counts))


@functools.partial(jax.jit, static_argnums=0)
def one_launch(
    mixer: HeadRoutedConfig, q: Array, k: Array, v: Array, route: Bool[Array, "B G"]
) -> Array:
    """Full heads where `route`, streaming ones elsewhere, by one mask."""
    mask = BlockMask.by_head(route, BlockMask.causal(), head_routed_ops.streaming(mixer))
    return block_sparse_attention(q, k, v, mask)[0]


@functools.partial(jax.jit, static_argnums=0)
def two_launches(
    mixer: HeadRoutedConfig,
    q: Array,
    k: Array,
    v: Array,
    full: Int[Array, "F"],
    sparse: Int[Array, "S"],
) -> Array:
    """The same with the key/value heads `full` and `sparse`: gather, attend, scatter."""
    B, T, H, K = q.shape
    groups = q.reshape(B, T, k.shape[2], -1, K)

    def attend(heads: Array, mask: BlockMask) -> Array:
        own = groups[:, :, heads].reshape(B, T, -1, K)
        o = block_sparse_attention(own, k[:, :, heads], v[:, :, heads], mask)[0]
        return o.reshape(B, T, len(heads), -1, K)

    o = jnp.zeros_like(groups).at[:, :, full].set(attend(full, BlockMask.causal()))
    streaming = attend(sparse, head_routed_ops.streaming(mixer))
    return o.at[:, :, sparse].set(streaming).reshape(B, T, H, K)


def launches(settings: Settings, T: int) -> Iterator[dict[str, Any]]:
    """A row for each number of sparse heads, from one to all but one."""
    q, k, v = heads(settings, T)
    G = k.shape[2]
    for n in range(1, G):
        order = jax.random.permutation(jax.random.key(n), G)
        sparse, full = jnp.sort(order[:n]), jnp.sort(order[n:])
        route = jnp.zeros((1, G), bool).at[0, full].set(True)
        one = functools.partial(one_launch, settings.mixer, q, k, v, route)
        two = functools.partial(two_launches, settings.mixer, q, k, v, full, sparse)
        wide = [float(jnp.abs(x).max()) for x in (one() - two(), two())]
        ms, apart = median_ms(one), median_ms(two)
        paper = PUBLISHED_LAUNCH.get(T)
        yield {
            "tokens": T,
            "msr": n / G,
            "ms": ms,
            "two_launches_ms": apart,
            "speedup": apart / ms,
            "paper": None if paper is None or len(paper) + 1 != G else paper[n - 1],
            "largest_difference": wide[0] / wide[1],
        }
