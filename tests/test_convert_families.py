"""Hugging Face checkpoints of every family: transformers' logits, and the same bits back."""

import dataclasses
import functools
import json
import pathlib
import shutil
import warnings

import checkpoint_cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from closeness import assert_close
from flax import nnx
from golden import record_families
from safetensors.numpy import load_file

from jhybrid import checkpoint
from jhybrid.config import (
    BlockConfig,
    GatedDeltaNetConfig,
    ModelConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.convert import safetensors_files
from jhybrid.convert.families import Fields, describe, family_of, same_function
from jhybrid.convert.huggingface import from_hf, read_hf, to_hf
from jhybrid.data import load_tokenizer
from jhybrid.errors import UserError
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten, unflatten
from jhybrid.sharding import make_mesh, parameter_shardings

GOLDEN = pathlib.Path(__file__).parent / "golden" / "families.npz"
every_family = pytest.mark.parametrize("name", checkpoint_cases.CONFIGS)


def written(folder, name, dtype="float32"):
    config = checkpoint_cases.CONFIGS[name] | {"torch_dtype": np.dtype(dtype).name}
    return checkpoint_cases.write(folder, config, checkpoint_cases.weights(config, dtype))


def as_model(experiment, params):
    abstract = nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0)))
    graphdef, template = nnx.split(abstract, nnx.Param)
    return nnx.merge(graphdef, unflatten(template, params))


def logits(model, tokens):
    @nnx.jit
    def run(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.logits(model(tokens, Context(positions=positions)).hidden)

    return run(model, jnp.asarray(tokens))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder, model, logits) of each family, made once."""

    @functools.cache
    def make(name):
        folder = written(tmp_path_factory.mktemp(name), name)
        model = as_model(*read_hf(folder, tokenizer="bytes"))
        return folder, model, logits(model, checkpoint_cases.tokens())

    return make


@every_family
def test_logits_equal_those_recorded_from_transformers(models, name, quick_compile):
    with np.load(GOLDEN) as golden:
        ours = models(name)[2][:, record_families.STRIDE - 1 :: record_families.STRIDE]
        assert_close(ours, golden[name], 1e-5)


@every_family
def test_logits_equal_those_of_transformers(models, name, quick_compile):
    pytest.importorskip("torch", reason="needs the extra `compare`")
    folder, _, ours = models(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about PyTorch
        theirs = record_families.logits(folder, checkpoint_cases.tokens())
    assert_close(ours, theirs, 1e-5)


def bits(tensors):
    return {name: (a.shape, a.dtype.name, a.tobytes()) for name, a in tensors.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in checkpoint_cases.CONFIGS]
    + [("qwen2_window", "float16"), ("llama3", ml_dtypes.bfloat16)],
)
def test_a_round_trip_returns_every_bit_and_setting(tmp_path, name, dtype):
    folder = written(tmp_path / "theirs", name, dtype)
    from_hf(folder, tmp_path / "ours", tokenizer="bytes")
    back = to_hf(tmp_path / "ours", tmp_path / "back")
    theirs = load_file(folder / "model.safetensors")
    assert bits(load_file(back / "model.safetensors")) == bits(theirs)
    config = json.loads((back / "config.json").read_text())
    settings = json.loads((folder / "config.json").read_text())
    if not settings.get("use_sliding_window", True):
        settings["sliding_window"] = None  # what was not used does not come back
    assert {field: config[field] for field in settings} == settings
    assert describe_model(back) == describe_model(folder)


def describe_model(folder):
    fields = Fields(json.loads((folder / "config.json").read_text()), "config.json")
    return family_of(fields).read(fields)


def test_a_checkpoint_in_several_files_is_the_same_checkpoint(tmp_path, models, monkeypatch):
    folder, model, _ = models("llama3")
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 40_000)
    whole = {path: np.asarray(x) for path, x in flatten(nnx.state(model, nnx.Param)).items()}
    from_hf(folder, tmp_path / "ours", tokenizer="bytes")
    pieces = to_hf(tmp_path / "ours", tmp_path / "pieces")
    files = sorted(path.name for path in pieces.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert bits(read_hf(pieces, tokenizer="bytes")[1]) == bits(whole)


def test_parameters_are_placed_as_the_mesh_says(models, monkeypatch):
    folder, model, _ = models("llama3")
    monkeypatch.setattr(safetensors_files, "BLOCK_BYTES", 1000)  # blocks end inside shards
    assignments = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    experiment, params = read_hf(folder, tokenizer="bytes", assignments=assignments)
    abstract = nnx.state(nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0))))
    wanted = flatten(parameter_shardings(abstract, make_mesh(experiment.mesh)))
    split = 0
    for path, whole in flatten(nnx.state(model, nnx.Param)).items():
        assert params[path].sharding.is_equivalent_to(wanted[path], whole.ndim)
        np.testing.assert_array_equal(params[path], whole, err_msg=path)
        split += not params[path].is_fully_replicated
    assert split > 8


def test_an_import_carries_its_tokenizer_and_other_files(tmp_path, models):
    folder = tmp_path / "theirs"
    shutil.copytree(models("llama3")[0], folder)
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "<stop>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text("{}")
    out = from_hf(folder, tmp_path / "ours")
    shutil.move(out, tmp_path / "moved")
    shutil.rmtree(folder)
    experiment, _ = checkpoint.load_model(tmp_path / "moved")
    assert load_tokenizer(experiment.data.tokenizer).eos == 3
    assert experiment.name == "theirs"
    back = to_hf(tmp_path / "moved", tmp_path / "back")
    assert {path.name for path in back.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }


def test_a_model_that_was_trained_here_becomes_a_published_one(tmp_path):
    mixer = SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=8, qkv_bias=True)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=16))
    model = ModelConfig(vocab_size=264, dim=16, blocks=(block,) * 2, norm_eps=1e-4)
    family, config = describe(model, {})
    assert family.architecture == "Qwen2ForCausalLM"
    assert same_function(family.read(Fields(config, "config.json")), model)


@pytest.mark.parametrize(
    "change",
    [
        {"mixer": GatedDeltaNetConfig(num_heads=2, key_dim=4, value_dim=4)},
        {"channel_mixer": None},
        {"norm": "layer"},
        {"mixer": SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=None)},
        {"mixer": SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=8, window=4)},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_model_no_family_has_is_refused(change):
    mixer = SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=8, qkv_bias=True, window=3)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=16))
    blocks = (block, dataclasses.replace(block, **change))
    with pytest.raises(UserError, match="can express it"):
        describe(ModelConfig(vocab_size=264, dim=16, blocks=blocks), {})


def test_settings_of_transformers_5_are_read():
    config = dict(checkpoint_cases.CONFIGS["llama3"])
    scaling = config.pop("rope_scaling")
    config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
    old = checkpoint_cases.CONFIGS["llama3"]
    family = family_of(Fields(old, "config.json"))
    model = family.read(Fields(config, "config.json"))
    assert model == family.read(Fields(old, "config.json"))
    assert "rope_parameters" not in describe(model, config)[1]
