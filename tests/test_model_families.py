"""Layouts are index lists, and every family has the published number of parameters."""

import importlib

import pytest

from jhybrid.config import SoftmaxConfig
from jhybrid.errors import UserError
from jhybrid.layouts import full_layers
from jhybrid.model import flops_per_token, parameter_count
from jhybrid.model_families import FAMILIES, hybrid


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("pure", ()),
        ("24-1", (23,)),
        ("12-1", (11, 23)),
        ("6-1", (5, 11, 17, 23)),
        ("3-1", (2, 5, 8, 11, 14, 17, 20, 23)),
        ("3:1", (3, 7, 11, 15, 19, 23)),
        ("full", tuple(range(24))),
    ],
)
def test_layouts_of_24_layers(layout, expected):
    assert full_layers(layout, 24) == expected


@pytest.mark.parametrize(
    ("layout", "depth", "message"),
    [
        ("3", 24, "layout='3': choose pure, full, N-1 or N:1"),
        ("0-1", 24, "layout='0-1': choose"),
        ("6-1", 8, "layout='6-1' repeats every 6 layers; depth=8 must be a multiple"),
        ("24-1", 12, "depth=12 must be a multiple"),
        ("3:1", 6, "layout='3:1' repeats every 4 layers"),
    ],
)
def test_layouts_that_do_not_exist_or_do_not_fit_are_named(layout, depth, message):
    with pytest.raises(UserError, match=message):
        full_layers(layout, depth)


# Millions, untied; flash-linear-attention 0.6.0 with the same sizes.
PUBLISHED = {
    "softmax": 373.9,
    "hgrn": 373.9,
    "hgrn2": 373.9,
    "retnet": 380.2,
    "gla": 374.5,
    "mamba2": 382.4,
    "rwkv6": 378.1,
    "delta_net": 374.4,
    "gated_delta_net": 399.5,
    "kda": 387.0,
}


@pytest.mark.parametrize(("family", "millions"), PUBLISHED.items())
def test_340m_models_have_the_published_number_of_parameters(family, millions):
    assert round(parameter_count(hybrid(family)) / 1e6, 1) == millions


def test_the_study_config_has_softmax_in_every_sixth_layer():
    model = importlib.import_module("configs.hybrid_340m").config().model
    softmax = [i for i, b in enumerate(model.blocks) if isinstance(b.mixer, SoftmaxConfig)]
    assert softmax == [5, 11, 17, 23]
    assert parameter_count(model) == parameter_count(hybrid("hgrn2", "6-1"))


# Gated DeltaNet's is published; the others are what these sizes come to.
MILLIONS_AT_1P3B = {
    "softmax": 1364.3,
    "hgrn": 1364.4,
    "hgrn2": 1364.4,
    "retnet": 1351.7,
    "lightning": 1465.0,
    "gla": 1365.5,
    "mamba2": 1371.8,
    "rwkv6": 1360.2,
    "delta_net": 1365.7,
    "gated_delta_net": 1466.3,
    "kda": 1390.9,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_1p3b(family):
    millions = parameter_count(hybrid(family, dim=2048)) / 1e6
    assert round(millions, 1) == MILLIONS_AT_1P3B[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_hybrids_have_softmax_where_their_layout_says(family):
    model = hybrid(family, "3-1", dim=256, depth=6, vocab_size=64)
    per_layer = len(hybrid(family, dim=256, depth=1, vocab_size=64).blocks)
    layers, block = [], 0
    for _ in range(6):
        full = isinstance(model.blocks[block].mixer, SoftmaxConfig)
        layers.append(full)
        block += 1 if full and family == "mamba2" else per_layer
    if family != "softmax":
        assert [i for i, full in enumerate(layers) if full] == [2, 5]
    assert parameter_count(model) > 0
    assert flops_per_token(model, 128) > 6 * (parameter_count(model) - 64 * 256) * 0.98


def test_unknown_families_and_widths_that_heads_do_not_divide_are_named():
    with pytest.raises(UserError, match="family='mamba': choose one of softmax, hgrn"):
        hybrid("mamba")
    with pytest.raises(UserError, match="dim=1000 must be a multiple of head_dim=128"):
        hybrid("delta_net", dim=1000)
