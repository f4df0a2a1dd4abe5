"""Runs of train.py inside this process: logs, resuming, giving up, dry runs and bad input."""

import json

import numpy as np
import plain
import pytest
import tiny

import train
from jhybrid.checkpoint import load_model
from jhybrid.model import parameter_count
from jhybrid.training import loop
from jhybrid.training.metrics import MetricsWriter, collapsed_routing
from jhybrid.training.progress import duration


@pytest.fixture
def run_train(monkeypatch, run_command, quick_compile):
    """run_train(*arguments, config=plain) -> (exit code, stdout, stderr) of train.py."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept out of the home directory")

    def run(*arguments, config=plain):
        return run_command(train, "--config", config.__file__, *arguments)

    return run


def events(workdir, kind=None):
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if kind in (None, record["event"])]


def test_a_run_logs_validates_checkpoints_and_finishes(run_train, tmp_path):
    workdir = tmp_path / "run"
    arguments = ("--workdir", workdir, "--set", "training.eval_every_steps=4")
    code, out, err = run_train(*arguments, config=tiny)
    assert code == 0
    assert all(line.startswith("warning: ") for line in err.splitlines()), err  # few heads: it may
    assert f"finished: 6 steps, checkpoint in {workdir}" in out
    assert "step 5/6  loss " in out and "MFU -  ETA " in out

    trained = events(workdir, "train")
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    last = trained[-1]
    assert last["tokens"] == 6 * 4 * 64 and last["tokens_per_second"] > 0 and last["mfu"] is None
    assert last["learning_rate"] == pytest.approx(1e-3)
    assert np.isfinite(last["loss"]) and last["gradient_norm"] > 0 and last["skipped"] == 0
    routing = last["routing"]["blocks.1"]
    assert len(routing["softmax_fraction"]) == len(routing["score_margin"]) == 2
    assert all(0 <= fraction <= 1 for fraction in routing["softmax_fraction"])

    validated = events(workdir, "validation")
    assert [record["step"] for record in validated] == [4, 6]
    # bytes are tokens here: bits per byte is the loss in bits, up to document ends
    assert validated[-1]["bits_per_byte"] == pytest.approx(
        validated[-1]["loss"] / np.log(2), rel=0.05
    )
    assert [record["step"] for record in events(workdir, "checkpoint")] == [2, 4, 6]

    experiment, _ = load_model(workdir)
    assert experiment.training.eval_every_steps == 4
    assert json.loads((workdir / "config.json").read_text())["name"] == "tiny"

    code, out, err = run_train(*arguments, config=tiny)
    assert (code, err) == (0, "") and "is finished" in out
    assert len(events(workdir, "train")) == 6

    code, out, err = run_train(*arguments, "--set", "data.seed=7", config=tiny)
    assert code == 2 and err.count("\n") == 1
    assert "data.seed (0 there, 7 here)" in err and str(workdir) in err


@pytest.mark.slow
def test_a_finished_run_can_be_extended_and_traced(run_train, tmp_path):
    run_train("--workdir", tmp_path, "--set", "training.steps=2")
    code, out, err = run_train(
        *("--workdir", tmp_path, "--set", "training.steps=4", "--resume", "--profile", "3:4")
    )
    assert (code, err) == (0, "")
    assert "after step 2" in out and "finished: 4 steps" in out
    assert [record["step"] for record in events(tmp_path, "train")] == [1, 2, 3, 4]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_run_that_stays_not_finite_gives_up_and_keeps_its_parameters(run_train, tmp_path):
    code, _, err = run_train(
        *("--workdir", tmp_path, "--set", "training.max_skipped_steps=3"),
        *("--set", "training.steps=50", "--set", "optimizer.learning_rate=1e38"),
    )
    assert code == 1
    assert "gave up" in err.splitlines()[-1]
    assert "3 steps in a row were not finite" in err.splitlines()[-1]
    assert events(tmp_path, "train")[-1]["skipped_in_row"] == 3
    assert "2 in a row" in events(tmp_path, "warning")[-2]["message"]


def test_a_dry_run_compiles_and_leaves_nothing(run_train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_train("--dry-run")
    assert (code, err) == (0, "")
    count = parameter_count(plain.config().model)
    assert f"parameters: {count} ({count} trainable)" in out
    assert "model FLOPs per step: " in out and "compiled FLOPs per step and device: " in out
    assert "memory per device: " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "model.depth=3"], "model"),
        (["--set", "training.steps=many"], "training.steps"),
        (["--set", "model.blocks.0.mixer.num_value_heads=3"], "num_value_heads"),
        (["--set", "optimizer.trainable=nothing"], "optimizer.trainable"),
        (["--set", "optimizer.learning_rate=-1.0"], "optimizer.learning_rate"),
        (["--set", "data.tokenizer=bpe4096"], "data.tokenizer"),
        (["--set", "mesh.data=2", "--set", "mesh.fsdp=2", "--set", "mesh.tensor=16"], "mesh"),
        (["--set", "steps"], "steps"),
        (["--config", "absent.py"], "absent.py"),
        (["--set", "optimizer.learning_rate=1e400"], "optimizer.learning_rate"),
        (["--set", "model.implementation=pallas_tpu"], "pallas_tpu"),
        (["--set", 'data.sources=[{"kind":"TextFiles","paths":["absent.txt"]}]'], "absent.txt"),
        (["--profile", "5:2"], "--profile"),
        (["--profile", "2:900"], "--profile 2:900"),
        (["--coordinator", "localhost:1"], "--num-processes"),
        (["--resume"], "--resume"),
        (["--nonsense"], "--nonsense"),
        (["--plan", "v5litepod-4"], "--plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_line_and_exit_code_2(run_train, tmp_path, arguments, named):
    workdir = tmp_path / "run"
    code, _, err = run_train("--workdir", workdir, *arguments)
    assert code == 2
    assert err.count("\n") == 1 and named in err
    assert "Traceback" not in err
    assert not workdir.exists()


def test_an_unwritable_workdir_is_one_line(run_train, tmp_path):
    (tmp_path / "file").write_text("kept")
    code, _, err = run_train("--workdir", tmp_path / "file")
    assert code == 2 and err.count("\n") == 1 and str(tmp_path / "file") in err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define config()"),
        ("def config(): return 3", "must return an Experiment"),
        ("import absent_module", "ModuleNotFoundError"),
        ("def config(:", "SyntaxError"),
    ],
)
def test_a_config_file_that_is_none_says_why(run_train, tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    code, _, err = run_train("--config", path)
    assert code == 2 and err.count("\n") == 1 and message in err and "broken.py" in err


def test_a_half_written_line_is_dropped_when_the_run_goes_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1}\n{"event": "tra')
    writer = MetricsWriter(tmp_path)
    writer.write("train", 2, loss=float("nan"))
    writer.close()
    found = events(tmp_path)
    assert [record["step"] for record in found] == [1, 2]
    assert found[-1]["loss"] is None


@pytest.mark.parametrize(
    ("fractions", "warned"),
    [([[0.0, 0.0], [0.0]], "linear"), ([[1.0], [1.0]], "softmax"), ([[1.0], [0.0]], None)],
)
def test_only_a_collapse_of_all_heads_is_warned_of(fractions, warned):
    routing = {str(i): {"softmax_fraction": np.array(f)} for i, f in enumerate(fractions)}
    message = collapsed_routing(routing)
    assert message is None if warned is None else warned in message


@pytest.mark.slow
def test_a_collapse_reaches_the_log_and_the_user(run_train, tmp_path):
    everything = "model.blocks.1.mixer.softmax_bias=1e9"
    code, _, err = run_train("--workdir", tmp_path / "run", "--set", everything, config=tiny)
    assert code == 0 and "every head is always softmax attention" in err
    (warning,) = events(tmp_path / "run", "warning")  # once, not at every log
    assert "collapsed" in warning["message"]


@pytest.mark.slow
def test_evaluations_see_the_model_of_the_step(tmp_path, quick_compile):
    experiment = tiny.change(tiny.config(), training={"steps": 2, "eval_every_steps": 1})
    seen = []

    def evaluate(model):
        seen.append(np.asarray(model.embed[...]))
        return {"mean": float(seen[-1].mean())}

    loop.run(experiment, loop.Options(workdir=tmp_path, evaluations={"embedding": evaluate}))
    found = events(tmp_path, "evaluation")
    assert [(record["step"], record["name"]) for record in found] == [
        (1, "embedding"),
        (2, "embedding"),
    ]
    assert [record["mean"] for record in found] == [pytest.approx(x.mean()) for x in seen]
    assert np.any(seen[0] != seen[1])


def test_a_model_without_routing_is_no_collapse():
    assert collapsed_routing({}) is None


def test_durations_read_well():
    assert [duration(s) for s in (7.4, 125, 12_030)] == ["7s", "2m05s", "3h20m"]
