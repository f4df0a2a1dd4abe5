"""The models of the model and decoding tests: three kinds of mixers in a repeated pattern."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    GatedDeltaNetConfig,
    ModelConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.model import HybridLM

VOCAB = 53
CHUNK = 8

LINEAR = GatedDeltaNetConfig(num_heads=2, key_dim=8, value_dim=8)
SOFTMAX = SoftmaxConfig(num_heads=4, num_kv_heads=2, head_dim=8)
ROUTED = ChunkRoutedConfig(
    num_heads=2, key_dim=8, value_dim=16, num_softmax_heads=4, chunk_size=CHUNK
)


def tiny(*mixers, channels: bool = True, **fields) -> ModelConfig:
    """A float32 model of one block per mixer; by default two repeats of all three kinds + one."""
    channel_mixer = SwiGLUConfig(width=32) if channels else None
    blocks = [
        BlockConfig(mixer=mixer, channel_mixer=channel_mixer)
        for mixer in mixers or (LINEAR, SOFTMAX, ROUTED, LINEAR, SOFTMAX, ROUTED, ROUTED)
    ]
    defaults = {"vocab_size": VOCAB, "dim": 16, "compute_dtype": "float32", "remat": "none"}
    return ModelConfig(blocks=tuple(blocks), **{**defaults, **fields})


@functools.cache
def build(config: ModelConfig, seed: int = 0) -> HybridLM:
    """A model with weights large enough for routing and attention to have something to say.

    Drawn by NumPy: compiling the initialisers of so many small models would take minutes.
    """
    random = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    flat = []
    for path, leaf in nnx.to_flat_state(params):
        draw = random.normal(size=leaf.get_value().shape)
        if path[-1] == "A_log":
            value = draw
        elif path[-1] == "dt_bias":
            value = draw - 2
        elif draw.ndim == (2 if path[0] == "groups" else 1):  # of norms
            value = 1 + 0.2 * draw
        else:
            value = 0.12 * draw
        flat.append((path, leaf.replace(jnp.asarray(value, leaf.get_value().dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)
