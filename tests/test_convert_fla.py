"""Folders of flash-linear-attention models become ours and theirs again; what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

from jhybrid.checkpoint import load_model
from jhybrid.config import ChunkRoutedConfig, SoftmaxConfig
from jhybrid.convert.families import Fields
from jhybrid.convert.fla_config import describe, read_config
from jhybrid.convert.fla_folder import from_fla, open_fla, parts_of, read_fla, to_fla
from jhybrid.errors import UserError
from jhybrid.model_families import hybrid
from jhybrid.parameters import flatten

# What golden/make_fla_goldens.py gave the models it recorded.
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 16, "intermediate_size": 32}
RECORDED = {
    "delta_net": {"model_type": "delta_net", "num_heads": 2},
    "gated_delta_net": {
        "model_type": "gated_deltanet",
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.5,
    },
    "kda": {"model_type": "kda", "num_heads": 2, "head_dim": 8, "expand_v": 1.5},
    "gla": {"model_type": "gla", "num_heads": 2},
    "retnet": {"model_type": "retnet", "num_heads": 2},
    "hgrn": {"model_type": "hgrn"},
    "hgrn2": {"model_type": "hgrn2", "expand_ratio": 8, "num_heads": None},
    "mamba2": {"model_type": "mamba2", "head_dim": 8, "state_size": 12},
    "rwkv6": {
        "model_type": "rwkv6",
        "num_heads": 2,
        "proj_low_rank_dim": 4,
        "gate_low_rank_dim": 6,
    },
}


def write(folder: Path, family: str, tensors=lambda name, value: value, **changed) -> Path:
    """The recorded model as a folder; `tensors` changes values, or drops them by None."""
    recorded = np.load(Path(__file__).parent / "golden" / f"fla_{family}.npz")
    values = {n[2:]: tensors(n[2:], recorded[n]) for n in recorded.files if n[:2] == "p."}
    folder.mkdir()
    save_file(
        {n: np.ascontiguousarray(v) for n, v in values.items() if v is not None},
        folder / "model.safetensors",
    )
    config = SIZES | RECORDED[family] | changed
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_tokenizer(folder: Path) -> None:
    vocabulary = {letter: i for i, letter in enumerate("abcdefghijklmnop")}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "p"}')


@pytest.mark.parametrize("family", RECORDED)
def test_every_family_is_read_from_its_config_and_tensors(tmp_path, family):
    model, source = open_fla(write(tmp_path / "theirs", family))
    values = read_fla(model, source)
    total = sum(np.prod(spec.shape) for spec in source.tensors.values())
    assert sum(value.size for value in values.values()) == total
    assert {value.dtype for value in values.values()} == {np.dtype("float32")}
    # and back: every tensor bit for bit, and a config that says the same
    assert read_config(Fields(describe(model, {}), "")).blocks == model.blocks
    parts = parts_of(model, values)
    assert parts.keys() == source.tensors.keys()
    for name, of_tensor in parts.items():
        (theirs,) = (rows for _, rows in source.rows(name))
        ours = np.concatenate([part.of(values[part.path]) for part in of_tensor])
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gla", {"model_type": "gla"}),
        ("retnet", {"model_type": "retnet"}),
        ("hgrn", {"model_type": "hgrn"}),
        ("hgrn2", {"model_type": "hgrn2"}),
        ("rwkv6", {"model_type": "rwkv6"}),
        ("delta_net", {"model_type": "delta_net", "num_heads": 8}),
        ("kda", {"model_type": "kda", "num_heads": 8}),
        (
            "gated_delta_net",
            {
                "model_type": "gated_deltanet",
                "num_heads": 4,
                "expand_v": 1,
                "num_hidden_layers": 24,
            },
        ),
        ("softmax", {"model_type": "transformer", "num_heads": 16}),
    ],
)
def test_configs_of_the_study_are_our_families(family, settings):
    hybrids = family != "softmax"
    if hybrids:
        settings |= {"attn": {"layers": [5, 11, 17, 23], "num_heads": 16}}
    found = read_config(Fields({"hidden_size": 1024} | settings, "config.json"))
    assert found == hybrid(family, "6-1" if hybrids else "pure")


def test_mamba2_is_our_family():
    fields = Fields({"model_type": "mamba2", "hidden_size": 1024}, "config.json")
    assert read_config(fields) == hybrid("mamba2")


def test_an_import_carries_its_tokenizer_and_leaves_out_dead_tensors(tmp_path):
    folder = write(tmp_path / "theirs", "gated_delta_net")
    tensors = dict(np.load(Path(__file__).parent / "golden" / "fla_gated_delta_net.npz"))
    dead = {"model.layers.0.attn.D": np.zeros(4, np.float32)}
    save_file(
        {n[2:]: v for n, v in tensors.items() if n[:2] == "p."} | dead,
        folder / "model.safetensors",
    )
    add_tokenizer(folder)
    out = from_fla(folder, tmp_path / "ours")
    experiment, model = load_model(out)
    expected = read_fla(*open_fla(folder))
    assert experiment.model.blocks[0].mixer.value_heads == 4
    for path, value in flatten(nnx.state(model, nnx.Param)).items():
        np.testing.assert_array_equal(value, expected[path])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "rwkv7"}, "model_type='rwkv7' is not supported; known: transformer, gla"),
        ({"feature_map": "relu"}, "feature_map='relu' is not supported, only None is"),
        ({"num_heads": 3}, "3 heads cannot share 8 dims evenly"),
        ({"attn": {"layers": [2], "num_heads": 2}}, "layers=.2. must be different numbers from 0"),
        ({"attn": {"layers": [1], "num_heads": 3}}, "3 heads cannot share 16 dims"),
        ({"hidden_size": "big"}, "hidden_size='big' must be int"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        open_fla(write(tmp_path / "theirs", "gla", **changed))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    k_proj = "model.layers.1.attn.k_proj.weight"

    def refused(name: str, tensors, message: str):
        model, source = open_fla(write(tmp_path / name, "gla", tensors))
        with pytest.raises(UserError, match=message):
            read_fla(model, source)

    refused("missing", lambda n, v: None if n == k_proj else v, f"tensor {k_proj} is missing")
    refused(
        "narrow",
        lambda n, v: v[:4] if n == k_proj else v,
        r"k_proj.weight has shape \[4, 16\], which gives \[16, 4\] where its config says \[16, 8\]",
    )
    model, source = open_fla(write(tmp_path / "pure", "gla", attn={"layers": [1], "num_heads": 2}))
    assert isinstance(model.blocks[1].mixer, SoftmaxConfig)
    with pytest.raises(UserError, match=r"tensors have no place in the model: .*gk_proj"):
        read_fla(model, source)


# ---- Back ----


@pytest.mark.parametrize("family", ["gla", "hgrn", "rwkv6", "gated_delta_net", "softmax"])
def test_a_family_and_its_hybrids_have_a_config_of_theirs(family):
    config = describe(hybrid(family, "full" if family == "softmax" else "12-1"), {})
    theirs = RECORDED.get(family, {"model_type": "transformer"})["model_type"]
    assert config["model_type"] == theirs
    layers = [settings["layers"] for settings in config.get("attn", [])]
    assert layers == ([] if family == "softmax" else [[11, 23]])


def test_an_export_becomes_the_folder_it_was_made_of(tmp_path):
    """A hybrid in bfloat16: tensors bit for bit, settings that ours lacks, the tokenizer."""
    bfloat16 = np.dtype("bfloat16")
    softmax = {"attn": {"layers": [1], "num_heads": 2, "window_size": 8}, "initializer_range": 0.5}
    folder = write(
        tmp_path / "theirs",
        "gla",
        lambda name, value: None if "1.attn." in name else value.astype(bfloat16),
        **softmax,
    )
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        value = rng.standard_normal((16, 16)).astype(bfloat16)
        tensors[f"model.layers.1.attn.{name}.weight"] = value
    save_file(tensors, folder / "model.safetensors")
    add_tokenizer(folder)
    ours, back = tmp_path / "ours", tmp_path / "back"
    from_fla(folder, ours)
    to_fla(ours, back)
    returned = load_file(back / "model.safetensors")
    assert returned.keys() == tensors.keys()
    for name, value in tensors.items():
        assert returned[name].dtype == bfloat16
        np.testing.assert_array_equal(returned[name], value, err_msg=name)
    config = json.loads((back / "config.json").read_text())
    assert (config["initializer_range"], config["torch_dtype"]) == (0.5, "bfloat16")
    assert config["architectures"] == ["GLAForCausalLM"]
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(UserError, match=r"back already exists"):
        to_fla(ours, back)
    with pytest.raises(UserError, match=r"nothing"):
        to_fla(tmp_path / "nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def changed(family: str, layout: str = "pure", **mixer):
    """The last block of a model with another setting."""
    model = hybrid(family, layout)
    last = dataclasses.replace(model.blocks[-1].mixer, **mixer)
    blocks = (*model.blocks[:-1], dataclasses.replace(model.blocks[-1], mixer=last))
    return dataclasses.replace(model, blocks=blocks)


def two_families():
    first = hybrid("gla").blocks[0]
    blocks = (first, dataclasses.replace(first, mixer=hybrid("delta_net").blocks[0].mixer))
    return dataclasses.replace(hybrid("gla"), blocks=blocks)


ROUTED = ChunkRoutedConfig(
    num_heads=8, key_dim=128, value_dim=128, num_softmax_heads=8, chunk_size=64
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hybrid("lightning"), "its Lightning is unknown there"),
        (
            lambda: dataclasses.replace(
                hybrid("gla"), blocks=(dataclasses.replace(hybrid("gla").blocks[0], mixer=ROUTED),)
            ),
            "its ChunkRouted is unknown there",
        ),
        (two_families, r"it has model.blocks.1.mixer."),
        (
            lambda: changed("gla", "3-1", rope_theta=None),
            r"it has model.blocks.23.mixer.rope_theta \(10000.0 there, null here\)",
        ),
        (lambda: changed("gla", "3-1", qk_norm=True), r"23.mixer.qk_norm \(false there, true here"),
        (lambda: changed("gla", gate_rank=8), r"23.mixer.gate_rank \(16 there, 8 here"),
        (lambda: hybrid("mamba2", "3-1"), r"no such model"),
    ],
)
def test_a_model_that_they_do_not_have_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        describe(build(), {})
