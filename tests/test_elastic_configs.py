"""The configs for head routers: published sizes, the recipe that was run, and what trains."""

import importlib
import pathlib

import pytest
from flax import nnx

from jhybrid.convert.families import FAMILIES, Fields
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten, split_trainable
from jhybrid.serialization import from_json, to_json
from jhybrid.training.backbone import without_routers

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
# (trained, frozen): a router of 263,682 for each layer, 66,306 at SmolLM2's head dim of 64;
# frozen as the backbones' cards and weights say
PARAMETERS = {
    "elastic_smollm2_135m": (30 * 66_306, 134_515_008),
    "elastic_qwen3_4b": (36 * 263_682, 4_022_468_096),
    "elastic_qwen3_8b": (36 * 263_682, 8_190_735_360),
    "elastic_llama31_8b": (32 * 263_682, 8_030_261_248),
}
LARGE = [name for name in PARAMETERS if "smollm2" not in name]
# The fields of the backbones' config.json on which their weights and rotations depend.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "elastic_qwen3_4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "elastic_qwen3_8b": QWEN3,
    "elastic_llama31_8b": LLAMA,
}


def load(name):
    return importlib.import_module(f"configs.{name}").config()


@pytest.mark.parametrize(("name", "counts"), PARAMETERS.items())
def test_what_trains_and_what_stays_is_what_the_docstring_says(name, counts):
    experiment = load(name)
    model = nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0)))
    sizes = {path: leaf.size for path, leaf in flatten(nnx.state(model, nnx.Param)).items()}
    parts = split_trainable(sizes, experiment.optimizer.trainable)
    assert tuple(sum(part.values()) for part in parts) == counts
    document = (FOLDER / f"{name}.py").read_text().split('"""')[1].replace("\n", " ")
    assert f"python train.py --config configs/{name}.py --workdir runs/{name}" in document
    assert all(f"{count:,}" in document for count in counts)
    assert from_json(to_json(experiment)) == experiment


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_backbone_is_the_published_one(name):
    fields = Fields(PUBLISHED[name], "config.json")
    published = FAMILIES[PUBLISHED[name]["architectures"][0]].read(fields)
    ours = without_routers(load(name).model)
    for field in ("vocab_size", "dim", "blocks", "tied_head", "norm_eps"):
        assert getattr(ours, field) == getattr(published, field), field


@pytest.mark.parametrize("name", LARGE)
def test_the_recipe_is_the_one_that_was_run(name):
    experiment = load(name)
    optimizer, sparsity = experiment.optimizer, experiment.sparsity
    assert (experiment.training.steps, optimizer.warmup_steps) == (300, 60)
    assert (optimizer.learning_rate, sparsity.multiplier_learning_rate) == (5e-4, 1e-3)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert optimizer.clip_norm == 5.0 and optimizer.decay_all
    targets = {target.task: (target.low, target.high) for target in sparsity.targets}
    assert set(targets.values()) == {(0.6, 0.6), (1.0, 1.0)} and len(targets) == 5
    assert sparsity.multiplier_start is None and not sparsity.signed
    mixer = experiment.model.blocks[0].mixer
    assert (mixer.mode, mixer.block_size, mixer.sink_blocks, mixer.local_blocks) == (
        "FA-SSA",
        128,
        1,
        16,
    )
    (source,) = experiment.data.sources
    assert not source.answer_only  # the release trains on prompts as well
    assert (source.min_tokens, experiment.data.sequence_length) == (1000, 65_536)


def test_the_small_one_is_the_same_recipe_with_a_window_shrunk_to_its_documents():
    experiment = load("elastic_smollm2_135m")
    mixer = experiment.model.blocks[0].mixer
    window = (mixer.sink_blocks + mixer.local_blocks) * mixer.block_size
    assert window * 3 < experiment.data.sequence_length
    assert {source.task for source in experiment.data.sources} == set(experiment.data.tasks)
