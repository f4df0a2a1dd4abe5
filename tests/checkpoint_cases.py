"""Small random checkpoints of each published family, as Hugging Face writes them.

Names and shapes are written out here as transformers has them, not taken from our tables. Weights
come from NumPy's legacy generator, whose stream never changes, so that recorded logits stay valid.
"""

import json

import numpy as np
from safetensors.numpy import save_file

VOCAB, DIM, WIDTH, DEPTH = 264, 48, 40, 2  # a vocabulary with room for bytes
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
QWEN2 = {
    **COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 9,
    "max_window_layers": 1,
}
CONFIGS = {
    "llama3": {
        **LLAMA,
        "head_dim": 16,  # not 48 / 4
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "smollm2": {
        **LLAMA,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen2.5": QWEN2,
    "qwen2_window": {**QWEN2, "use_sliding_window": True},
    "qwen3": {
        **LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "mistral": {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 7,
    },
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by name; matrices are [out, in]."""
    dim, width = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", dim // heads)
    found = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], dim)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, out in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (out, dim)
            if config["model_type"] == "qwen2":
                found[f"{layer}.self_attn.{name}_proj.bias"] = (out,)
        found[f"{layer}.self_attn.o_proj.weight"] = (dim, heads * head)
        if config["model_type"] == "qwen3":
            found[f"{layer}.self_attn.q_norm.weight"] = (head,)
            found[f"{layer}.self_attn.k_norm.weight"] = (head,)
        found[f"{layer}.mlp.gate_proj.weight"] = (width, dim)
        found[f"{layer}.mlp.up_proj.weight"] = (width, dim)
        found[f"{layer}.mlp.down_proj.weight"] = (dim, width)
        found[f"{layer}.input_layernorm.weight"] = (dim,)
        found[f"{layer}.post_attention_layernorm.weight"] = (dim,)
    return found


def weights(config: dict, dtype="float32") -> dict[str, np.ndarray]:
    """Large enough that attention is far from uniform."""
    random = np.random.RandomState(0)
    found = {}
    for name, shape in sorted(shapes(config).items()):
        draw = random.standard_normal(shape)
        if name.endswith("norm.weight"):
            draw = 1 + 0.2 * draw
        elif name.endswith("bias"):
            draw = 0.5 * draw
        else:
            draw = 1.5 * draw / shape[-1] ** 0.5
        found[name] = draw.astype(dtype)
    return found


def tokens() -> np.ndarray:
    return np.random.RandomState(1).randint(0, VOCAB, (2, 40))


def write(folder, config: dict, tensors: dict[str, np.ndarray]):
    """The checkpoint as one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
