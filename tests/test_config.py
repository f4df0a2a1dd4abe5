"""Configs are data: they load without JAX, survive JSON, and reject bad input by field name."""

import json
import subprocess
import sys

import pytest
import tiny

from configs.default import config
from jhybrid.commandline import load_config
from jhybrid.errors import UserError
from jhybrid.serialization import from_json, override, to_json


def test_json_round_trip_is_exact():
    assert from_json(to_json(config())) == config()


def test_configs_load_without_jax():
    program = "import sys, configs.default as c; c.config(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_override_reaches_nested_fields_and_every_list_item():
    changed = override(
        config(),
        ["model.blocks.*.channel_mixer.width=64", "training.steps=7", "data.tokenizer=bytes"],
    )
    assert {block.channel_mixer.width for block in changed.model.blocks} == {64}
    assert changed.training.steps == 7
    assert changed.data.tokenizer == "bytes"


def test_an_override_of_every_item_skips_those_without_the_field_but_not_all_of_them():
    mixed = tiny.config()  # a softmax and a routed block
    changed = override(mixed, ["model.blocks.*.mixer.kv_capacity=0.5"])
    assert changed.model.blocks[0] == mixed.model.blocks[0]
    assert changed.model.blocks[1].mixer.kv_capacity == 0.5
    with pytest.raises(UserError, match=r"model\.blocks\.0\.mixer\.kv_room: unknown field"):
        override(mixed, ["model.blocks.*.mixer.kv_room=0.5"])


def test_fields_that_depend_on_each_other_are_checked_after_the_last_override():
    changed = override(config(), ["mesh.data=3", "data.batch_size=9"])
    assert (changed.mesh.data, changed.data.batch_size) == (3, 9)


def test_an_integer_is_accepted_where_a_float_is_expected_but_not_the_reverse():
    assert override(config(), ["optimizer.clip_norm=2"]).optimizer.clip_norm == 2.0
    with pytest.raises(UserError, match=r"training\.steps=1\.5: expected int"):
        override(config(), ["training.steps=1.5"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.dmi=3", "model.dmi: unknown field"),
        ("training.seed=99999999999", "training.seed=99999999999 must lie in"),
        ("data.seed=4294967296", "data.seed=4294967296 must lie in"),
        ("model.blocks.1.mixer.num_softmax_heads=3", "model.blocks.1.mixer.num_softmax_heads=3"),
        ("model.blocks.0.mixer.num_heads=0", "model.blocks.0.mixer.num_heads=0 must be positive"),
        ("model.dim=abc", "model.dim='abc': expected int"),
        ("model.dim=True", "model.dim=True: expected int"),
        ("model.dim", "expected path=value"),
        ("model.remat=most", "model.remat='most': choose one of"),
        ("model.blocks.9.mixer=1", "model.blocks.9: expected"),
        ("model.dim.x=1", "model.dim has no fields"),
        ("model.blocks.0.mixer=3", "model.blocks.0.mixer: expected one of"),
        ("model.blocks.0.mixer.key_dim=0", "mixer.key_dim=0 must be positive"),
        ("model.blocks.0.mixer.conv_width=-1", "mixer.conv_width=-1 must be positive"),
        ("model.blocks.*.channel_mixer.width=0", "channel_mixer.width=0 must be positive"),
        ("model.norm_eps=0.0", "model.norm_eps=0.0 must be positive"),
        ("name=../elsewhere", "name='../elsewhere' must be"),
        ("mesh.data=3", "data.batch_size=4 must be a multiple of"),
        ("model.blocks.3.mixer.num_softmax_heads=3", "num_softmax_heads=3 must be a multiple of"),
        ("model.blocks.3.mixer.chunk_size=48", "data.document_alignment=64 must be a multiple of"),
    ],
)
def test_bad_overrides_name_the_field(assignment, message):
    with pytest.raises(UserError) as caught:
        override(config(), [assignment])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    ["1 / 0", "Experiment(modle=3)", "SoftmaxConfig(num_heads=2, num_kv_heads=2, head_dim='4')"],
)
def test_a_config_function_that_fails_is_one_line_naming_the_file(tmp_path, body):
    path = tmp_path / "broken.py"
    path.write_text(f"from jhybrid.config import *\ndef config():\n    return {body}\n")
    with pytest.raises(UserError, match=r"--config .*broken\.py: \w+Error"):
        load_config(str(path))


def test_json_with_unknown_missing_or_broken_content_is_refused():
    tree = json.loads(to_json(config()))
    tree["modle"] = {}
    with pytest.raises(UserError, match="config: unknown field modle"):
        from_json(json.dumps(tree))
    tree = json.loads(to_json(config()))
    del tree["model"]["dim"]
    with pytest.raises(UserError, match=r"model: .*'dim'"):
        from_json(json.dumps(tree))
    with pytest.raises(UserError, match="not valid JSON"):
        from_json("{")
