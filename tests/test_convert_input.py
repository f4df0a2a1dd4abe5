"""Damaged and unsupported checkpoints: one clear line, exit code 2, nothing written."""

import json
import re
import struct
import sys

import checkpoint_cases
import gguf_cases
import numpy as np
import pytest
from gguf_cases import F32, METADATA, Q4_0
from safetensors.numpy import load_file, save_file

from jhybrid.commandline import run
from jhybrid.convert.__main__ import _main
from jhybrid.convert.gguf import GGUF
from jhybrid.errors import UserError

CONFIG = checkpoint_cases.CONFIGS["smollm2"]


@pytest.fixture
def folder(tmp_path):
    return checkpoint_cases.write(tmp_path / "theirs", CONFIG, checkpoint_cases.weights(CONFIG))


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """What the command line says about `arguments`, having checked how it says it."""

    def refuse(*arguments):
        before = sorted(tmp_path.rglob("*"))
        command = ["convert", *map(str, arguments), str(tmp_path / "out" / "model")]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            run(_main)
        assert stop.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    return refuse


def from_hf(folder):
    return "from-hf", folder, "--tokenizer", "bytes"


def change_config(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=.*is not supported"),
        ({"architectures": ...}, "architectures is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size='48' must be int"),
        ({"hidden_size": 0}, "hidden_size=0 must be positive"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be positive"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers=1099511627776 must be at most 256"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type is not supported"),
        ({"num_key_value_heads": 2}, "must be a multiple of num_kv_heads=2"),
        ({"intermediate_size": 41}, r"has shape \[48, 40\], its config says \[48, 41\]"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.[a-z_.]*weight is missing"),
        ({"num_hidden_layers": 1}, "9 tensors have no place in the model: model.layers.1"),
        ({"vocab_size": 100}, "has 257 entries, more than model.vocab_size=100"),
    ],
)
def test_a_config_that_cannot_be_used(folder, refusal, fields, message):
    change_config(folder, **fields)
    assert_matches(message, refusal(*from_hf(folder)))


def assert_matches(pattern, text):
    assert re.search(pattern, text), text


def test_files_that_are_not_there(tmp_path, folder, refusal):
    assert "absent: no such folder" in refusal(*from_hf(tmp_path / "absent"))
    assert "neither 'bpe4096'" in refusal("from-hf", folder)  # it has no tokenizer.json
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "neither model.safetensors nor" in refusal(*from_hf(folder))
    (folder / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(*from_hf(folder))
    (folder / "config.json").unlink()
    assert "config.json: cannot be read (No such file" in refusal(*from_hf(folder))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-100],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: struct.pack("<Q", len(data)) + data[8:],
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        lambda data: data.replace(b"F32", b"F16"),
        lambda data: data[:8] + b"x" + data[9:],
    ],
    ids=["truncated", "no header", "empty", "huge header", "long header", "offset", "size", "json"],
)
def test_a_damaged_safetensors_file(folder, refusal, damage):
    path = folder / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    assert "model.safetensors: not a whole safetensors file" in refusal(*from_hf(folder))


def test_tensors_of_a_dtype_that_is_not_read(folder, refusal):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(48, np.int32)
    save_file(tensors, folder / "model.safetensors")
    assert "model.norm.weight has a dtype that is not supported" in refusal(*from_hf(folder))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "must be a JSON object"),
        ('{"weight_map": {}}', "weight_map must be"),
        ('{"weight_map": {"w": "../model.safetensors"}}', "is not a file of its folder"),
        ('{"weight_map": {"w": "other.safetensors"}}', "other.safetensors: not a whole"),
        ('{"weight_map": {"w": "model.safetensors"}}', "tensor w is missing"),
    ],
)
def test_an_index_that_cannot_be_used(folder, refusal, index, message):
    (folder / "model.safetensors.index.json").write_text(index)
    assert message in refusal(*from_hf(folder))


def test_overrides_that_would_make_another_model(folder, refusal):
    said = refusal(*from_hf(folder), "--set", "model.blocks.*.mixer.rope_theta=1.0")
    assert "an import keeps the model's shape" in said


def test_an_output_that_exists(tmp_path, folder, refusal):
    (tmp_path / "out" / "model").mkdir(parents=True)
    assert "already exists" in refusal(*from_hf(folder))
    assert "already exists" in refusal("to-hf", folder)


def test_a_checkpoint_that_is_none(tmp_path, refusal):
    assert "absent: neither a run's workdir" in refusal("to-hf", tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture='qwen2' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn' is not supported"),
        ({"llama.block_count": ...}, "llama.block_count is missing"),
        ({"llama.block_count": (1 << 32) - 1}, "llama.block_count=4294967295 must be at most"),
        ({"llama.block_count": 3}, "tensor blk.2.ffn_down.weight is missing"),
        ({"llama.feed_forward_length": 32}, "its config says"),
        ({"llama.rope.dimension_count": 8}, "must be 16, the size of a head"),
        ({"tokenizer.ggml.model": "llama"}, "give another with --tokenizer FILE"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "known: gpt-2, smollm"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id=5000 is not a token"),
        ({"tokenizer.ggml.merges": ["a q"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1]}, "do not match"),
        ({"general.alignment": "x"}, "general.alignment='x' must be positive"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gguf_metadata_that_cannot_be_used(tmp_path, refusal, change, message):
    metadata = {k: v for k, v in (METADATA | change).items() if v is not ...}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_cases.file_bytes(metadata, gguf_cases.llama()))
    assert message in refusal("from-gguf", path)


def located(data: bytes, name: bytes) -> int:
    """Where the table entry of a matrix says its first dimension."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4


def put(data: bytes, position: int, code: str, number: int) -> bytes:
    raw = struct.pack(f"<{code}", number)
    return data[:position] + raw + data[position + len(raw) :]


Q = b"blk.0.attn_q.weight"
DAMAGE = {
    "truncated": (lambda d: d[:-4000], "lies outside the file"),
    "header only": (lambda d: d[:200], "truncated, or a length"),
    "magic": (lambda d: b"GGML" + d[4:], "not a GGUF file"),
    "version": (lambda d: put(d, 4, "I", 1), "version 1 is not supported"),
    "tensor count": (lambda d: put(d, 8, "Q", 1 << 62), "truncated, or a length|dimensions"),
    "key count": (lambda d: put(d, 16, "Q", 1 << 62), "truncated, or a length|unknown type"),
    "key length": (lambda d: put(d, 24, "Q", 1 << 62), "truncated, or a length"),
    "dimension": (lambda d: put(d, located(d, Q), "Q", 1 << 40), "outside the file"),
    "no rows": (lambda d: put(d, located(d, Q), "Q", 0), "is empty"),
    "part of a block": (lambda d: put(d, located(d, Q), "Q", 40), "no whole blocks"),
    "rank": (lambda d: put(d, located(d, Q) - 4, "I", 1 << 30), "dimensions"),
    "encoding": (lambda d: put(d, located(d, Q) + 16, "I", 12), "dtype that is not supported"),
    "offset": (lambda d: put(d, located(d, Q) + 20, "Q", 1 << 50), "outside the file"),
    "misaligned": (lambda d: put(d, located(d, Q) + 20, "Q", 33), "outside the file"),
    "not text": (lambda d: d.replace(b"general.arch", b"general.\xff\xfe\xfd\xfc"), "not UTF-8"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_gguf_file(tmp_path, refusal, damage, message):
    data = gguf_cases.file_bytes(METADATA, gguf_cases.llama(Q4_0))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damage(data))
    assert_matches(message, refusal("from-gguf", path))


def test_gguf_files_that_are_not_there_or_have_scaled_rotations(tmp_path, refusal):
    assert "cannot be read (No such file" in refusal("from-gguf", tmp_path / "absent.gguf")
    scaled = {"rope_freqs.weight": gguf_cases.random_tensor(np.random.RandomState(0), (8,), F32)}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_cases.file_bytes(METADATA, gguf_cases.llama() | scaled))
    assert "scaled rotations" in refusal("from-gguf", path)


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path):
    data = gguf_cases.file_bytes(METADATA, gguf_cases.llama(Q4_0))
    path = tmp_path / "tiny.gguf"
    for length in range(0, len(data) - 32, len(data) // 200):
        path.write_bytes(data[:length])
        with pytest.raises(UserError):
            GGUF(path)
