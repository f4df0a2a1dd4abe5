"""What each family of published models calls its parameters and its settings.

A family reads a `config.json` into a ModelConfig, writes one back, and names every parameter. To
add one, give FAMILIES another entry with these three; nothing else knows names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jhybrid.config import (
    BlockConfig,
    ModelConfig,
    RopeScaling,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.errors import UserError

MAX_DEPTH = 256


class Name(NamedTuple):
    """A parameter's name in a checkpoint; `{}` stands for the number of its block.

    `transposed`: stored as [out, in], where ours is [in, out].
    """

    pattern: str
    transposed: bool = False


def _linear(pattern: str) -> Name:
    return Name(pattern, transposed=True)


# By our own path, without the number of the block.
HUGGING_FACE_TRANSFORMER: Mapping[str, Name] = {
    "embed": Name("model.embed_tokens.weight"),
    "blocks.mixer_norm.weight": Name("model.layers.{}.input_layernorm.weight"),
    "blocks.mixer.q_proj.weight": _linear("model.layers.{}.self_attn.q_proj.weight"),
    "blocks.mixer.k_proj.weight": _linear("model.layers.{}.self_attn.k_proj.weight"),
    "blocks.mixer.v_proj.weight": _linear("model.layers.{}.self_attn.v_proj.weight"),
    "blocks.mixer.o_proj.weight": _linear("model.layers.{}.self_attn.o_proj.weight"),
    "blocks.mixer.q_proj.bias": Name("model.layers.{}.self_attn.q_proj.bias"),
    "blocks.mixer.k_proj.bias": Name("model.layers.{}.self_attn.k_proj.bias"),
    "blocks.mixer.v_proj.bias": Name("model.layers.{}.self_attn.v_proj.bias"),
    "blocks.mixer.q_norm.weight": Name("model.layers.{}.self_attn.q_norm.weight"),
    "blocks.mixer.k_norm.weight": Name("model.layers.{}.self_attn.k_norm.weight"),
    "blocks.channel_norm.weight": Name("model.layers.{}.post_attention_layernorm.weight"),
    "blocks.channel_mixer.gate_proj.weight": _linear("model.layers.{}.mlp.gate_proj.weight"),
    "blocks.channel_mixer.up_proj.weight": _linear("model.layers.{}.mlp.up_proj.weight"),
    "blocks.channel_mixer.down_proj.weight": _linear("model.layers.{}.mlp.down_proj.weight"),
    "norm.weight": Name("model.norm.weight"),
    "head": _linear("lm_head.weight"),
}

GGUF_LLAMA: Mapping[str, Name] = {
    "embed": Name("token_embd.weight"),
    "blocks.mixer_norm.weight": Name("blk.{}.attn_norm.weight"),
    "blocks.mixer.q_proj.weight": _linear("blk.{}.attn_q.weight"),
    "blocks.mixer.k_proj.weight": _linear("blk.{}.attn_k.weight"),
    "blocks.mixer.v_proj.weight": _linear("blk.{}.attn_v.weight"),
    "blocks.mixer.o_proj.weight": _linear("blk.{}.attn_output.weight"),
    "blocks.channel_norm.weight": Name("blk.{}.ffn_norm.weight"),
    "blocks.channel_mixer.gate_proj.weight": _linear("blk.{}.ffn_gate.weight"),
    "blocks.channel_mixer.up_proj.weight": _linear("blk.{}.ffn_up.weight"),
    "blocks.channel_mixer.down_proj.weight": _linear("blk.{}.ffn_down.weight"),
    "norm.weight": Name("output_norm.weight"),
    "head": _linear("output.weight"),
}


def published_name(names: Mapping[str, Name], path: str) -> Name:
    """What `names` calls our parameter `path` ("blocks.5.mixer.q_proj.weight", "embed")."""
    if not path.startswith("blocks."):
        return names[path]
    _, number, rest = path.split(".", 2)
    name = names[f"blocks.{rest}"]
    return name._replace(pattern=name.pattern.format(number))


class Fields:
    """The settings of a published model; every complaint names the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def refuse(self, name: str, why: str) -> UserError:
        return UserError(f"{self.where}: {name}={self.values.get(name)!r} {why}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value, of type `kind`; `default` where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: {name} is missing")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise self.refuse(name, f"must be {kind.__name__}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, int, default)
        if value < 1:
            raise self.refuse(name, "must be positive")
        return value

    def depth(self, name: str) -> int:
        """A number of layers, small enough to list them before any tensor was seen."""
        value = self.size(name)
        if value > MAX_DEPTH:
            raise self.refuse(name, f"must be at most {MAX_DEPTH}")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Refuses any value but `supported`, which an absent field stands for."""
        if self.values.get(name, supported) not in (supported, None):
            raise self.refuse(name, f"is not supported, only {supported!r} is")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerFamily:
    """Pre-norm decoders of grouped-query softmax attention and SwiGLU, as in Llama."""

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads, where not stated
    windows: Literal["never", "always", "by_layer"] = "never"
    names = HUGGING_FACE_TRANSFORMER

    def read(self, fields: Fields) -> ModelConfig:
        for name, supported in (
            ("hidden_act", "silu"),
            ("attention_bias", False),  # would bias the output projection too
            ("mlp_bias", False),
            ("partial_rotary_factor", 1.0),
        ):
            fields.only(name, supported)
        dim, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        depth = fields.depth("num_hidden_layers")
        theta, scaling = _read_rope(fields)
        mixer = SoftmaxConfig(
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", self.head_dim or dim // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
        )
        channels = SwiGLUConfig(width=fields.size("intermediate_size"))
        return ModelConfig(
            vocab_size=fields.size("vocab_size"),
            dim=dim,
            blocks=tuple(
                BlockConfig(mixer=dataclasses.replace(mixer, window=w), channel_mixer=channels)
                for w in self._read_windows(fields, depth)
            ),
            tied_head=fields.get("tie_word_embeddings", bool, False),
            norm_eps=fields.get("rms_norm_eps", float),
        )

    def write(self, model: ModelConfig) -> dict[str, Any] | None:
        """The fields of `config.json` that decide the model; None if it has other parts.

        That the family can express the model is for the reader of these fields to find out.
        """
        mixer, channels = model.blocks[0].mixer, model.blocks[0].channel_mixer
        if not isinstance(mixer, SoftmaxConfig) or not isinstance(channels, SwiGLUConfig):
            return None
        scaling = mixer.rope_scaling
        fields: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "intermediate_size": channels.width,
            "num_hidden_layers": len(model.blocks),
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "rope_theta": mixer.rope_theta,
            "rope_scaling": scaling
            and {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_turns,
                "high_freq_factor": scaling.high_turns,
                "original_max_position_embeddings": scaling.original_length,
            },
            "tie_word_embeddings": model.tied_head,
            "torch_dtype": model.param_dtype,
        }
        windows = [getattr(block.mixer, "window", None) for block in model.blocks]
        widest = max((w for w in windows if w is not None), default=None)
        if self.windows != "never":
            fields["sliding_window"] = widest
        if self.windows == "by_layer":
            fields["use_sliding_window"] = widest is not None
            fields["layer_types"] = [
                "full_attention" if w is None else "sliding_attention" for w in windows
            ]
        return fields

    def _read_windows(self, fields: Fields, depth: int) -> Sequence[int | None]:
        if self.windows == "never" or fields.values.get("sliding_window") is None:
            return (None,) * depth
        window = fields.size("sliding_window")
        if self.windows == "always":
            return (window,) * depth
        if not fields.get("use_sliding_window", bool, False):
            return (None,) * depth
        if fields.values.get("layer_types") is None:
            first = fields.get("max_window_layers", int)
            return tuple(window if i >= first else None for i in range(depth))
        kinds = {"full_attention": None, "sliding_attention": window}
        layer_types = fields.get("layer_types", list)
        if len(layer_types) != depth or not all(kind in kinds for kind in layer_types):
            raise fields.refuse("layer_types", f"must be {depth} of {', '.join(kinds)}")
        return tuple(kinds[kind] for kind in layer_types)


def _read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters` of transformers 5, or the fields before it."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    rope = Fields(fields.get(name, dict, {}), f"{fields.where}: {name}")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UserError(f"{rope.where}: one rotation per layer type is not supported")
    rope.only("partial_rotary_factor", 1.0)
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10_000.0))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{rope.where}: rope_type={kind!r} is not supported, only 'llama3' is")
    return theta, RopeScaling(
        factor=rope.get("factor", float),
        low_turns=rope.get("low_freq_factor", float),
        high_turns=rope.get("high_freq_factor", float),
        original_length=rope.size("original_max_position_embeddings"),
    )


FAMILIES: Mapping[str, TransformerFamily] = {
    family.architecture: family
    for family in (
        # also SmolLM and SmolLM2
        TransformerFamily(architecture="LlamaForCausalLM", model_type="llama"),
        TransformerFamily(
            architecture="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True, windows="by_layer"
        ),
        TransformerFamily(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            qk_norm=True,
            head_dim=128,
            windows="by_layer",
        ),
        TransformerFamily(
            architecture="MistralForCausalLM", model_type="mistral", windows="always"
        ),
    )
}


def family_of(fields: Fields) -> TransformerFamily:
    """The family that `architectures` names."""
    architectures = fields.get("architectures", list)
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        raise fields.refuse("architectures", f"is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[architectures[0]]


def describe(model: ModelConfig, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(family, config.json) of a model.

    `template` is the config.json the model was imported with, or empty: its family is tried first,
    and what the model does not decide (token ids, the longest context) is taken from it. A family
    fits when the model is what it reads back.
    """
    named = template.get("architectures") or [None]
    order = sorted(FAMILIES.values(), key=lambda family: family.architecture != named[0])
    # these two say, since transformers 5, what `rope_theta` and `torch_dtype` say as well
    kept = {k: v for k, v in template.items() if k not in ("rope_parameters", "dtype")}
    for family in order:
        written = family.write(model)
        if written is None:
            continue
        config = {**kept, **written}
        try:
            found = family.read(Fields(config, "config.json"))
        except UserError:
            continue
        if same_function(found, model):
            return family, config
    raise UserError(
        f"model: none of {', '.join(FAMILIES)} can express it: they are stacks of equal blocks of "
        "softmax attention and SwiGLU, with one window"
    )


def same_function(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether two configs compute the same from the same parameters, up to rounding."""
    fields = ("vocab_size", "dim", "blocks", "tied_head", "embed_norm", "norm_eps")
    return all(getattr(a, name) == getattr(b, name) for name in fields)
