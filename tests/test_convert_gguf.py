"""GGUF files: every number as its format says, and the same model as its Hugging Face twin."""

import json

import checkpoint_cases
import gguf_cases
import numpy as np
import pytest
from flax import nnx
from gguf_cases import F16, F32, METADATA, Q4_0, Q4_1, Q8_0

from jhybrid import checkpoint
from jhybrid.convert import gguf
from jhybrid.convert.gguf_llama import from_gguf
from jhybrid.convert.huggingface import read_hf, to_hf
from jhybrid.data import load_tokenizer
from jhybrid.parameters import flatten

HUGGING_FACE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def twin(tensors):
    """The Hugging Face tensors of a GGUF file: rows 2i, 2i + 1 of a head become i, i + K/2."""
    found = {}
    for name, tensor in tensors.items():
        weight = gguf_cases.dequantised(tensor)
        *block, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            rows = []
            for head in range(len(weight) // gguf_cases.HEAD):
                first = head * gguf_cases.HEAD
                rows += [weight[first + 2 * i] for i in range(gguf_cases.HEAD // 2)]
                rows += [weight[first + 2 * i + 1] for i in range(gguf_cases.HEAD // 2)]
            weight = np.stack(rows)
        prefix = f"model.layers.{block[1]}." if block else ""
        found[f"{prefix}{HUGGING_FACE[part]}.weight"] = weight
    return found


@pytest.fixture
def written(tmp_path):
    def write(tensors, metadata=METADATA):
        path = tmp_path / "tiny.gguf"
        path.write_bytes(gguf_cases.file_bytes(metadata, tensors))
        return path

    return write


@pytest.mark.parametrize("kind", [F32, F16, Q4_0, Q4_1, Q8_0])
def test_every_number_is_decoded_as_its_format_says(written, kind, monkeypatch):
    tensor = gguf_cases.random_tensor(np.random.RandomState(3), (6, 64), kind)
    file = gguf.GGUF(written({"first": tensor, "w": tensor}))
    monkeypatch.setattr(gguf, "BLOCK_BYTES", 4 * 64 * 4)  # four rows at a time
    starts, rows = zip(*file.rows("w"), strict=True)
    assert starts == (0, 4)
    np.testing.assert_array_equal(np.concatenate(rows), gguf_cases.dequantised(tensor))
    assert file.tensors["w"].shape == (6, 64)


@pytest.mark.parametrize(("kind", "tied"), [(Q4_0, True), (Q4_1, False), (F16, True), (Q8_0, True)])
def test_a_model_equals_its_hugging_face_twin(tmp_path, written, kind, tied):
    tensors = gguf_cases.llama(kind, tied)
    out = from_gguf(written(tensors), tmp_path / "ours", dtype="float32")
    config = checkpoint_cases.LLAMA | {
        "vocab_size": len(gguf_cases.VOCAB),
        "hidden_size": gguf_cases.DIM,
        "intermediate_size": gguf_cases.WIDTH,
        "num_attention_heads": gguf_cases.HEADS,
        "num_key_value_heads": gguf_cases.KV_HEADS,
        "tie_word_embeddings": tied,
    }
    folder = checkpoint_cases.write(tmp_path / "twin", config, twin(tensors))
    theirs, params = read_hf(folder, tokenizer=str(out / "tokenizer.json"))
    ours, model = checkpoint.load_model(out)
    assert ours.model == theirs.model
    for path, value in flatten(nnx.state(model, nnx.Param)).items():
        np.testing.assert_array_equal(value, params[path], err_msg=path)


def test_settings_and_tokenizer_come_along(tmp_path, written):
    out = from_gguf(written(gguf_cases.llama()), tmp_path / "ours")
    experiment, model = checkpoint.load_model(out)
    assert experiment.model.param_dtype == "bfloat16" and model.embed.dtype == "bfloat16"
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    ids = [gguf_cases.VOCAB.index(token) for token in ("ab", "Ġab", "Ġ", "1", "0", "Ċ", "Ċ", "1")]
    assert tokenizer.encode("ab ab 10\n\n1") == ids  # digits one by one, cut off what is before
    assert tokenizer.decode(ids) == "ab ab 10\n\n1"
    assert tokenizer.eos == 1 and list(tokenizer.byte_lengths[:2]) == [0, 0]
    config = json.loads((to_hf(out, tmp_path / "back") / "config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (512, 1)
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages }}"
