"""The `config.json` of a flash-linear-attention 0.6.0 model as a ModelConfig, and back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jhybrid.checkpoint import differing_fields
from jhybrid.config import (
    BlockConfig,
    GatedDeltaNetConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.convert.families import Fields, same_function
from jhybrid.errors import UserError
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

# Every setting that would change the model and that ours has no counterpart of.
_ONLY = {
    "hidden_act": "swish",
    "elementwise_affine": True,
    "feature_map": None,
    "clamp_min": None,
    "num_kv_heads": None,
    "use_output_gate": True,
    "use_gk": True,
    "use_gv": False,
    "attnres_block_size": None,
}


def read_config(fields: Fields) -> ModelConfig:
    """The model; UserError names a field that is missing, malformed or unsupported."""
    kind = fields.get("model_type", str)
    if kind not in _MIXERS:
        raise fields.refuse("model_type", f"is not supported; known: {', '.join(_MIXERS)}")
    mamba, rwkv = kind == "mamba2", kind == "rwkv6"
    own = {"mamba2": {"hidden_act": "silu"}, "rwkv6": {"hidden_act": "sqrelu"}}.get(kind, {})
    heads = {"num_kv_heads": fields.values.get("num_kv_heads")} if kind == "transformer" else {}
    for name, supported in (_ONLY | own | heads).items():
        fields.only(name, supported)
    dim = fields.size("hidden_size", 2048)
    depth = fields.size("num_hidden_layers", {"mamba2": 48, "gated_deltanet": 21}.get(kind, 24))
    mixer = _MIXERS[kind](fields, dim)
    if mamba:
        linear = (BlockConfig(mixer=mixer, channel_mixer=None),)
    elif rwkv:
        fields.only("norm_bias", True)
        channels = RWKV6ChannelConfig(width=_width(fields, dim, 3.5, 1.0, 32))
        linear = tuple(
            BlockConfig(mixer=half, channel_mixer=None, norm="layer") for half in (mixer, channels)
        )
    else:
        width = _width(fields, dim, 2 if kind == "retnet" else 4, 2 / 3, 256)
        linear = (BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=width)),)
    softmax = {} if mamba or kind == "transformer" else _softmax_layers(fields, dim, depth)
    layers = (
        (dataclasses.replace(linear[0], mixer=softmax[i]), *linear[1:]) if i in softmax else linear
        for i in range(depth)
    )
    return ModelConfig(
        vocab_size=fields.size("vocab_size", 32_000),
        dim=dim,
        blocks=tuple(block for layer in layers for block in layer),
        tied_head=fields.get("tie_word_embeddings", bool, False),
        embed_norm=rwkv and fields.get("norm_first", bool, True),
        norm_eps=fields.get("norm_eps", float, 1e-5 if mamba or rwkv else 1e-6),
    )


def _width(fields: Fields, dim: int, ratio: float, share: float, multiple: int) -> int:
    """`intermediate_size`, or what stands for it: share * ratio * dim, rounded up."""
    if fields.values.get("intermediate_size") is not None:
        return fields.size("intermediate_size")
    exact = int(dim * fields.get("hidden_ratio", float, float(ratio)) * share)
    return -(-exact // multiple) * multiple


def _softmax_layers(fields: Fields, dim: int, depth: int) -> dict[int, SoftmaxConfig]:
    """The softmax layers of a hybrid, from `attn`: one set of settings or a list of them."""
    value = fields.values.get("attn") or []
    found = {}
    for settings in value if isinstance(value, list) else [value]:
        if not isinstance(settings, dict):
            raise fields.refuse("attn", "must be an object or a list of objects")
        attn = Fields(settings, f"{fields.where}: attn")
        for layer in attn.get("layers", list):
            if type(layer) is not int or not 0 <= layer < depth or layer in found:
                raise attn.refuse("layers", f"must be different numbers from 0 to {depth - 1}")
            found[layer] = _softmax(attn, dim)
    return found


def _softmax(fields: Fields, dim: int) -> SoftmaxConfig:
    heads = fields.size("num_heads", 32)
    window = fields.values.get("window_size")
    return SoftmaxConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_kv_heads", heads),
        head_dim=_share(fields, dim, heads),
        rope_theta=fields.get("rope_theta", float, 10_000.0),
        qkv_bias=fields.get("qkv_bias", bool, False),
        qk_norm=fields.get("qk_norm", bool, False),
        window=None if window is None else fields.size("window_size"),
    )


def _share(fields: Fields, dim: float, heads: int) -> int:
    """Dims of each of `heads` that share `dim`."""
    if dim != int(dim) or int(dim) % heads:
        raise UserError(f"{fields.where}: {heads} heads cannot share {dim:g} dims evenly")
    return int(dim) // heads


def _heads(fields: Fields, dim: int, count: int, keys: float, values: float) -> dict[str, int]:
    """num_heads, key_dim and value_dim from the shares of `dim` that keys and values take."""
    heads = fields.size("num_heads", count)
    key = _share(fields, dim * fields.get("expand_k", float, keys), heads)
    value = _share(fields, dim * fields.get("expand_v", float, values), heads)
    return {"num_heads": heads, "key_dim": key, "value_dim": value}


def _conv(fields: Fields) -> int:
    fields.only("use_short_conv", True)
    return fields.size("conv_size", 4)


def _gla(fields: Fields, dim: int) -> MixerConfig:
    fields.only("use_short_conv", False)
    return GLAConfig(**_heads(fields, dim, 4, 0.5, 1.0))


def _retnet(fields: Fields, dim: int) -> MixerConfig:
    fields.only("use_short_conv", False)
    return RetNetConfig(**_heads(fields, dim, 8, 1.0, 2.0))


def _hgrn(fields: Fields, dim: int) -> MixerConfig:
    fields.only("use_short_conv", False)
    bound = fields.get("use_lower_bound", bool, True)
    fields.only("expand_ratio", 1)  # the lower bounds of another would not fit its own model
    return HGRNConfig(width=dim, lower_bound=bound)


def _hgrn2(fields: Fields, dim: int) -> MixerConfig:
    fields.only("use_short_conv", False)
    if fields.values.get("num_heads") is None:
        heads = _share(fields, dim, fields.size("expand_ratio", 128))
    else:
        heads = fields.size("num_heads")
    size = _share(fields, dim, heads)
    bound = fields.get("use_lower_bound", bool, True)
    return HGRN2Config(num_heads=heads, key_dim=size, value_dim=size, lower_bound=bound)


def _mamba2(fields: Fields, dim: int) -> MixerConfig:
    for name, supported in (
        ("use_bias", False),
        ("use_conv_bias", True),
        ("D_has_hdim", False),
        ("rmsnorm", True),
        ("norm_before_gate", False),
    ):
        fields.only(name, supported)
    head_dim = fields.size("head_dim", 64)
    return Mamba2Config(
        num_heads=_share(fields, dim * fields.size("expand", 2), head_dim),
        key_dim=fields.size("state_size", 128),
        value_dim=head_dim,
        num_groups=fields.size("n_groups", 1),
        conv_width=fields.size("conv_kernel", 4),
    )


def _rwkv6(fields: Fields, dim: int) -> MixerConfig:
    return RWKV6Config(
        **_heads(fields, dim, 4, 0.5, 1.0),
        shift_rank=fields.size("proj_low_rank_dim", 32),
        decay_rank=fields.size("gate_low_rank_dim", 64),
    )


def _delta_net(fields: Fields, dim: int) -> MixerConfig:
    for name, supported in (
        ("use_gate", False),
        ("use_beta", True),
        ("use_output_norm", True),
        ("qk_norm", "l2"),
        ("qk_activation", "silu"),
    ):
        fields.only(name, supported)
    return DeltaNetConfig(
        **_heads(fields, dim, 16, 1.0, 1.0),
        conv_width=_conv(fields),
        negative_eigenvalues=fields.get("allow_neg_eigval", bool, False),
    )


def _gated_delta_net(fields: Fields, dim: int) -> MixerConfig:
    fields.only("use_gate", True)
    fields.only("output_gate_activation", "swish")
    heads, key = fields.size("num_heads", 6), fields.size("head_dim", 256)
    own = fields.size("num_v_heads", heads)
    return GatedDeltaNetConfig(
        num_heads=heads,
        key_dim=key,
        value_dim=_share(fields, key * fields.get("expand_v", float, 2.0), 1),
        num_value_heads=None if fields.values.get("num_v_heads") is None else own,
        conv_width=_conv(fields),
        negative_eigenvalues=fields.get("allow_neg_eigval", bool, False),
    )


def _kda(fields: Fields, dim: int) -> MixerConfig:
    fields.only("safe_gate", False)
    fields.only("lower_bound", None)
    heads, key = fields.size("num_heads", 16), fields.size("head_dim", 128)
    fields.only("num_v_heads", fields.values.get("num_heads", heads))
    return KDAConfig(
        num_heads=heads,
        key_dim=key,
        value_dim=_share(fields, key * fields.get("expand_v", float, 1.0), 1),
        conv_width=_conv(fields),
        negative_eigenvalues=fields.get("allow_neg_eigval", bool, False),
    )


_MIXERS: Mapping[str, Callable[[Fields, int], MixerConfig]] = {
    "transformer": _softmax,
    "gla": _gla,
    "retnet": _retnet,
    "hgrn": _hgrn,
    "hgrn2": _hgrn2,
    "mamba2": _mamba2,
    "rwkv6": _rwkv6,
    "delta_net": _delta_net,
    "gated_deltanet": _gated_delta_net,
    "kda": _kda,
}


def describe(model: ModelConfig, template: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model, which reads back as that model; UserError if none does.

    What the model does not decide (token ids, the longest context) is taken from `template`, the
    config.json it was imported with, if that is of the same kind.
    """
    written = _write(model)
    kept = template if template.get("model_type") == written["model_type"] else {}
    config = {**kept, **written}
    try:
        found = read_config(Fields(config, "its config.json"))
    except UserError as error:
        raise UserError(f"model: flash-linear-attention has no such model; {error}") from None
    if not same_function(found, model):
        own = {name: getattr(model, name) for name in OWN_FIELDS}
        fields = differing_fields(model, dataclasses.replace(found, **own), "model")
        raise UserError(f"model: flash-linear-attention has no such model; it has {fields[0]}")
    return config


# What two configs of the same function may differ in.
OWN_FIELDS = (
    "compute_dtype",
    "param_dtype",
    "remat",
    "scan_blocks",
    "loss_chunk_tokens",
    "implementation",
)


def _write(model: ModelConfig) -> dict[str, Any]:
    """A config of the model's family, with its sizes; whether it says all is not asked here."""
    mixers = [b.mixer for b in model.blocks if not isinstance(b.mixer, RWKV6ChannelConfig)]
    softmax = {i: m for i, m in enumerate(mixers) if isinstance(m, SoftmaxConfig)}
    mixer = next((m for m in mixers if not isinstance(m, SoftmaxConfig)), mixers[0])
    kind, own = _write_mixer(mixer, model.dim)
    if kind != "transformer" and softmax:
        own["attn"] = _write_softmax_layers(softmax)
    channels = model.blocks[-1].channel_mixer
    if isinstance(last := model.blocks[-1].mixer, RWKV6ChannelConfig):
        own |= {"intermediate_size": last.width, "norm_first": model.embed_norm}
    elif isinstance(channels, SwiGLUConfig):
        own["intermediate_size"] = channels.width
    return {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": model.dim,
        "num_hidden_layers": len(mixers),
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_head,
        "norm_eps": model.norm_eps,
        "torch_dtype": model.param_dtype,
        **own,
    }


def _write_softmax_layers(mixers: Mapping[int, SoftmaxConfig]) -> list[dict[str, Any]]:
    """`attn`: one set of settings for all layers that have them."""
    layers: dict[SoftmaxConfig, list[int]] = {}
    for i, mixer in mixers.items():
        layers.setdefault(mixer, []).append(i)
    found = []
    for mixer, indices in layers.items():
        settings = _write_softmax(mixer)
        del settings["qk_norm"]  # which their hybrids do not have
        found.append({"layers": indices, **settings})
    return found


def _write_softmax(mixer: SoftmaxConfig) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm,
        "window_size": mixer.window,
        "rope_theta": mixer.rope_theta,
    }


def _write_mixer(mixer: MixerConfig, dim: int) -> tuple[str, dict[str, Any]]:
    """The kind of model a mixer makes, and the settings that are its own."""

    def shares(count: int, key_dim: int, value_dim: int) -> dict[str, Any]:
        return {
            "num_heads": count,
            "expand_k": count * key_dim / dim,
            "expand_v": count * value_dim / dim,
        }

    match mixer:
        case SoftmaxConfig():
            return "transformer", _write_softmax(mixer)
        case GLAConfig() | RetNetConfig():
            kind = "gla" if isinstance(mixer, GLAConfig) else "retnet"
            return kind, shares(mixer.num_heads, mixer.key_dim, mixer.value_dim)
        case HGRNConfig():
            return "hgrn", {"expand_ratio": 1, "use_lower_bound": mixer.lower_bound}
        case HGRN2Config():
            return "hgrn2", {
                "num_heads": mixer.num_heads,
                "expand_ratio": mixer.key_dim,
                "use_lower_bound": mixer.lower_bound,
            }
        case Mamba2Config():
            return "mamba2", {
                "num_heads": mixer.num_heads,
                "head_dim": mixer.value_dim,
                "expand": mixer.num_heads * mixer.value_dim // dim,
                "state_size": mixer.key_dim,
                "n_groups": mixer.num_groups,
                "conv_kernel": mixer.conv_width,
            }
        case RWKV6Config():
            return "rwkv6", {
                **shares(mixer.num_heads, mixer.key_dim, mixer.value_dim),
                "proj_low_rank_dim": mixer.shift_rank,
                "gate_low_rank_dim": mixer.decay_rank,
            }
        case KDAConfig():  # before DeltaNetConfig, which it is one of
            return "kda", {
                "num_heads": mixer.num_heads,
                "head_dim": mixer.key_dim,
                "expand_v": mixer.value_dim / mixer.key_dim,
                "conv_size": mixer.conv_width,
                "allow_neg_eigval": mixer.negative_eigenvalues,
            }
        case DeltaNetConfig():
            return "delta_net", {
                **shares(mixer.num_heads, mixer.key_dim, mixer.value_dim),
                "conv_size": mixer.conv_width,
                "allow_neg_eigval": mixer.negative_eigenvalues,
            }
        case GatedDeltaNetConfig():
            return "gated_deltanet", {
                "num_heads": mixer.num_heads,
                "num_v_heads": mixer.num_value_heads,
                "head_dim": mixer.key_dim,
                "expand_v": mixer.value_dim / mixer.key_dim,
                "conv_size": mixer.conv_width,
                "allow_neg_eigval": mixer.negative_eigenvalues,
            }
    name = type(mixer).__name__.removesuffix("Config")
    raise UserError(f"model: flash-linear-attention has no such model; its {name} is unknown there")


_CLASSES: Mapping[str, str] = {
    "transformer": "Transformer",
    "gla": "GLA",
    "retnet": "RetNet",
    "hgrn": "HGRN",
    "hgrn2": "HGRN2",
    "mamba2": "Mamba2",
    "rwkv6": "RWKV6",
    "delta_net": "DeltaNet",
    "gated_deltanet": "GatedDeltaNet",
    "kda": "KDA",
}
