"""`python -m jhybrid.benchmark`: the work it sets, and rows that hold together."""

import dataclasses
import json

import jax
import numpy as np
import plain
import pytest
import tiny
from flax import nnx

from jhybrid import commandline
from jhybrid.attention_config import SoftmaxConfig
from jhybrid.benchmark import __main__ as command
from jhybrid.benchmark import models, work
from jhybrid.benchmark.rows import Row
from jhybrid.config import ChunkRoutedConfig, HeadRoutedConfig
from jhybrid.errors import UserError
from jhybrid.model import HybridLM, parameter_count

pytestmark = pytest.mark.usefixtures("quick_compile")
HEAD_ROUTED = HeadRoutedConfig(
    attention=SoftmaxConfig(num_heads=8, num_kv_heads=4, head_dim=8), block_size=16
)


def with_mixers(*mixers):
    model = tiny.config().model
    block = model.blocks[0]
    blocks = tuple(dataclasses.replace(block, mixer=mixer) for mixer in mixers)
    return dataclasses.replace(model, blocks=blocks)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_every_head_keeps_the_asked_fraction_of_chunks(fraction):
    routes = work.random_routes(tiny.config().model, 3, 120, fraction)
    assert routes is not None and routes.shape == (3, 8, 2)
    np.testing.assert_array_equal(routes.sum(1), 8 * fraction)
    if fraction == 0.25:
        assert len(np.unique(np.argmax(routes, 1))) > 1  # not the same chunks for all


def test_every_row_keeps_the_asked_fraction_of_heads():
    routes = work.random_routes(with_mixers(HEAD_ROUTED), 5, 64, 0.75)
    assert routes is not None and routes.shape == (1, 5, 1, 4)
    np.testing.assert_array_equal(routes.sum(3), 3)


def test_models_without_routers_have_no_routes_and_two_kinds_of_them_are_refused():
    softmax, chunks = (block.mixer for block in tiny.config().model.blocks)
    assert isinstance(chunks, ChunkRoutedConfig)
    assert work.random_routes(with_mixers(softmax), 1, 64, 0.5) is None
    with pytest.raises(UserError, match="different shapes"):
        work.random_routes(with_mixers(chunks, HEAD_ROUTED), 1, 64, 0.5)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(models, "DECODED", 2)
    monkeypatch.setattr(models, "DECODE_BATCHES", 1)

    def once(run):
        jax.block_until_ready(run())
        return 2.0

    monkeypatch.setattr(models, "median_ms", once)


@pytest.mark.parametrize(("mode", "tokens"), [("train", 128), ("forward", 128), ("prefill", 128)])
def test_speed_is_tokens_over_time(quick, mode, tokens):
    row = models.measure(tiny.config(), mode, (2, 64), 0.5)
    assert row.note == "" and row.ms == 2.0
    assert row.tokens_per_second == tokens / 2e-3
    assert row.peak_bytes is not None and row.peak_bytes > 0
    assert row.softmax_fraction is not None and 0 <= row.softmax_fraction <= 1


def test_what_decoding_holds_grows_with_the_fraction_of_softmax(quick):
    few, all_ = (models.measure(tiny.config(), "decode", (2, 256), f) for f in (0.25, 1.0))
    assert (few.softmax_fraction, all_.softmax_fraction) == (0.25, 1.0)
    assert few.state_bytes is not None and all_.state_bytes is not None
    # 2 rows x 2 heads x (8 + 8) fp32 channels of 260 tokens: 5 chunks of 16 and the open one, or 17
    # and the open one.
    assert all_.state_bytes - few.state_bytes == 2 * 2 * 16 * 4 * (18 - 6) * 16
    assert few.ms is not None and few.tokens_per_second == pytest.approx(2e3 / few.ms)


def test_the_command_writes_its_rows(run_command, tmp_path, monkeypatch, quick):
    out = tmp_path / "out.json"
    monkeypatch.setattr(commandline, "use_compile_cache", lambda folder: None)
    arguments = ("--config", tiny.__file__, "--forward", "2x32", "--json", out)
    status, shown, _ = run_command(command, *arguments)
    assert status == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "tiny" and row["rows"] == 2 and row["tokens"] == 32
    assert f"{row['ms']:.3f}" in shown


def test_as_many_rows_are_decoded_as_every_model_has_room_for():
    routed, softmax = tiny.config().model, plain.config().model
    both = [(routed, 1.0), (softmax, 1.0)]
    abstract = nnx.eval_shape(lambda: HybridLM(routed, rngs=nnx.Rngs(0)))
    row = models.state_bytes(abstract, 256 + models.decoded_tokens())  # the larger of the two
    weights = 4 * parameter_count(routed)
    assert models.most_rows(both, 256, int((9.5 * row + weights) / 0.9)) == 8
    assert models.most_rows(both, 256, int((7.5 * row + weights) / 0.9)) == 4
    with pytest.raises(UserError, match="mostx256: not one row has room"):
        models.most_rows(both, 256, int(0.9 * row))
    assert command.shape_or_most("mostx256") == (None, 256)


def test_routed_models_are_timed_at_each_fraction(run_command, monkeypatch):
    def measured(experiment, mode, shape, fraction):
        return Row(experiment.name, 1, mode, *shape, softmax_fraction=fraction, ms=1.0)

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(commandline, "use_compile_cache", lambda folder: None)
    arguments = ("--config", tiny.__file__, "--config", plain.__file__, "--forward", "1x64")
    _, shown, _ = run_command(command, *arguments, "--softmax-fraction", "0.25,0.1")
    assert [line.split()[3] for line in shown.splitlines()[2:]] == ["0.250", "0.100", "0.250"]
    status, _, error = run_command(command, *arguments, "--softmax-fraction", "0.25,2")
    assert status == 2 and "expected numbers from 0 to 1" in error


def test_mixers_are_timed_beside_the_transformer_and_a_failing_one_is_a_row(
    run_command, tmp_path, monkeypatch, quick
):
    out = tmp_path / "out.json"
    monkeypatch.setattr(commandline, "use_compile_cache", lambda folder: None)
    measured, broken = [], True

    def measure(row, experiment):
        measured.append(experiment.model)
        if broken and row.name == "gla":
            raise RuntimeError("too large\nfor this device")
        return dataclasses.replace(row, ms=1.0, tokens_per_second=900 / len(measured))

    monkeypatch.setattr(models, "_train", measure)
    size = ("--set", "model.dim=128", "--set", "model.vocab_size=300")
    arguments = ("--config", tiny.__file__, "--families", "gla,hgrn", "--train", "2x32")
    arguments += (*size, "--json", out, "--resume")
    status, shown, _ = run_command(command, *arguments)
    assert status == 0 and "RuntimeError: too large" in shown
    assert [len(model.blocks) for model in measured] == [2, 2, 2]
    assert {model.compute_dtype for model in measured} == {"float32"}  # the config's
    lines = {line.split()[0]: line.split() for line in shown.splitlines()[2:]}
    assert list(lines) == ["softmax", "gla", "hgrn"]
    assert lines["softmax"][5:7] == ["900", "1.00"] and lines["hgrn"][5:7] == ["300", "0.33"]
    broken = False
    status, shown, _ = run_command(command, *arguments, "--minutes", "1e-9")
    assert status == 0 and shown.endswith("stopped after --minutes; --resume times the rest\n")
    status, shown, _ = run_command(command, *arguments)
    assert status == 0 and len(measured) == 4 and measured[3] == measured[1]
    kept = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["note"]) for row in kept] == [
        ("softmax", ""),
        ("hgrn", ""),
        ("gla", ""),
    ]
    out.write_text('{"rows": 3}')
    status, _, err = run_command(command, *arguments)
    assert status == 2 and err.count("\n") == 1 and "no rows of this command" in err
    with pytest.raises(UserError, match="family='mamba9': choose one of"):
        command.of_families(tiny.change(tiny.config(), model={"dim": 64}), "mamba9")


def test_a_config_is_timed_with_each_of_the_varied_settings():
    found = command.variants(tiny.__file__, ["model.dim=8"], "model.remat=none,block")
    assert [e.name for e in found] == ["tiny.none", "tiny.block"]
    assert [(e.model.remat, e.model.dim) for e in found] == [("none", 8), ("block", 8)]
    with pytest.raises(UserError, match=r"model\.remat"):
        command.variants(tiny.__file__, [], "model.remat=none,most")


@pytest.mark.parametrize("text", ["8", "x", "0x4", "4x-1", "4x4x4"])
def test_a_shape_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as exited:
        command.parser().parse_args(["--config", "a", "--train", text])
    assert exited.value.code == 2 and "--train" in capsys.readouterr().err
