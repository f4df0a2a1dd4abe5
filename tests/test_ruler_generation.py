"""Sets of samples: lengths kept exactly, does-not-fit, the cache and its resumption."""

import json
import random
from pathlib import Path

import pytest

from jhybrid.data import load_tokenizer
from jhybrid.errors import UserError
from jhybrid.evals.options import EvalOptions
from jhybrid.evals.ruler import fitting, generation, suite
from jhybrid.evals.ruler.source import RulerSource

LENGTHS = (384, 1024, 4096)


def source(tmp_path: Path | None = None, *, tokenizer: str = "bpe4096", **changes) -> RulerSource:
    values = {"tasks": (), "lengths": (), "num_samples": 4, "cache": tmp_path, **changes}
    options = EvalOptions(checkpoint="none", out=Path("none"), **values)
    return RulerSource.load(options, load_tokenizer(tokenizer))


@pytest.mark.parametrize("name", suite.WITHOUT_DATA)
def test_prompts_fill_the_length_and_never_exceed_it(name):
    src = source()
    task = src.task(name)
    for length in LENGTHS:
        try:
            rows = src.samples(task, length)
        except fitting.DoesNotFitError as error:
            assert error.needs > length
            continue
        assert [row["index"] for row in rows] == [0, 1, 2, 3]
        size = rows[0]["fitted_size"]
        for row in rows:
            prompt = row["input"] + row["answer_prefix"]
            tokens = len(src.tokenizer.encode(prompt))
            assert row["length"] == tokens + task.tokens_to_generate <= length
            assert all(output in row["input"] for output in row["outputs"])
        # The fitted size is the largest for its own draw, and one more unit does not fit.
        at = [
            src.material.count_tokens(fitting.draw(task, length, 42, "fit", s).prompt)
            for s in (size, size + 1)
        ]
        assert at[0] + task.tokens_to_generate <= length < at[1] + task.tokens_to_generate
        # Every sample is within one increment (and the spread of its words) of that.
        unit = at[0] / size * task.increment(length)
        assert min(row["length"] for row in rows) >= length - 1.3 * unit - 60


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_the_needed_length_is_exact(name):
    src = source()
    task = src.task(name)
    with pytest.raises(fitting.DoesNotFitError) as caught:
        src.samples(task, 128)
    needs = caught.value.needs
    assert str(caught.value) == f"does not fit, needs >= {needs}"
    assert len(src.samples(task, needs)) == 4
    with pytest.raises(fitting.DoesNotFitError) as caught:
        src.samples(task, needs - 1)
    assert caught.value.needs == needs


def test_largest_fitting_equals_a_linear_search():
    rng = random.Random(0)
    for _ in range(200):
        fixed, minimum = rng.randrange(200), rng.randrange(1, 30)
        cost = [rng.randrange(1, 9) for _ in range(2000)]
        totals = [fixed + sum(cost[:n]) for n in range(len(cost))]
        limit = rng.randrange(10, 4000)
        asked = []

        def count(size, totals=totals, asked=asked):
            asked.append(size)
            return totals[size] if size < len(totals) else 10**9

        expected = max((n for n in range(minimum, 2000) if totals[n] <= limit), default=minimum)
        assert fitting.largest_fitting(count, limit, minimum) == expected
        assert len(asked) < 30


def test_a_sample_does_not_depend_on_how_many_there_are():
    few, many = source(), source(num_samples=7)
    rows = [src.samples(src.task("niah_multikey_1"), 1024) for src in (few, many)]
    assert rows[0] == rows[1][:4]
    assert few.sample("niah_multikey_1", 1024, 2).input == rows[0][2]["input"]


def test_seeds_make_different_samples():
    prompts = {source(seed=seed).sample("niah_single_1", 512, 0).input for seed in (42, 43)}
    assert len(prompts) == 2


# ---- the cache ----


def cached(src: RulerSource, name="niah_single_1", length=512):
    return src.samples(src.task(name), length)


def test_a_finished_set_is_read_and_not_made_again(tmp_path, monkeypatch):
    rows = cached(source(tmp_path))
    (file,) = tmp_path.iterdir()
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows

    def fail(*_):
        raise AssertionError("generated again")

    monkeypatch.setattr(generation, "generate", fail)
    assert cached(source(tmp_path)) == rows


def test_every_setting_has_a_file_of_its_own(tmp_path):
    variants = [
        {},
        {"num_samples": 5},
        {"seed": 7},
        {"faithful": False},
        {"tokenizer": "bytes"},
    ]
    for changes in variants:
        cached(source(tmp_path, **changes), length=2048)
    essay = tmp_path / "essay.txt"
    essay.write_text("A short story. It ends here. " * 50)
    cache = tmp_path / "essays"
    for changes in ({}, {"essays": str(essay)}):
        cached(source(cache, **changes), name="niah_single_2")
    assert len(list(tmp_path.glob("*.jsonl"))) == len(variants)
    assert len(list(cache.glob("*.jsonl"))) == 2


@pytest.mark.parametrize("torn", ["", '{"index": 3, "inp', "\x00\x00"])
def test_an_interrupted_set_goes_on_where_it_stopped(tmp_path, monkeypatch, torn):
    src = source(tmp_path, num_samples=6)
    expected = cached(source(num_samples=6))
    made = []
    draw_within = fitting.draw_within

    def draw_and_stop(task, length, seed, index, *rest):
        made.append(index)
        if index == 3 and len(made) == 4:
            raise KeyboardInterrupt
        return draw_within(task, length, seed, index, *rest)

    monkeypatch.setattr(fitting, "draw_within", draw_and_stop)
    with pytest.raises(KeyboardInterrupt):
        cached(src)
    (partial,) = tmp_path.glob("*.partial")
    assert len(partial.read_text().splitlines()) == 3
    with partial.open("a") as file:
        file.write(torn)
    assert cached(src) == expected
    assert made == [0, 1, 2, 3, 3, 4, 5]
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".jsonl"


def test_a_damaged_cache_file_is_made_again(tmp_path):
    expected = cached(source(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-200])
    assert cached(source(tmp_path)) == expected
    assert len(file.read_text().splitlines()) == 4


def test_an_unwritable_cache_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match=f"--cache {blocked}"):
        cached(source(blocked / "cache"))


def test_too_few_questions_are_refused(tmp_path):
    path = tmp_path / "hotpot.json"
    item = {"question": "Who?", "answer": "me", "context": [["Title", ["I did."]]]}
    path.write_text(json.dumps([item] * 3))
    with pytest.raises(UserError, match="only 3 questions"):
        source(hotpotqa=str(path))
    assert len(cached(source(hotpotqa=str(path), num_samples=3), "qa_2")) == 3
