"""Studies that train: end to end at toy size, interrupted, failing, diverging."""

import csv
import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny_models import build

from jhybrid.checkpoint import load_model
from jhybrid.config import AssociativeRecall, BlockConfig, EmbeddedText
from jhybrid.data import load_tokenizer
from jhybrid.errors import UserError
from jhybrid.mixers import Context
from jhybrid.model import parameter_count
from jhybrid.parameters import flatten
from jhybrid.recurrent_config import HGRNConfig
from jhybrid.serialization import to_json
from jhybrid.study import __main__ as command
from jhybrid.study import findings, recall, together
from jhybrid.study.plan import Cell, Evaluation, RecallMeasure, Study
from jhybrid.study.runner import Runner, cache_facts, rows_of_eval
from jhybrid.study.together import Interrupted

pytestmark = pytest.mark.usefixtures("quick_compile")

RECALL = AssociativeRecall(num_pairs=4, num_queries=4, length=32)


def experiment(**training):
    """HGRN: of all mixers it compiles fastest."""
    base = tiny.config()
    block = BlockConfig(mixer=HGRNConfig(width=16), channel_mixer=None)
    return dataclasses.replace(
        tiny.change(
            base,
            model={"blocks": (block,)},
            data={"sources": (RECALL, EmbeddedText())},
            training={"steps": 6, "log_every_steps": 2, "checkpoint_every_steps": 2, **training},
        ),
    )


def cell(name="hgrn", **training):
    return Cell(mixer=name, layout="pure", full_share=0.0, experiment=experiment(**training))


def same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for path in ours:
        np.testing.assert_allclose(ours[path], theirs[path], err_msg=path, **tolerance)


# ---- Training ----


@pytest.mark.slow
def test_seeds_trained_together_end_where_each_ends_alone(tmp_path):
    both = together.train(experiment(), (3, 5), tmp_path / "both")
    alone = together.train(experiment(), (5,), tmp_path / "alone")
    same(both[1].params, alone[0].params, rtol=1e-4, atol=1e-5)
    assert not np.allclose(both[0].params["embed"], both[1].params["embed"])
    losses = [record["loss"] for record in both[1].log]
    assert [record["step"] for record in both[1].log] == [2, 4, 6]
    np.testing.assert_allclose(losses, [record["loss"] for record in alone[0].log], rtol=1e-4)
    assert losses[-1] < losses[0] and both[1].diverged is None


@pytest.mark.slow
def test_an_interrupted_cell_ends_as_an_uninterrupted_one(tmp_path):
    whole = together.train(experiment(), (0, 1), tmp_path / "whole")
    asked = iter([False, True])
    with pytest.raises(Interrupted):
        together.train(experiment(), (0, 1), tmp_path / "cut", stop=lambda: next(asked))
    assert [p.name for p in (tmp_path / "cut").glob("state-*")] == ["state-4"]
    resumed = together.train(experiment(), (0, 1), tmp_path / "cut")
    for ours, theirs in zip(resumed, whole, strict=True):
        same(ours.params, theirs.params, rtol=0, atol=0)
        assert ours.log == theirs.log


def test_recall_by_distance_is_what_the_logits_say():
    config = tiny.change(tiny.config(), model={"blocks": experiment().model.blocks}).model
    model = build(config)
    of = RecallMeasure(task=dataclasses.replace(RECALL, power=1.0), lengths=(48,), documents=5)
    tokenizer = load_tokenizer("bytes")
    questions = recall.held_out(of, 48, tokenizer)
    context = Context(positions=np.broadcast_to(np.arange(48), questions.tokens.shape))
    logits = jax.jit(lambda tokens: model.logits(model(tokens, context).hidden))(questions.tokens)
    likeliest = np.take_along_axis(np.asarray(logits.argmax(-1)), questions.at, 1)
    # an untrained model is never right: let it be asked for what it says, but at some places
    answers = np.where(np.arange(4) < [[0], [1], [2], [3], [4]], likeliest, questions.answers)
    asked = questions._replace(answers=answers)
    right = likeliest == answers
    rows = list(recall.count(model, of, 48, asked))
    assert sum(row["questions"] for row in rows) == right.size == 20
    assert sum(row["right"] for row in rows) == right.sum() >= 10
    for row in rows:
        assert (row["task"], row["length"]) == ("AssociativeRecall", 48)
        inside = (questions.distances >= row["distance_from"]) & (
            questions.distances < row["distance_to"]
        )
        assert (row["questions"], row["right"]) == (inside.sum(), right[inside].sum())


def test_a_question_of_several_tokens_is_right_when_all_of_them_are():
    places = np.array([[True, True, False, True], [True, True, True, True]])
    question = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert recall.answered(places, question, 2).tolist() == [[True, False], [True, True]]


def test_rows_of_eval_become_rows_of_the_study():
    score = {"task": "ruler:vt", "length": 128, "score": 25.0, "standard_error": 1.0}
    assert rows_of_eval(score) == [{"length": 128, "measure": "ruler:vt", "value": 0.25}]
    assert rows_of_eval({"task": "ruler:vt", "length": 64, "result": "does not fit"}) == []
    suite = {"task": "lm:piqa", "length": 64, "metrics": {"acc": 0.6}, "samples": 50}
    assert rows_of_eval(suite) == [
        {"length": 64, "measure": "lm:piqa acc", "value": 0.6, "count": 50}
    ]
    text = {
        "task": "perplexity",
        "length": 128,
        "loss": 2.0,
        "bits_per_byte": 1.5,
        "bytes": 300,
        "tokens": 100,
        "loss_by_position": [
            {"positions": "0-63", "loss": 2.5},
            {"positions": "64-127", "loss": None},
        ],
    }
    assert rows_of_eval(text) == [
        {"length": 128, "measure": "bits per byte", "value": 1.5, "count": 300},
        {"length": 128, "measure": "loss", "value": 2.0, "count": 100},
        {
            "length": 128,
            "measure": "loss by position",
            "distance_from": 0,
            "distance_to": 64,
            "value": 2.5,
        },
    ]


def test_routed_blocks_count_the_keys_and_values_they_kept():
    config = tiny.config()  # a softmax block, then a routed one, each 2 heads of 8 + 8, float32
    model = build(config.model)
    facts = cache_facts(config, model, {"blocks.1": [0.25, 0.75]})
    assert facts["kv_bytes_per_token"] == 2 * 16 * 4 + 0.5 * 2 * 16 * 4
    assert facts["softmax_fraction"] == 0.5
    assert facts["parameters"] == parameter_count(config.model)


# ---- The command ----


class Page(HTMLParser):
    """Tables as lists of cells, figures' SVG by name, and the embedded table."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.figures, self.data, self.open = [], [], "", []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag, attributes):
        if tag in ("meta", "circle", "line", "rect", "polyline", "path"):
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "figure":
            self.figures.append(dict(attributes)["id"])

    def handle_endtag(self, tag):
        if tag not in ("circle", "line", "rect", "polyline", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "script":
            self.data += data


PLAN = """
from pathlib import Path
from jhybrid.serialization import from_json
from jhybrid.config import AssociativeRecall
from jhybrid.study.plan import Evaluation, RecallMeasure, Study, grid

def study():
    experiment = from_json(Path({path!r}).read_text())
    task = AssociativeRecall(num_pairs=4, num_queries=4, length=32)
    return Study(
        name="toy",
        cells=grid(("hgrn", "retnet"), ("pure", "2-1"), experiment, depth=2, transformer=False),
        seeds=(0, 1),
        evaluation=Evaluation(
            lengths=(64,), recall=(RecallMeasure(task=task, lengths=(32,), documents=8),)
        ),
    )
"""


@pytest.fixture
def plan(tmp_path):
    toy = tiny.change(
        experiment(steps=4), model={"dim": 64}, data={"batch_size": 2, "validation_fraction": 0.002}
    )
    (tmp_path / "toy.json").write_text(to_json(toy))
    path = tmp_path / "toy.py"
    path.write_text(PLAN.format(path=str(tmp_path / "toy.json")))
    return path


def test_a_study_runs_from_its_plan_to_its_report(plan, run_command, tmp_path, monkeypatch):
    """Two mixers at two ratios with two seeds, in two shards; the report shows the table."""
    workdir = tmp_path / "work"
    arguments = ("--plan", plan, "--workdir", workdir)
    status, out, err = run_command(command, *arguments, "--minutes", "1e-9")
    assert (status, err) == (0, "") and "0 of 8 runs have a result" in out
    assert "stopped; the same command goes on from there" in out
    status, out, err = run_command(command, *arguments, "--shard", "0/2")
    assert (status, err) == (0, "") and "4 of 8 runs have a result" in out
    status, out, err = run_command(command, *arguments, "--shard", "1/2")
    assert (status, err) == (0, "") and "8 of 8 runs have a result" in out

    rows = json.loads((workdir / "table.json").read_text())
    with (workdir / "table.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    assert {row["run"] for row in rows} == {
        f"{mixer}_{layout}_seed{seed}"
        for mixer in ("hgrn", "retnet")
        for layout in ("pure", "2-1")
        for seed in (0, 1)
    }
    assert {row["status"] for row in rows} == {"finished"}
    for row, text in zip(rows, read, strict=True):
        assert float(text["value"]) == row["value"] and text["run"] == row["run"]
    # a hybrid keeps keys and values of one layer in two: 64 wide, float32
    sizes = {row["layout"]: row["kv_bytes_per_token"] for row in rows}
    assert sizes == {"pure": 0, "2-1": 2 * 64 * 4}
    asked = [row for row in rows if row["run"] == "retnet_2-1_seed1" and row["length"] == 32]
    assert sum(row["count"] for row in asked if row["measure"] == "AssociativeRecall") == 8 * 4

    page = Page((workdir / "report.html").read_text())
    assert json.loads(page.data) == rows
    assert {"text-by-ratio", "associativerecall-by-ratio", "associativerecall-by-cache"} <= set(
        page.figures
    )
    cells = next(t for t in page.tables if t[0][:2] == ["mixer", "layout"])
    assert len(cells) == 1 + 4
    for line in cells[1:]:
        shown = dict(zip(cells[0], line, strict=True))
        of_cell = [r for r in rows if (r["mixer"], r["layout"]) == tuple(line[:2])]
        bits = [r["value"] for r in of_cell if r["measure"] == "bits per byte"]
        assert len(bits) == 2
        assert shown["bits per byte at 64"] == str(findings.mean(bits))
        assert shown["parameters"] == f"{of_cell[0]['parameters']:,}"
        right = [
            sum(r["value"] * r["count"] for r in of_cell if _is_recall(r, seed)) / 32
            for seed in (0, 1)
        ]
        assert shown["AssociativeRecall at 32"] == str(findings.mean(right))

    def no_more(*arguments, **options):
        raise AssertionError("everything is finished")

    monkeypatch.setattr(together, "train", no_more)
    status, out, err = run_command(command, *arguments)
    assert (status, err) == (0, "") and out.count("seeds none to do") == 4
    assert json.loads((workdir / "table.json").read_text()) == rows

    experiment, _ = load_model(workdir / "runs" / "retnet_2-1_seed1" / "model")
    assert (experiment.name, experiment.data.seed) == ("retnet_2-1_seed1", 1)
    assert not any((workdir / "cells").iterdir())


def _is_recall(row, seed):
    return (row["measure"], row["length"], row["seed"]) == ("AssociativeRecall", 32, seed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_the_kind", "ModuleNotFoundError"),
        ("x = 1", r"it must define study\(\) -> Study"),
        ("def study():\n    return 3", r"study\(\) must return a Study"),
    ],
)
def test_a_bad_plan_is_one_line_and_writes_nothing(text, message, run_command, tmp_path):
    plan, workdir = tmp_path / "plan.py", tmp_path / "work"
    plan.write_text(text)
    status, out, err = run_command(command, "--plan", plan, "--workdir", workdir)
    assert (status, out) == (2, "") and not workdir.exists()
    assert err.count("\n") == 1 and re.search(message, err)


def test_bad_requests_are_one_line(plan, run_command, tmp_path):
    for arguments, message in (
        (("--plan", tmp_path / "no.py"), "no such file"),
        (("--plan", plan, "--shard", "2/2"), "expected I/N"),
        (("--plan", plan, "--cells", "gla_9-1"), "--cells gla_9-1: unknown"),
        (("--plan", plan, "--minutes", "0"), "expected a number of minutes above 0"),
        (("--plan", plan, "--minutes", "nan"), "expected a number of minutes above 0"),
    ):
        status, _, err = run_command(command, *arguments, "--workdir", tmp_path / "work")
        assert status == 2 and err.count("\n") == 1 and message in err
    assert not (tmp_path / "work").exists()


# ---- Runs that do not go well ----


def outcome(experiment, seeds, diverged=None):
    """What `together.train` would return, without training."""
    model = build(experiment.model)
    params = flatten(nnx.state(model, nnx.Param))
    log = [{"step": 6, "loss": 2.5}]
    return [together.Outcome(params, diverged, log, together.Spent(1.0)) for _ in seeds]


def test_a_failing_cell_is_recorded_and_tried_again_and_the_others_go_on(tmp_path, monkeypatch):
    cells = (cell("one"), cell("two", steps=8))
    study = Study(name="s", cells=cells, seeds=(0, 1), evaluation=Evaluation(tasks=(), lengths=()))
    broken = True

    def train(experiment, seeds, folder, **options):
        if broken and experiment.training.steps == 6:
            raise RuntimeError("out of memory\nand more")
        return outcome(experiment, seeds)

    monkeypatch.setattr(together, "train", train)
    said = []
    runner = Runner(study, tmp_path, announce=said.append)
    runner.run(cells)
    found = {result["run"]: result for result in runner.results()}
    assert [r["status"] for r in found.values()] == ["failed", "failed", "finished", "finished"]
    assert found["one_pure_seed0"]["reason"] == "RuntimeError: out of memory"
    assert "one_pure failed: RuntimeError: out of memory" in said
    broken = False
    runner.run(cells)
    assert [r["status"] for r in runner.results()] == ["finished"] * 4


def test_a_diverged_run_is_recorded_as_diverged(tmp_path):
    wild = tiny.change(experiment(), optimizer={"learning_rate": 1e4, "warmup_steps": 0})
    cells = (Cell(mixer="hgrn", layout="pure", full_share=0.0, experiment=wild),)
    study = Study(name="s", cells=cells, seeds=(0,), evaluation=Evaluation(tasks=(), lengths=()))
    runner = Runner(study, tmp_path)
    runner.run(cells)
    (result,) = runner.results()
    assert result["status"] == "diverged"
    assert "rose from" in result["reason"] or "not finite" in result["reason"]
    assert [record["step"] for record in result["log"]] == [2, 4, 6]
    assert not (tmp_path / "runs" / "hgrn_pure_seed0" / "model").exists()


def test_a_run_that_diverges_before_its_first_record_is_recorded_as_diverged(tmp_path, monkeypatch):
    def train(experiment, seeds, folder, **options):
        return [together.Outcome({}, "loss is not finite", [], together.Spent(1.0)) for _ in seeds]

    monkeypatch.setattr(together, "train", train)
    cells = (cell("one"),)
    study = Study(name="s", cells=cells, seeds=(0,), evaluation=Evaluation(tasks=(), lengths=()))
    runner = Runner(study, tmp_path)
    runner.run(cells)
    (result,) = runner.results()
    assert (result["status"], result["reason"]) == ("diverged", "loss is not finite")
    assert result["milliseconds_per_step"] is None


def test_results_of_several_machines_in_one_workdir_are_one_study(tmp_path, monkeypatch):
    """Each machine has a workdir and cells of its own; nothing but results is brought together."""

    def train(experiment, seeds, folder, **options):
        return [together.Outcome({}, "loss is not finite", [], together.Spent(1.0)) for _ in seeds]

    monkeypatch.setattr(together, "train", train)
    cells = (cell("one"), cell("two", steps=8), cell("three", steps=10))
    study = Study(name="s", cells=cells, seeds=(0, 1), evaluation=Evaluation(tasks=(), lengths=()))
    found = []
    for index, machine in enumerate((tmp_path / "a", tmp_path / "b")):
        runner = Runner(study, machine)
        runner.run(cells[index::2])
        found += runner.results()
        for file in machine.glob("runs/*/result.json"):
            copy = tmp_path / "all" / file.relative_to(machine)
            copy.parent.mkdir(parents=True)
            shutil.copyfile(file, copy)

    def no_more(*arguments, **options):
        raise AssertionError("everything has a result")

    monkeypatch.setattr(together, "train", no_more)
    runner = Runner(study, tmp_path / "all")
    runner.run(cells)
    order = [f"{of.name}_seed{seed}" for of in cells for seed in study.seeds]
    assert [result["run"] for result in runner.results()] == order
    assert sorted(found, key=lambda result: order.index(result["run"])) == runner.results()


def test_results_of_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "train", lambda e, seeds, folder, **_: outcome(e, seeds))
    nothing = Evaluation(tasks=(), lengths=())
    Runner(study := Study(name="s", cells=(cell(),), evaluation=nothing), tmp_path).run(study.cells)
    other = dataclasses.replace(study, cells=(cell(steps=8),))
    with pytest.raises(UserError, match=r"result.json was made with other settings"):
        Runner(other, tmp_path)


@pytest.mark.slow
def test_seeds_may_train_by_the_training_loop(tmp_path):
    study = Study(
        name="s",
        cells=(cell(),),
        seeds=(1,),
        evaluation=Evaluation(tasks=(), lengths=()),
        seeds_together=False,
    )
    runner = Runner(study, tmp_path, announce=lambda line: None)
    runner.run(study.cells)
    (result,) = runner.results()
    assert (result["status"], result["seed"]) == ("finished", 1)
    assert [record["step"] for record in result["log"]] == [1, 2, 4, 6]
    assert result["measures"] == [{"measure": "training loss", "value": result["log"][-1]["loss"]}]
