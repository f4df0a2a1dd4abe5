"""Small mixers of every kind, as pure functions of their parameters, for the mixer tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    GatedDeltaNetConfig,
    ModelConfig,
    RopeScaling,
    SoftmaxConfig,
)
from jhybrid.mixers import Context, build_mixer
from jhybrid.recurrent_config import (
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    LightningConfig,
    Mamba2Config,
    RetNetConfig,
    RWKV6ChannelConfig,
    RWKV6Config,
)

DIM = 24
CHUNK = 8
SCALING = RopeScaling(factor=4.0, low_turns=0.5, high_turns=2.0, original_length=16)
ROUTED = ChunkRoutedConfig(
    num_heads=2, key_dim=8, value_dim=16, num_softmax_heads=4, chunk_size=CHUNK
)
CONFIGS = {
    "softmax": SoftmaxConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope_scaling=SCALING),
    "softmax_window": SoftmaxConfig(
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=None,
        qkv_bias=True,
        qk_norm=True,
        window=5,
    ),
    "gated_delta_net": GatedDeltaNetConfig(
        num_heads=2, key_dim=8, value_dim=8, num_value_heads=4, negative_eigenvalues=True
    ),
    "delta_net": DeltaNetConfig(num_heads=2, key_dim=8, value_dim=8, negative_eigenvalues=True),
    "kda": KDAConfig(num_heads=2, key_dim=8, value_dim=12),
    "gla": GLAConfig(num_heads=2, key_dim=8, value_dim=12, gate_rank=4),
    "hgrn": HGRNConfig(width=16),
    "hgrn2": HGRN2Config(num_heads=2, key_dim=8, value_dim=12),
    "retnet": RetNetConfig(num_heads=2, key_dim=8, value_dim=12),
    "lightning": LightningConfig(num_heads=2, key_dim=8, value_dim=12),
    "mamba2": Mamba2Config(num_heads=4, key_dim=8, value_dim=8, num_groups=2),
    "rwkv6": RWKV6Config(num_heads=2, key_dim=8, value_dim=12, shift_rank=4, decay_rank=6),
    "rwkv6_channel": RWKV6ChannelConfig(width=32),
    "chunk_routed": ROUTED,
    "chunk_routed_mamba2": dataclasses.replace(ROUTED, memory="mamba2", conv_width=None),
    "chunk_routed_options": dataclasses.replace(
        ROUTED,
        num_softmax_heads=2,
        rope_theta=100.0,
        qk_norm=False,
        fusion_weights=False,
        decay_softmax_chunks=False,
        softmax_conv=False,
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A mixer split into its structure and its parameters; `apply` is jitted."""

    graphdef: nnx.GraphDef
    params: nnx.State

    def __post_init__(self):
        run = jax.jit(lambda params, *inputs: nnx.merge(self.graphdef, params)(*inputs))
        object.__setattr__(self, "apply", run)

    @property
    def mixer(self):
        return nnx.merge(self.graphdef, self.params)

    def __call__(self, x, state, context):
        return self.apply(self.params, x, state, context)

    def row(self, x, **context):
        """The full-sequence output for x [B, T, D]."""
        return self(x, None, positions(x, **context))[0]

    def with_params(self, change):
        """The same mixer with parameters `change(dotted path, value)`."""
        flat = [(path, change(".".join(map(str, path)), p)) for path, p in flatten(self.params)]
        params = nnx.from_flat_state([(path, nnx.Param(value)) for path, value in flat])
        return Case(self.graphdef, params)


def flatten(params):
    return [(path, p[...]) for path, p in nnx.to_flat_state(params)]


def by_name(params):
    """Parameters by dotted path."""
    return {".".join(map(str, path)): value for path, value in flatten(params)}


def model_with(mixer, dtype, dim=DIM):
    """A model config around one mixer; only the fields mixers read matter."""
    return ModelConfig(
        vocab_size=1,
        dim=dim,
        blocks=(BlockConfig(mixer=mixer, channel_mixer=None),),
        compute_dtype=dtype,
        param_dtype="float64" if dtype == "float64" else "float32",
    )


@functools.cache
def build(config):
    """A float64 mixer whose weights are large enough for every nonlinearity to matter."""
    mixer = build_mixer(config, model_with(config, "float64"), rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))

    def grow(name, value):
        if value.ndim >= 2:
            return 12 * value
        if not value.any():
            return 0.3 * jax.random.normal(next(keys), value.shape, value.dtype)
        return value * (1 + 0.2 * jax.random.normal(next(keys), value.shape, value.dtype))

    return Case(*nnx.split(mixer)).with_params(grow)


def build_bfloat16(config):
    """`build(config)` computing in bfloat16 from fp32 parameters."""
    mixer = build_mixer(config, model_with(config, "bfloat16"), rngs=nnx.Rngs(0))
    values = by_name(build(config).params)
    return Case(*nnx.split(mixer)).with_params(lambda name, p: values[name].astype(p.dtype))


def positions(x, **context):
    """A context whose positions count from the start of the rows."""
    return Context(positions=jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), **context)


def inputs(length, batch=1, seed=7):
    """float64 inputs that bfloat16 can hold, so that rounding them moves no decision."""
    x = jax.random.normal(jax.random.key(seed), (batch, length, DIM), "float64")
    return x.astype("bfloat16").astype("float64")
