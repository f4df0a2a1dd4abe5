"""The configs of the published models and their baselines: sizes, layouts, one recipe for all."""

import importlib
import pathlib

import pytest

from jhybrid.block_groups import find_groups
from jhybrid.model import parameter_count

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
# The first two are the counts of the released configs; the others have no published one.
PARAMETERS = {
    "nats_l_hybrid_380m": 380_073_212,
    "nats_l_hybrid_800m": 793_144_956,
    "nats_l_380m": 380_535_932,
    "gdn_380m": 379_888_124,
    "gdn_hybrid_380m": 369_278_144,
    "gdn_hybrid_nope_380m": 369_278_144,
    "transformer_380m": 373_867_520,
}


def load(name):
    return importlib.import_module(f"configs.{name}").config()


def kinds(name):
    return "".join(
        {"ChunkRoutedConfig": "N", "GatedDeltaNetConfig": "G", "SoftmaxConfig": "S"}[
            type(block.mixer).__name__
        ]
        for block in load(name).model.blocks
    )


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_a_config_has_the_parameters_and_the_command_its_docstring_says(name, count):
    assert parameter_count(load(name).model) == count
    document = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    assert f"python train.py --config configs/{name}.py --workdir runs/{name}" in document
    assert "cost" in document.lower()
    assert "nope" in name or f"{count:,}" in document.replace("\n", " ")


def test_every_config_but_the_default_is_listed_here():
    assert {path.stem for path in FOLDER.glob("*380m.py")} <= PARAMETERS.keys()
    assert {path.stem for path in FOLDER.glob("*800m.py")} <= PARAMETERS.keys()


def test_layers_lie_where_they_were_published():
    assert kinds("nats_l_380m") == 21 * "N"
    assert kinds("nats_l_hybrid_380m") == kinds("nats_l_hybrid_800m") == 5 * "GGGN" + "N"
    assert kinds("gdn_380m") == 21 * "G"
    assert kinds("gdn_hybrid_380m") == kinds("gdn_hybrid_nope_380m") == 5 * "GGGS" + "G"
    assert kinds("transformer_380m") == 24 * "S"
    repeats = [group.repeats for group in find_groups(load("nats_l_hybrid_380m").model.blocks)]
    assert repeats == [5, 1]


def test_only_the_routed_hybrids_and_the_control_are_without_positions():
    def rotations(name):
        mixers = [block.mixer for block in load(name).model.blocks]
        return {mixer.rope_theta for mixer in mixers if hasattr(mixer, "rope_theta")}

    for name in ("nats_l_hybrid_380m", "nats_l_hybrid_800m", "gdn_hybrid_nope_380m"):
        assert rotations(name) == {None}
    for name in ("nats_l_380m", "gdn_hybrid_380m", "transformer_380m"):
        assert rotations(name) == {10_000.0}
    assert rotations("gdn_380m") == set()


def test_all_train_by_one_recipe():
    recipe = load("nats_l_hybrid_380m")
    for name in PARAMETERS:
        config = load(name)
        assert config.name == name
        assert config.data == recipe.data
        assert config.optimizer == recipe.optimizer
        assert config.training == recipe.training
    tokens = recipe.data.batch_size * recipe.data.sequence_length
    assert (tokens, recipe.training.steps) == (128 * 4096, 20_480)
