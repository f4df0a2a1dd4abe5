"""Where flash-linear-attention 0.6.0 keeps each parameter of a model, and in which shape.

Its checkpoints of one family, hybrids with softmax layers included, and a `ModelConfig` of the same
sizes hold the same numbers; `sources` says how they correspond.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jhybrid.config import GatedDeltaNetConfig, MixerConfig, ModelConfig, SoftmaxConfig
from jhybrid.recurrent_config import (
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    Mamba2Config,
    RetNetConfig,
    RWKV6ChannelConfig,
    RWKV6Config,
)


class Layout(NamedTuple):
    """How a tensor of a checkpoint becomes a parameter, and a parameter that tensor."""

    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


SAME = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(np.transpose, np.transpose)  # [out, in] -> [in, out]
TAPS = Layout(lambda x: x[:, 0].T, lambda x: x.T[:, None])  # [channels, 1, width] -> [width, ...]


def _flat(*shape: int) -> Layout:
    return Layout(lambda x: x.reshape(-1), lambda x: x.reshape(shape))


class Source(NamedTuple):
    """A tensor of a checkpoint by name, and the parameter that it, or some rows of it, becomes."""

    name: str
    layout: Layout = SAME
    rows: tuple[int, int] | None = None  # first and number

    def convert(self, tensor: np.ndarray) -> np.ndarray:
        if self.rows is not None:
            first, count = self.rows
            tensor = tensor[first : first + count]
        return self.layout.ours(tensor)


def sources(model: ModelConfig) -> dict[str, Source]:
    """The source of every parameter of `model`, by its path with blocks numbered ("blocks.3.…")."""
    mamba = any(isinstance(block.mixer, Mamba2Config) for block in model.blocks)
    root = "backbone" if mamba else "model"
    found = {
        "embed": Source(f"{root}.embeddings.weight"),
        "norm.weight": Source(f"{root}.{'norm_f' if mamba else 'norm'}.weight"),
    }
    if model.blocks[-1].norm == "layer":
        found["norm.bias"] = Source(f"{root}.norm.bias")
    if model.embed_norm:
        found["embed_norm.weight"] = Source(f"{root}.layers.0.pre_norm.weight")
        found["embed_norm.bias"] = Source(f"{root}.layers.0.pre_norm.bias")
    if model.gate_width is not None:
        found["lower_bounds"] = Source(f"{root}.lower_bounds")
    if not model.tied_head:
        found["head"] = Source("lm_head.weight", TRANSPOSED)
    layer = -1
    for i, block in enumerate(model.blocks):
        channels = isinstance(block.mixer, RWKV6ChannelConfig)  # the second half of its layer
        layer += not channels
        place = f"{root}.layers.{layer}"
        norm = "norm" if mamba else "ffn_norm" if channels else "attn_norm"
        inside = "mixer" if mamba else "ffn" if channels else "attn"
        ours = f"blocks.{i}"
        found[f"{ours}.mixer_norm.weight"] = Source(f"{place}.{norm}.weight")
        if block.norm == "layer":
            found[f"{ours}.mixer_norm.bias"] = Source(f"{place}.{norm}.bias")
        for path, own in _mixer(block.mixer).items():
            found[f"{ours}.mixer.{path}"] = own._replace(name=f"{place}.{inside}.{own.name}")
        if block.channel_mixer is not None:
            found[f"{ours}.channel_norm.weight"] = Source(f"{place}.mlp_norm.weight")
            for name in ("gate_proj", "up_proj", "down_proj"):
                path = f"{ours}.channel_mixer.{name}.weight"
                found[path] = Source(f"{place}.mlp.{name}.weight", TRANSPOSED)
    return found


def _projections(*names: str) -> dict[str, Source]:
    return {f"{name}_proj.weight": Source(f"{name}_proj.weight", TRANSPOSED) for name in names}


def _low_rank(ours: str, down: str, up: str, *, bias: bool) -> dict[str, Source]:
    found = {
        f"{ours}.down.weight": Source(f"{down}.weight", TRANSPOSED),
        f"{ours}.up.weight": Source(f"{up}.weight", TRANSPOSED),
    }
    return found | ({f"{ours}.up.bias": Source(f"{up}.bias")} if bias else {})


def _convolved(*own: str) -> dict[str, Source]:
    """q, k and v with their convolutions, and the projections `own` of a delta rule's gates."""
    found = {f"inputs.{path}": source for path, source in _projections("q", "k", "v", *own).items()}
    for name in ("q", "k", "v"):
        found[f"inputs.{name}_conv.weight"] = Source(f"{name}_conv1d.weight", TAPS)
    return found


def _mixer(mixer: MixerConfig) -> Mapping[str, Source]:
    o_norm = {"o_norm.weight": Source("o_norm.weight")}
    swish_norm = {"o_norm.weight": Source("g_norm_swish_gate.weight")}
    plain_norm = {"o_norm.weight": Source("g_norm.weight")}
    rates = {"A_log": Source("A_log"), "dt_bias": Source("dt_bias")}
    match mixer:
        case SoftmaxConfig():
            found = _projections("q", "k", "v", "o")
            for name in ("q", "k", "v") if mixer.qkv_bias else ():
                found[f"{name}_proj.bias"] = Source(f"{name}_proj.bias")
            for name in ("q_norm.weight", "k_norm.weight") if mixer.qk_norm else ():
                found[name] = Source(name)
            return found
        case GatedDeltaNetConfig():
            gates = {f"inputs.{path}": source for path, source in rates.items()}
            return _convolved("a", "b") | gates | _projections("g", "o") | o_norm
        case KDAConfig():  # before DeltaNetConfig, which it is one of
            decay = _low_rank("decay", "f_proj.0", "f_proj.1", bias=False)
            gate = _low_rank("gate", "g_proj.0", "g_proj.1", bias=True)
            return _convolved() | rates | decay | gate | _projections("b", "o") | o_norm
        case DeltaNetConfig():
            return _convolved() | _projections("b", "o") | o_norm
        case GLAConfig():
            decay = _low_rank("decay", "gk_proj.0", "gk_proj.1", bias=True)
            return _projections("q", "k", "v", "g", "o") | decay | swish_norm
        case RetNetConfig():
            return _projections("q", "k", "v", "g", "o") | swish_norm
        case HGRNConfig():
            return _projections("i", "f", "g", "o") | plain_norm
        case HGRN2Config():
            return _projections("q", "f", "i", "o") | plain_norm
        case Mamba2Config():
            return _mamba2(mixer) | rates
        case RWKV6Config():
            return _rwkv6(mixer)
        case RWKV6ChannelConfig():
            return {
                "key_mix": Source("key.mu"),
                "receptance_mix": Source("receptance.mu"),
                "k_proj.weight": Source("key.linear.weight", TRANSPOSED),
                "r_proj.weight": Source("receptance.linear.weight", TRANSPOSED),
                "v_proj.weight": Source("value.weight", TRANSPOSED),
            }
    raise TypeError(f"no names for {type(mixer).__name__}")  # no config of theirs says it


def _mamba2(mixer: Mamba2Config) -> dict[str, Source]:
    """in_proj holds the rows of z, x, B, C and dt; its convolution's channels are x, B and C."""
    width, keys = mixer.num_heads * mixer.value_dim, mixer.num_groups * mixer.key_dim

    def projection(first: int, count: int) -> Source:
        return Source("in_proj.weight", TRANSPOSED, (first, count))

    found = {
        "z_proj.weight": projection(0, width),
        "dt_proj.weight": projection(2 * width + 2 * keys, mixer.num_heads),
        "D": Source("D"),
        "o_norm": Source("norm.weight"),
        "o_proj.weight": Source("out_proj.weight", TRANSPOSED),
    }
    spans = {"v": (0, width), "k": (width, keys), "q": (width + keys, keys)}  # x, B, C
    for name, (first, count) in spans.items():
        channels = (first, count)
        found[f"inputs.{name}_proj.weight"] = projection(width + first, count)
        found[f"inputs.{name}_conv.weight"] = Source("conv1d.weight", TAPS, channels)
        found[f"inputs.{name}_conv.bias"] = Source("conv1d.bias", SAME, channels)
    return found


def _rwkv6(mixer: RWKV6Config) -> dict[str, Source]:
    rank = mixer.shift_rank
    mixes = Layout(  # [D, 5 * rank] -> [5, rank, D]
        lambda x: x.reshape(x.shape[0], 5, rank).transpose(1, 2, 0),
        lambda x: x.transpose(2, 0, 1).reshape(x.shape[2], 5 * rank),
    )
    found = {
        f"{name}_proj.weight": Source(f"{name}_proj.linear.weight", TRANSPOSED)
        for name in ("r", "k", "v", "g")
    }
    decay = _low_rank("w_proj", "w_proj.linear.lora.0", "w_proj.linear.lora.2", bias=True)
    return (
        found
        | decay
        | {
            "mix": Source("x_proj.0.mu"),
            "mix_down.weight": Source("x_proj.0.linear.weight", TRANSPOSED),
            "mix_up": Source("x_proj.2.weight", mixes),
            "mix_bias": Source("x_bias", _flat(5, -1)),
            "bonus": Source("bonus", _flat(mixer.num_heads, mixer.key_dim)),
            "o_weight": Source("g_norm.weight"),
            "o_bias": Source("g_norm.bias"),
            "o_proj.weight": Source("o_proj.weight", TRANSPOSED),
        }
    )
