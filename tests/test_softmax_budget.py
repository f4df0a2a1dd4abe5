"""Finding the bias that keeps a fraction of chunks, and its table, with a tiny random model."""

import functools
import json

import numpy as np
import pytest
import tiny
from flax import nnx
from tiny_models import build

from jhybrid import softmax_budget
from jhybrid.checkpoint import write_export
from jhybrid.config import SoftmaxBudget
from jhybrid.errors import UserError
from jhybrid.parameters import flatten
from jhybrid.serialization import from_json, override, to_json
from jhybrid.softmax_budget import Point, find_bias

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_bias_found_keeps_as_much_as_allowed_and_was_measured():
    margins = np.sort(np.random.default_rng(0).normal(scale=9.0, size=200))
    measured = []

    def point(bias):
        measured.append(Point(bias, float(np.mean(margins + bias >= 0)), bias**2))
        return measured[-1]

    for fraction in (0.0, 0.1, 0.35, 0.995, 1.0):
        found = find_bias(point, fraction)
        assert found in measured
        assert fraction - 1 / 200 < found.fraction <= fraction
    with pytest.raises(UserError, match=r"--fractions: no bias keeps a fraction of 0\.5"):
        find_bias(lambda bias: Point(bias, 0.7, 0.0), 0.5)


@pytest.fixture
def command(run_command):
    return functools.partial(run_command, softmax_budget)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    experiment = tiny.config()
    params = flatten(nnx.state(build(experiment.model), nnx.Param))
    return str(write_export(experiment, params, tmp_path_factory.mktemp("export") / "model"))


def test_one_checkpoint_serves_several_budgets(command, checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(1).integers(32, 127, 6 * 64 + 1, np.uint8).tobytes())
    out = tmp_path / "table.json"
    status, printed, err = command(
        *("--checkpoint", checkpoint, "--text", text, "--fractions", "0.5,0.1", "--out", out)
    )
    assert (status, err) == (0, "")
    plain, half, tenth = rows = json.loads(out.read_text())
    assert printed == softmax_budget.table(rows) + "\n"
    assert (plain["bias"], half["wanted"], tenth["wanted"]) == (None, 0.5, 0.1)
    assert plain["fraction"] > 0.1
    assert 0.4 < half["fraction"] <= 0.5
    assert tenth["fraction"] <= 0.1
    assert tenth["bias"] < half["bias"]
    assert tenth["loss"] != plain["loss"]
    for row in rows:
        assert row["bytes_per_token"] == pytest.approx(row["fraction"] * 2 * (8 + 8) * 4)
    # The bias as a setting does what it did as an argument.
    setting = f"model.blocks.*.mixer.softmax_bias={tenth['bias']}"
    status, _, _ = command(
        *("--checkpoint", checkpoint, "--text", text, "--fractions", "1", "--out", out),
        *("--set", setting),
    )
    assert status == 0
    as_set, everything = json.loads(out.read_text())
    assert as_set["fraction"] == tenth["fraction"]
    assert as_set["loss"] == pytest.approx(tenth["loss"], rel=1e-6)
    assert everything["fraction"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fractions", "0.1,2"], "--fractions 0.1,2: expected numbers from 0 to 1"),
        (["--fractions", "x"], "--fractions x: expected numbers"),
        (["--length", "500"], "5 tokens, need more than 500"),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, checkpoint, tmp_path, options, message):
    (tmp_path / "text").write_text("short")
    status, _, err = command("--checkpoint", checkpoint, "--text", tmp_path / "text", *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_budget_is_a_setting_that_is_checked():
    setting = 'model.blocks.*.mixer.softmax_budget={"kind": "SoftmaxBudget", "fraction": 0.25}'
    changed = override(tiny.config(), [setting])
    assert changed.model.blocks[1].mixer.softmax_budget == SoftmaxBudget(fraction=0.25)
    assert from_json(to_json(changed)) == changed
    with pytest.raises(UserError, match=r"softmax_budget\.fraction=2\.0 must lie in \[0, 1\]"):
        override(tiny.config(), [setting.replace("0.25", "2.0")])
