"""Plans, drawn batches, statistics, charts and the table of a study, without training anything."""

import csv
import dataclasses
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from scipy import stats

from jhybrid import charts
from jhybrid.charts import Point, Series
from jhybrid.config import AssociativeRecall, EmbeddedText, Needle
from jhybrid.data import load_tokenizer
from jhybrid.data.recall import AssociativeRecallTask
from jhybrid.errors import UserError
from jhybrid.study import findings, table
from jhybrid.study.__main__ import chosen, load_study
from jhybrid.study.batches import Batches, recall_document, shares
from jhybrid.study.findings import Samples, recall, single
from jhybrid.study.plan import Cell, RecallMeasure, Study, grid
from jhybrid.study.recall import held_out

PLANS = Path(__file__).parents[1] / "configs" / "studies"


BASE = tiny.change(tiny.config(), model={"dim": 128})

# ---- Plans ----


@pytest.mark.parametrize(
    ("name", "cells", "seeds"),
    [
        ("mini", 25, 3),
        ("hybrid_ratio", 33, 3),
        ("chunk_routing", 7, 3),
        ("chunk_routing_cpu", 4, 3),
        ("paper_340m", 31, 1),
        ("paper_1p3b", 31, 1),
    ],
)
def test_every_plan_loads(name, cells, seeds):
    study = load_study(PLANS / f"{name}.py")
    assert (study.name, len(study.cells), len(study.seeds)) == (name, cells, seeds)


def test_a_grid_has_every_pair_once_and_one_transformer():
    cells = grid(("gla", "hgrn2"), ("pure", "3-1"), BASE, depth=6)
    assert [cell.name for cell in cells] == [
        "gla_pure",
        "gla_3-1",
        "hgrn2_pure",
        "hgrn2_3-1",
        "softmax_full",
    ]
    assert [cell.full_share for cell in cells] == [0, 1 / 3, 0, 1 / 3, 1]
    kinds = [type(block.mixer).__name__ for block in cells[1].experiment.model.blocks]
    assert kinds == ["GLAConfig", "GLAConfig", "SoftmaxConfig"] * 2
    run = cells[3].run(7)
    assert (run.name, run.data.seed, run.training.seed) == ("hgrn2_3-1_seed7", 7, 7)


GLA = grid(("gla",), ("pure",), BASE, depth=2, transformer=False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: grid(("gla", "mamba9"), ("pure",), BASE, depth=2), r"family='mamba9': choose one"),
        (lambda: grid(("gla",), ("4-1",), BASE, depth=6), r"layout='4-1' repeats every 4 layers"),
        (lambda: grid(("gla",), ("full",), BASE, depth=6), r"full is the Transformer"),
        (lambda: Study(name="s", cells=GLA * 2), r"run gla_pure is named twice: a duplicate run"),
        (lambda: Study(name="s", cells=GLA, seeds=(1, 1)), r"seeds 1 is named twice"),
        (
            lambda: Study(name="s", cells=(*GLA, dataclasses.replace(GLA[0], mixer="other"))),
            r"other_pure and gla_pure are the same model, trained alike: a duplicate run",
        ),
        (
            lambda: RecallMeasure(task=AssociativeRecall(num_pairs=16), lengths=(32,)),
            r"AssociativeRecall.length=32 must be at least",
        ),
    ],
)
def test_impossible_plans_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_shards_share_out_the_cells():
    study = load_study(PLANS / "hybrid_ratio.py")
    parts = [chosen(study, None, (i, 4)) for i in range(4)]
    names = sorted(cell.name for part in parts for cell in part)
    assert names == sorted(cell.name for cell in study.cells)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [c.name for c in chosen(study, "gla_pure,hgrn2_3-1", (1, 2))] == ["hgrn2_3-1"]
    with pytest.raises(UserError, match="--cells nothing: unknown"):
        chosen(study, "nothing", (0, 1))


# ---- Batches ----


def test_rows_are_shared_out_by_weight():
    assert shares(np.array([0.45, 0.25, 0.15, 0.15]), 32).tolist() == [14, 8, 5, 5]
    assert shares(np.array([1.0, 1e-9]), 4).tolist() == [4, 0]


def test_drawn_recall_documents_follow_the_rules_of_the_task():
    config = AssociativeRecall(num_pairs=12, num_queries=8, length=64, power=0.3)
    tokenizer = load_tokenizer("bpe4096")
    vocabulary = tokenizer.ordinary_ids
    draw = jax.jit(jax.vmap(lambda key: recall_document(key, vocabulary, config)))
    found = jax.tree.map(np.asarray, draw(jax.random.split(jax.random.key(0), 2000)))
    half = len(vocabulary) // 2
    for tokens, targets, at, distances in zip(
        *(found[n][:100] for n in ("tokens", "targets", "queries", "distances")), strict=True
    ):
        keys, values = tokens[:24:2], tokens[1:24:2]
        assert set(keys) <= set(vocabulary[:half]) and set(values) <= set(vocabulary[half:])
        assert len(set(keys)) == len(set(values)) == 12
        pairs = dict(zip(keys, values, strict=True))
        rest = np.arange(24, 64)
        assert sorted(at) == [i for i in rest if tokens[i] in pairs]  # no filler is a key
        assert sorted(at) == np.flatnonzero(targets >= 0).tolist()
        for place, distance in zip(at, distances, strict=True):
            assert tokens[place - distance] == tokens[place]
            assert targets[place] == tokens[place - distance + 1] == pairs[tokens[place]]
            assert place == 63 or tokens[place + 1] == targets[place]
    # the places of queries have the distribution of the task that train.py reads
    task = AssociativeRecallTask(config, tokenizer)
    others = [task.example(np.random.default_rng(i)) for i in range(2000)]
    slots = [
        np.bincount((np.concatenate(places) - 24) // 2, minlength=20)
        for places in (
            found["queries"],
            [np.flatnonzero(example.targets >= 0) for example in others],
        )
    ]
    assert stats.chi2_contingency(slots).pvalue > 1e-3


@pytest.mark.slow
def test_a_batch_is_a_function_of_its_key_and_has_each_source_in_its_share():
    data = dataclasses.replace(
        tiny.config().data,
        sources=(
            AssociativeRecall(weight=2, num_pairs=4, num_queries=4, length=32),
            EmbeddedText(weight=2),
        ),
    )
    batches = Batches(data)
    draw = jax.jit(batches.draw)
    one, again, other = (draw(jax.random.key(i), batches.arrays) for i in (1, 1, 2))
    for name, value in one.items():
        assert value.shape == (4, 64) and value.dtype == np.int32
        np.testing.assert_array_equal(value, again[name])
    assert not np.array_equal(one["tokens"], other["tokens"])
    assert np.asarray((one["targets"] >= 0).sum(1)).tolist() == [8, 8, 64, 64]
    np.testing.assert_array_equal(one["segment_ids"][0], np.repeat([0, 1], 32))
    np.testing.assert_array_equal(one["positions"][1], np.tile(np.arange(32), 2))
    np.testing.assert_array_equal(one["targets"][2, :-1], one["tokens"][2, 1:])
    seeds = np.array([3, 7], np.uint32)
    many = batches.draw_steps(seeds, batches.arrays, 5, 2)  # steps 5 and 6 of both
    alone = draw(jax.random.fold_in(jax.random.key(7), 6), batches.arrays)
    for name, value in many.items():
        np.testing.assert_array_equal(value[1, 1], alone[name])
    text = load_tokenizer("bytes").decode(np.asarray(one["tokens"][3]))
    assert sum(c.isalpha() or c.isspace() for c in text) > 40


def test_needles_held_out_are_asked_for_where_their_distance_says():
    tokenizer = load_tokenizer("bpe4096")
    of = RecallMeasure(task=Needle(length=256), lengths=(256,), documents=6)
    questions = held_out(of, 256, tokenizer)
    for tokens, at, answers, (distance,) in zip(
        questions.tokens, questions.at, questions.answers, questions.distances, strict=True
    ):
        answer = answers[answers >= 0]
        number = tokenizer.decode(answer[:-1]).strip(" .")
        assert number.isdigit() and len(number) == 7
        np.testing.assert_array_equal(tokens[at[1 : len(answer)]], answer[:-1])
        needle = at[0] - distance
        before = tokenizer.decode(tokens[needle - 1 : needle + len(answer) - 1])
        assert before.endswith(f": {number}.") or before.endswith(f": {number}")


# ---- Statistics ----


def results(values, *, status="finished", measure="Recall", **fields):
    """One result per (mixer, layout, share): [values by seed]."""
    return [
        {
            "run": f"{mixer}_{layout}_seed{seed}",
            "mixer": mixer,
            "layout": layout,
            "full_share": share,
            "seed": seed,
            "status": status,
            "kv_bytes_per_token": 4096 * share,
            "measures": [{"measure": measure, "length": 8, "value": value, "count": 10}],
            **fields,
        }
        for (mixer, layout, share), of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def test_intervals_are_students():
    found = findings.mean([1.0, 2.0, 4.0])
    expected = stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    np.testing.assert_allclose(found[:3], [7 / 3, expected.low, expected.high])
    assert findings.mean([2.0])[:3] == (2.0, None, None)
    a, b = [1.0, 2.0, 4.0], [0.5, 0.7, 0.2, 0.1]
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(findings.difference(a, b)[1:3], [expected.low, expected.high])
    assert findings.spearman([1, 2, 3, 9], [2, 2, 5, 4]) == pytest.approx(
        stats.spearmanr([1, 2, 3, 9], [2, 2, 5, 4]).statistic
    )
    assert math.isnan(findings.spearman([1, 1], [1, 2]))


def test_the_three_questions_are_answered_from_the_runs():
    values = {}
    for mixer, alone, hybrid in (("gla", 0.2, 0.7), ("hgrn2", 0.1, 0.9), ("retnet", 0.3, 0.5)):
        values[mixer, "pure", 0.0] = [alone, alone + 0.01, alone - 0.01]
        values[mixer, "3-1", 1 / 3] = [hybrid, hybrid + 0.02, hybrid - 0.02]
    ratio, rank, properties = findings.findings(results(values), [recall("Recall", 8)])
    gain = ratio.numbers["hgrn2: 3-1 less pure"]
    assert gain.value == pytest.approx(0.8) and gain.low > 0.7
    assert "rises for 3 and falls for 0" in ratio.answer
    assert rank.numbers["3-1"].value == pytest.approx(-1.0)  # the order is reversed
    assert "Not for certain" in rank.answer and "retnet (pure), hgrn2 (3-1)" in rank.answer
    assert properties.numbers["selective gating"].value == pytest.approx(0.8 - 0.5)
    assert "delta rule" not in properties.numbers  # no mixer has it


def test_runs_that_did_not_finish_count_for_nothing_and_questions_may_stay_open():
    values = {("gla", "pure", 0.0): [0.2, 0.3], ("gla", "3-1", 1 / 3): [0.5]}
    found = results(values) + results({("hgrn", "pure", 0.0): [9.0]}, status="diverged")
    samples = Samples(found, recall("Recall", 8))
    assert samples.mixers("pure") == ["gla"]
    assert samples.gain("gla", "3-1") == [pytest.approx(0.3)]
    answers = [f.answer for f in findings.findings(found[:2], [single("Recall", 8)])]
    assert all(answer.startswith("Not answered") for answer in answers) and len(answers) == 3


# ---- Table and charts ----


def test_the_table_has_a_row_per_number_and_one_for_a_run_without():
    failed = {"run": "x", "mixer": "gla", "seed": 1, "status": "failed", "reason": 'a "b", c'}
    found = [*results({("gla", "pure", 0.0): [0.25]}), failed]
    rows = table.tidy(found)
    assert [row["value"] for row in rows] == [0.25, None]
    read = list(csv.DictReader(io.StringIO(table.to_csv(rows))))
    assert list(read[0]) == list(table.COLUMNS)
    assert (read[0]["value"], read[0]["length"], read[1]["value"]) == ("0.25", "8", "")
    assert read[1]["reason"] == 'a "b", c'
    assert json.loads(table.to_json(rows)) == rows


def test_a_chart_is_whole_svg_with_a_mark_where_the_numbers_say():
    series = [
        Series("a < b", [Point(1, 0.0), Point(4, 1.0, 0.5, 1.5, "tip & more")]),
        Series("points", [Point(2, 0.5)], line=False),
    ]
    svg = charts.chart(series, title="t", x_label="x", y_label="y", log_x=True, y_range=(0, 2))
    root = ET.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{space}circle")]
    assert len(circles) == 3 and len(list(root.iter(f"{space}polyline"))) == 1
    (x1, y1), (x4, y4), (x2, y2) = circles
    assert x2 == pytest.approx((x1 + x4) / 2, abs=0.2)  # 2 lies midway between 1 and 4
    assert y1 - y4 == pytest.approx(2 * (y1 - y2), abs=0.2)
    texts = "".join(root.itertext())
    assert "a < b" in texts and "tip & more" in texts


def test_cells_name_their_runs_for_files():
    cell = Cell(mixer="gla", layout="3:1", full_share=0.25, experiment=BASE)
    assert cell.run(0).name == "gla_3to1_seed0"
