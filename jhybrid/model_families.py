"""The families of the systematic hybrid study as models of any width and layout. Imports no JAX.

Sizes per layer are those of flash-linear-attention 0.6.0 and flame's configs
(github.com/fla-org/flash-linear-attention, github.com/fla-org/flame); Gated DeltaNet's are those of
the study's checkpoints (arXiv 2507.06457). At dim=1024 and depth=24 a family has 374 to 400 million
parameters ("340M"), at dim=2048 1.3 to 1.5 billion ("1.3B").
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jhybrid.config import (
    BlockConfig,
    GatedDeltaNetConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.config_fields import require, require_multiple
from jhybrid.layouts import full_layers
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

Layer = tuple[BlockConfig, ...]


def hybrid(
    family: str,
    layout: str = "pure",
    *,
    dim: int = 1024,
    depth: int = 24,
    vocab_size: int = 32_000,
    **fields: Any,
) -> ModelConfig:
    """The model of `family` whose full layers `layout` names; `fields` are ModelConfig's others.

    `depth` counts layers of a token mixer and a channel mixer; a layer of Mamba-2 is two of its
    blocks, one of RWKV-6 a block for each half. Raises UserError for an unknown family, an unknown
    layout or one that `depth` does not fit, and a width its heads do not divide.
    """
    require(family in FAMILIES, f"family={family!r}: choose one of {', '.join(FAMILIES)}")
    linear = FAMILIES[family](dim)
    full = _full(linear, dim)
    chosen = full_layers(layout, depth)
    layers = (full if i in chosen else linear for i in range(depth))
    if family in ("rwkv6", "mamba2"):
        fields.setdefault("norm_eps", 1e-5)
    return ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        blocks=tuple(block for layer in layers for block in layer),
        embed_norm=family == "rwkv6",
        **fields,
    )


def like(model: ModelConfig, family: str, layout: str, *, depth: int) -> ModelConfig:
    """`hybrid` with the width, the vocabulary and the settings of `model`, not its blocks."""
    names = {field.name for field in dataclasses.fields(model)}
    names -= {"dim", "vocab_size", "blocks", "embed_norm", "norm_eps"}
    settings = {name: getattr(model, name) for name in names}
    sizes = {"dim": model.dim, "depth": depth, "vocab_size": model.vocab_size}
    return hybrid(family, layout, **sizes, **settings)


def _full(linear: Layer, dim: int) -> Layer:
    """A layer of softmax attention with the linear layer's norms and channel mixer."""
    full = _softmax(dim)
    if isinstance(linear[0].mixer, Mamba2Config):  # which has no channel mixer
        return full
    return (dataclasses.replace(linear[0], mixer=full[0].mixer), *linear[1:])


def _heads(dim: int, head_dim: int) -> int:
    require_multiple("dim", dim, "head_dim", head_dim)
    return dim // head_dim


def _share(dim: int, parts: int) -> int:
    require_multiple("dim", dim, "heads", parts)
    return dim // parts


def _swiglu(dim: int, ratio: int = 4) -> SwiGLUConfig:
    """2/3 of `ratio` times the width, rounded up to a multiple of 256."""
    return SwiGLUConfig(width=-(-(dim * ratio * 2 // 3) // 256) * 256)


def _layer(mixer: MixerConfig, dim: int, ratio: int = 4) -> Layer:
    return (BlockConfig(mixer=mixer, channel_mixer=_swiglu(dim, ratio)),)


def _softmax(dim: int) -> Layer:
    heads = _heads(dim, 64)
    return _layer(SoftmaxConfig(num_heads=heads, num_kv_heads=heads, head_dim=64), dim)


def _delta_net(dim: int) -> Layer:
    heads = _heads(dim, 128)
    return _layer(DeltaNetConfig(num_heads=heads, key_dim=128, value_dim=128), dim)


def _gated_delta_net(dim: int) -> Layer:
    heads = _heads(dim, 256)
    return _layer(GatedDeltaNetConfig(num_heads=heads, key_dim=256, value_dim=256), dim)


def _kda(dim: int) -> Layer:
    return _layer(KDAConfig(num_heads=_heads(dim, 128), key_dim=128, value_dim=128), dim)


def _gla(dim: int) -> Layer:
    value = _share(dim, 8) * 2
    return _layer(GLAConfig(num_heads=4, key_dim=value // 2, value_dim=value), dim)


def _retnet(dim: int) -> Layer:
    key = _share(dim, 16) * 2
    return _layer(RetNetConfig(num_heads=8, key_dim=key, value_dim=2 * key), dim, ratio=2)


def _hgrn(dim: int) -> Layer:
    return _layer(HGRNConfig(width=dim), dim)


def _hgrn2(dim: int) -> Layer:
    return _layer(HGRN2Config(num_heads=_heads(dim, 128), key_dim=128, value_dim=128), dim)


def _lightning(dim: int) -> Layer:
    return _layer(LightningConfig(num_heads=_heads(dim, 128), key_dim=128, value_dim=128), dim)


def _mamba2(dim: int) -> Layer:
    mixer = Mamba2Config(num_heads=2 * _heads(dim, 64), key_dim=128, value_dim=64)
    return (BlockConfig(mixer=mixer, channel_mixer=None),) * 2


def _rwkv6(dim: int) -> Layer:
    value = _share(dim, 8) * 2
    halves = (
        RWKV6Config(num_heads=4, key_dim=value // 2, value_dim=value),
        RWKV6ChannelConfig(width=-(-int(3.5 * dim) // 32) * 32),
    )
    return tuple(BlockConfig(mixer=half, channel_mixer=None, norm="layer") for half in halves)


# One layer of each, by the model's width.
FAMILIES: Mapping[str, Callable[[int], Layer]] = {
    "softmax": _softmax,
    "hgrn": _hgrn,
    "hgrn2": _hgrn2,
    "retnet": _retnet,
    "lightning": _lightning,
    "gla": _gla,
    "mamba2": _mamba2,
    "rwkv6": _rwkv6,
    "delta_net": _delta_net,
    "gated_delta_net": _gated_delta_net,
    "kda": _kda,
}
