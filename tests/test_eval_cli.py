"""eval.py from its arguments to its files, with a tiny random model."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from tiny_models import build

from jhybrid.checkpoint import write_export
from jhybrid.config import (
    BlockConfig,
    Experiment,
    GatedDeltaNetConfig,
    ModelConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.decoding import Generation
from jhybrid.errors import UserError
from jhybrid.evals import markov, options, prediction, report
from jhybrid.evals.results import Predictions, Results, digest
from jhybrid.evals.ruler import suite
from jhybrid.parameters import flatten

ROOT = Path(__file__).parent.parent


# ---- options ----


def parse(tasks: str, squad=False, hotpotqa=False):
    return options.parse_tasks(tasks, with_squad=squad, with_hotpotqa=hotpotqa)


def test_ruler_stands_for_the_tasks_whose_data_is_there():
    assert parse("ruler") == tuple(f"ruler:{name}" for name in suite.WITHOUT_DATA)
    assert parse("ruler", squad=True)[-1] == "ruler:qa_1"
    assert len(parse("ruler", squad=True, hotpotqa=True)) == 13
    assert parse("ruler:vt, perplexity,ruler:vt") == ("ruler:vt", "perplexity")


@pytest.mark.parametrize(
    ("tasks", "named"),
    [("ruler:niah", "ruler:niah: unknown"), ("", "--tasks"), ("ruler:qa_1", "--squad FILE")],
)
def test_unknown_tasks_are_named(tasks, named):
    with pytest.raises(UserError, match=named):
        parse(tasks)


def test_lengths_are_whole_numbers_in_range():
    assert options.parse_lengths("1024,2, 1024,1048576") == (1024, 2, 1048576)
    for bad in ("1", "1048577", "1k", "-5", "1e3", "٣٣٣", ""):
        with pytest.raises(UserError, match="--lengths"):
            options.parse_lengths(bad)


def test_a_prompt_is_addressed_by_task_length_and_sample():
    assert options.parse_prompt("niah_single_1:1024:3") == ("niah_single_1", 1024, 3)
    assert options.parse_prompt("ruler:vt:128:0") == ("vt", 128, 0)
    for bad in ("vt", "vt:1024", "vt:1024:x", "none:1024:0", "vt:1:0"):
        with pytest.raises(UserError, match="--print-prompt"):
            options.parse_prompt(bad)


# ---- results on disk ----


def test_results_are_whole_after_every_row_and_found_again(tmp_path):
    path = tmp_path / "new" / "results.json"
    results = Results(path, {"checkpoint": "x"})
    results.write()
    for length, score in ((1024, 50.0), (2048, 25.0)):
        row = {"task": "ruler:vt", "length": length, "score": score, "key": f"k{length}"}
        results.add(row)
        on_disk = json.loads(path.read_text())
        assert on_disk["rows"][-1] == row
    assert on_disk["averages"]["1024"] == {"score": 50.0, "tasks": ["ruler:vt"]}
    again = Results(path, {"checkpoint": "x"})
    assert again.find("ruler:vt", 1024, "k1024")["score"] == 50.0
    assert again.find("ruler:vt", 4096, "other") is None
    with pytest.raises(UserError, match=r"ruler:vt at 1024"):
        again.find("ruler:vt", 1024, "other")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": [1]}', '{"rows": [{}]}'])
def test_a_file_that_is_not_results_is_left_alone(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"results\.json"):
        Results(path, {})
    assert path.read_text() == content


def test_results_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        Results(tmp_path / "file" / "results.json", {}).write()


def test_predictions_survive_a_torn_line(tmp_path):
    path = tmp_path / "p.jsonl"
    predictions = Predictions(path)
    predictions.add("k", 0, "a\nü", score=1.0)
    with path.open("a") as file:
        file.write('{"key": "k", "index": 1, "pre')
    predictions = Predictions(path)
    assert (predictions.find("k", 0), predictions.find("k", 1)) == ("a\nü", None)
    predictions.add("k", 1, "b")
    predictions = Predictions(path)
    assert (predictions.find("k", 0), predictions.find("k", 1)) == ("a\nü", "b")


def test_digests_depend_on_values_and_not_on_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_the_table_shows_every_kind_of_row():
    rows = [
        {"task": "perplexity", "length": 128, "bits_per_byte": 2.5, "perplexity": 30.0, "loss": 3},
        {"task": "ruler:vt", "length": 128, "result": "does not fit, needs >= 881"},
        {
            "task": "ruler:vt",
            "length": 1024,
            "haystack": "noise",
            "score": 40.0,
            "standard_error": 6.1,
            "nulls": 2,
        },
    ]
    averages = {"1024": {"score": 40.0, "tasks": ["ruler:vt"]}}
    lines = report.table(rows, averages).split("\n")
    assert lines[0].split() == ["task", "haystack", "128", "1024"]
    assert lines[1].endswith("2.5000 bits/byte, perplexity 30.00")
    assert "does not fit, needs >= 881" in lines[2]
    assert "40.0 ± 6.1 (2 empty)" in lines[2]
    assert lines[3].endswith("40.0 over 1 tasks")


# ---- the whole command ----


def tiny() -> Experiment:
    linear = BlockConfig(
        mixer=GatedDeltaNetConfig(num_heads=2, key_dim=8, value_dim=8),
        channel_mixer=SwiGLUConfig(width=32),
    )
    softmax = BlockConfig(
        mixer=SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=16), channel_mixer=None
    )
    model = ModelConfig(vocab_size=4096, dim=32, blocks=(linear, softmax), compute_dtype="float32")
    return Experiment(name="tiny", model=model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """An export of a random model."""
    model = build(tiny().model)
    folder = tmp_path_factory.mktemp("checkpoint") / "export"
    return write_export(tiny(), flatten(nnx.state(model, nnx.Param)), folder)


@pytest.fixture
def command(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs eval.py in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # leave JAX's setting alone

    def run(*arguments: str) -> tuple[int, str, str]:
        defaults = ["--checkpoint", str(checkpoint), "--cache", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", ["eval.py", *defaults, *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        return (stopped.value.code, *capsys.readouterr())

    return run


def test_an_evaluation_writes_every_row_and_resumes(command, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 200)
    arguments = ("--tasks", "perplexity,ruler:niah_single_1,ruler:vt", "--lengths", "384")
    arguments += ("--num-samples", "3", "--batch-size", "1", "--text", "text.txt")
    status, shown, _ = command(*arguments)
    assert status == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["task"]: row for row in results["rows"]}
    assert list(rows) == ["perplexity", "ruler:niah_single_1", "ruler:vt"]
    # A random model over 4096 tokens knows nothing.
    assert rows["perplexity"]["loss"] == pytest.approx(np.log(4096), abs=1.0)
    niah = rows["ruler:niah_single_1"]
    assert (niah["score"], niah["num_samples"], niah["haystack"]) == (0.0, 3, "noise")
    assert niah["tokens_used"]["most"] <= 384
    assert rows["ruler:vt"]["result"] == f"does not fit, needs >= {rows['ruler:vt']['needs']}"
    assert results["averages"]["384"]["tasks"] == ["ruler:niah_single_1"]
    assert results["config"]["name"] == "tiny"
    assert {"jax", "jhybrid", "ruler_rules"} <= set(results["versions"])
    assert "does not fit" in shown

    # Lose one row and one of its answers: only those are made again.
    kept = [row for row in results["rows"] if row["task"] != "ruler:niah_single_1"]
    (tmp_path / "results.json").write_text(json.dumps({**results, "rows": kept}))
    answers = tmp_path / "results.predictions.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:2]))
    asked = []
    generate = prediction.generate

    def counted(model, tokens, lengths, **options):
        asked.append(tokens.shape)
        return generate(model, tokens, lengths, **options)

    monkeypatch.setattr(prediction, "generate", counted)
    status, shown, _ = command(*arguments)
    assert status == 0
    assert len(asked) == 1
    assert "perplexity at 384: already in results.json" in shown
    again = json.loads((tmp_path / "results.json").read_text())
    remade = next(row for row in again["rows"] if row["task"] == "ruler:niah_single_1")
    assert {**remade, "seconds": 0} == {**niah, "seconds": 0}
    assert sorted(answers.read_text().splitlines()) == sorted("".join(lines).splitlines())


def test_results_of_other_settings_are_not_mixed(command, tmp_path):
    arguments = ("--tasks", "ruler:vt", "--lengths", "128", "--num-samples")
    assert command(*arguments, "2")[0] == 0
    before = (tmp_path / "results.json").read_text()
    status, _, error = command(*arguments, "3")
    assert status == 2
    assert "ruler:vt at 128" in error
    assert (tmp_path / "results.json").read_text() == before


@pytest.mark.slow
def test_the_printed_prompt_is_the_one_in_the_set(command, tmp_path):
    status, shown, _ = command("--print-prompt", "niah_single_1:384:1")
    assert status == 0
    assert shown.endswith("mentioned in the provided text is")
    assert (
        command("--tasks", "ruler:niah_single_1", "--lengths", "384", "--num-samples", "2")[0] == 0
    )
    (file,) = (tmp_path / "cache").glob("niah_single_1-384-*.jsonl")
    row = json.loads(file.read_text().splitlines()[1])
    assert shown == row["input"] + row["answer_prefix"]
    status, shown, error = command("--print-prompt", "vt:128:0")
    assert (status, shown) == (2, "")
    assert "does not fit, needs >=" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tasks", "ruler:none"], "ruler:none"),
        (["--tasks", "ruler:qa_1"], "--squad"),
        (["--lengths", "2000000"], "--lengths 2000000"),
        (["--lengths", "1"], "--lengths 1"),
        (["--num-samples", "0"], "--num-samples 0"),
        (["--num-samples", "x"], "--num-samples"),
        (["--essays", "absent.json"], "absent.json"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--checkpoint", "absent"], "absent"),
        (["--colour", "red"], "--colour"),
        (["--tasks", "perplexity", "--out", "/dev/null/results.json"], "--out"),
        (["--tasks", "ruler:vt", "--cache", "/dev/null/cache"], "--cache"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, tmp_path, arguments, named):
    status, _, error = command(*arguments)
    assert status == 2
    assert named in error
    assert len(error.splitlines()) == 1


def test_answers_end_before_the_stop_token_and_keep_their_prompt(monkeypatch):
    shapes = set()

    def echo(model, tokens, lengths, *, max_new_tokens, stop_token):
        # Answers with the prompt's length, its last token, then the stop token.
        shapes.add((*tokens.shape, max_new_tokens))
        answer = np.full((len(lengths), max_new_tokens), stop_token)
        answer[:, 0] = lengths
        answer[:, 1] = np.asarray(tokens)[np.arange(len(lengths)), np.asarray(lengths) - 1]
        return Generation(answer, ())

    monkeypatch.setattr(prediction, "generate", echo)
    prompts = [[7] * n for n in (299, 5, 70, 64, 65)]
    predict = prediction.predictor(None, stop_token=9, batch_size=2)
    assert dict(predict([], 300, 4)) == {}
    expected = {i: [len(prompt), 7] for i, prompt in enumerate(prompts)}
    assert dict(predict(prompts, 300, 30)) == expected
    assert dict(predict(prompts, 300, 128)) == expected
    assert dict(predict(prompts, 300, 1)) == {i: answer[:1] for i, answer in expected.items()}
    assert shapes == {(2, 300, 128)}


@pytest.mark.slow
def test_the_baseline_is_printed_beside_the_checkpoint(checkpoint, capsys):
    assert markov.main(["--checkpoint", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2.45" in lines[1]
    assert re.fullmatch(r"tiny at context 1024: 3\.\d{4} bits/byte", lines[2])
