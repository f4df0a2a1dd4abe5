"""The LM Evaluation Harness with a tiny model: local task files, truncation, eval.py."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from tiny_models import build

from jhybrid.checkpoint import write_export
from jhybrid.config import BlockConfig, DataConfig, Experiment, ModelConfig, SoftmaxConfig
from jhybrid.errors import UserError
from jhybrid.evals.perplexity import scorer
from jhybrid.parameters import flatten

ROOT = Path(__file__).parent.parent
MODEL = ModelConfig(
    vocab_size=257,
    dim=16,
    blocks=(
        BlockConfig(
            mixer=SoftmaxConfig(num_heads=2, num_kv_heads=1, head_dim=8), channel_mixer=None
        ),
    ),
    compute_dtype="float32",
    remat="none",
)
EXPERIMENT = Experiment(name="tiny", model=MODEL, data=DataConfig(tokenizer="bytes"))
CHOICES = """
task: which_animal
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/animals.jsonl
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
"""
ANIMALS = [
    {"question": "Which barks?", "choices": ["a dog", "a very old cat"], "label": 0},
    {"question": "Which swims all day?", "choices": ["cow", "a shark", "hen"], "label": 1},
]


def test_without_lm_eval_the_missing_package_is_named(monkeypatch, tmp_path):
    from jhybrid.evals.evaluate import evaluate
    from jhybrid.evals.options import EvalOptions

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in ("harness", "harness_jobs"):
        monkeypatch.delitem(sys.modules, f"jhybrid.evals.{name}", raising=False)
    options = EvalOptions(
        checkpoint="x", tasks=("lm:piqa",), lengths=(64,), num_samples=1, out=tmp_path / "r.json"
    )
    with pytest.raises(UserError, match="lm-eval"):
        evaluate(options, EXPERIMENT, build(MODEL))
    assert list(tmp_path.iterdir()) == []


class Ask:
    """What a model needs of lm_eval's Instance."""

    def __init__(self, *args):
        self.args = args


@pytest.fixture
def harness(monkeypatch):
    pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm-eval)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    from jhybrid.evals import harness

    return harness


def log_likelihood(model, text: bytes, first: int) -> float:
    """Of bytes first, first + 1, ... of a text that is read from nothing."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)[None]
    targets = tokens[:, 1:].copy()
    targets[:, : first - 1] = -1
    return float(scorer(model)(tokens[:, :-1], targets).sum())


def test_likelihoods_of_texts(harness):
    model = harness.HarnessModel((EXPERIMENT, build(MODEL)), max_length=64)
    asked = [Ask("a dog", " barks"), Ask("trailing  ", "x"), Ask("a dog", " sings"), Ask("", "no")]
    found = model.loglikelihood(asked, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [False] * 4
    for ask, (value, _) in zip(asked[:3], found, strict=False):
        context, continuation = ask.args
        # trailing blanks of a context belong to what follows it
        first = len(context.rstrip())
        expected = log_likelihood(model.model, (context + continuation).encode(), first)
        assert value == pytest.approx(expected, abs=1e-4)
    # an empty context is the end-of-text token
    tokens = np.array([[256, *b"no"]], np.int32)
    expected = scorer(model.model)(tokens[:, :-1], tokens[:, 1:]).sum()
    assert found[3][0] == pytest.approx(float(expected), abs=1e-4)
    assert model.truncated.total() == 0


def test_what_is_too_long_loses_its_left_end_and_is_counted(harness, caplog):
    model = harness.HarnessModel((EXPERIMENT, build(MODEL)), max_length=20)
    text = "0123456789" * 4
    found = model.loglikelihood([Ask(text, " yes"), Ask("short", " no")], disable_tqdm=True)
    kept = (text + " yes").encode()[-21:]  # the model reads all but the last token
    assert found[0][0] == pytest.approx(log_likelihood(model.model, kept, 17), abs=1e-4)
    assert model.truncated["loglikelihood"] == 1
    assert "1 of 2 inputs" in caplog.text
    with pytest.raises(UserError, match="max_length=20"):
        model.loglikelihood([Ask("a", "b" * 21)], disable_tqdm=True)

    cut, whole = Ask(text, {"max_gen_toks": 8}), Ask(text[-12:], {"max_gen_toks": 8})
    assert model.generate_until([cut])[0] == model.generate_until([whole])[0]
    assert model.truncated["generate_until"] == 1
    with pytest.raises(UserError, match="no room"):
        model.generate_until([Ask(text, {"max_gen_toks": 20})])


def test_rolling_likelihoods_predict_every_byte_once(harness):
    model = harness.HarnessModel((EXPERIMENT, build(MODEL)), max_length=16, batch_size=2)
    texts = ["", "brief", "a document of more than two windows of tokens"]
    found = model.loglikelihood_rolling([Ask(text) for text in texts])
    assert found[0] == 0
    read = np.array([[256, *b"brief"]], np.int32)
    expected = scorer(model.model)(read[:, :-1], read[:, 1:]).sum()
    assert found[1] == pytest.approx(float(expected), abs=1e-4)
    # windows of 16 that each see as much as they can: 0-15, 16-31, and 32-44 after 29-31
    tokens = np.array([256, *texts[2].encode()], np.int32)
    total = 0.0
    for start, stop, new in ((0, 16, 16), (16, 32, 16), (29, 45, 13)):
        inputs, targets = tokens[None, start:stop], tokens[None, start + 1 : stop + 1].copy()
        targets[:, : 16 - new] = -1
        total += float(scorer(model.model)(inputs, targets).sum())
    assert found[2] == pytest.approx(total, abs=1e-4)


def test_generation_ends_before_the_first_stop_string(harness):
    model = harness.HarnessModel((EXPERIMENT, build(MODEL)), max_length=64, max_gen_toks=12)
    free = model.generate_until([Ask("a dog", {"until": []}), Ask("a shark", {})])
    assert all(free)
    stop = free[0][5]
    stopped = model.generate_until([Ask("a dog", {"until": [stop, ""]})])
    assert stopped == [free[0].split(stop)[0]]
    drawn = {"do_sample": True, "temperature": 5.0, "until": stop}
    once, again = (model.generate_until([Ask("a dog", drawn)] * 2) for _ in range(2))
    assert once == again
    assert once[0] != once[1]  # of equal prompts each draws its own
    assert model.generate_until([Ask("a dog", {**drawn, "do_sample": False})]) == stopped
    with pytest.raises(UserError, match="num_beams"):
        model.generate_until([Ask("a dog", {"num_beams": 4})])


@pytest.mark.slow
def test_eval_runs_local_task_files(harness, tmp_path, monkeypatch, capsys):
    export = write_export(
        EXPERIMENT, flatten(nnx.state(build(MODEL), nnx.Param)), tmp_path / "export"
    )
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANIMALS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "animals.yaml").write_text(CHOICES.format(folder=tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # leave JAX's setting alone
    monkeypatch.chdir(tmp_path)

    def run(*more: str) -> int:
        arguments = ["--checkpoint", str(export), "--lengths", "32", "--include-path", "tasks"]
        monkeypatch.setattr(sys, "argv", ["eval.py", *arguments, *more])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        return stopped.value.code

    assert run("--tasks", "lm:which_animal") == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    best, best_by_length = 0, 0
    for animal in ANIMALS:
        context = f"Question: {animal['question']}\nAnswer:"
        texts = [f"{context} {choice}".encode() for choice in animal["choices"]]
        # at most 32 tokens are read
        found = [
            log_likelihood(build(MODEL), t[-33:], len(t[-33:]) - len(t) + len(context))
            for t in texts
        ]
        lengths = [len(choice) for choice in animal["choices"]]
        best += int(np.argmax(found)) == animal["label"]
        best_by_length += int(np.argmax(np.divide(found, lengths))) == animal["label"]
    assert row["metrics"] == {"acc": best / 2, "acc_norm": best_by_length / 2}
    assert math.isfinite(row["standard_errors"]["acc"])
    assert row["samples"] == 2
    assert row["truncated"] == 5  # every text is longer than 32 tokens
    assert "5 inputs cut" in capsys.readouterr().out
    answers = (tmp_path / "results.predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc"] for line in answers] == [0, 1]
    assert run("--tasks", "lm:which_animal") == 0
    assert "already in results.json" in capsys.readouterr().out
    assert run("--tasks", "lm:which_animal", "--limit", "1") == 2
    assert "other settings" in capsys.readouterr().err
    assert run("--tasks", "lm:none", "--out", "other.json") == 2
    assert "lm:none: lm_eval knows no such task" in capsys.readouterr().err
