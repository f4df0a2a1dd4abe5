"""Recall and needle documents: every answer can be found in its own document."""

import re

import numpy as np
import pytest

from jhybrid.config import AssociativeRecall, DataConfig, Needle
from jhybrid.data import embedded_text, load_tokenizer, train_batches
from jhybrid.data.needle import NeedleTask
from jhybrid.data.recall import AssociativeRecallTask
from jhybrid.errors import UserError

TASKS = {
    "standard": (AssociativeRecall(), "bpe4096"),
    "full": (AssociativeRecall(num_pairs=32, num_queries=32, length=128), "bpe4096"),
    "few-queries": (AssociativeRecall(num_pairs=8, num_queries=3, length=65), "bpe4096"),
    "bytes": (AssociativeRecall(num_pairs=100, num_queries=100, length=512), "bytes"),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_recall_answer_follows_the_same_key_earlier(name):
    config, tokenizer = TASKS[name]
    task = AssociativeRecallTask(config, load_tokenizer(tokenizer))
    for seed in range(20):
        tokens, targets, *_ = task.example(np.random.default_rng(seed))
        assert len(tokens) == len(targets) == config.length
        (asked,) = np.nonzero(targets >= 0)
        assert len(asked) == config.num_queries
        assert asked.min() >= 2 * config.num_pairs
        for at in asked:
            (earlier,) = np.nonzero(tokens[:at] == tokens[at])
            assert earlier.tolist() == [earlier[0]] and earlier[0] < 2 * config.num_pairs
            assert tokens[earlier[0] + 1] == targets[at]
            assert at + 1 == len(tokens) or tokens[at + 1] == targets[at]
        keys, values = tokens[0 : 2 * config.num_pairs : 2], tokens[1 : 2 * config.num_pairs : 2]
        assert len({*keys, *values}) == 2 * config.num_pairs


def test_recall_uses_ordinary_tokens_only():
    tokenizer = load_tokenizer("bytes")
    task = AssociativeRecallTask(AssociativeRecall(num_pairs=8, num_queries=8), tokenizer)
    tokens, *_ = task.example(np.random.default_rng(0))
    assert tokens.max() < 256


def test_recall_gaps_follow_the_power_law():
    config = AssociativeRecall(num_pairs=4, num_queries=1, length=136, power=0.01)
    task = AssociativeRecallTask(config, load_tokenizer("bpe4096"))
    gaps = [
        (int(np.nonzero(task.example(np.random.default_rng(seed)).targets >= 0)[0][0]) - 8) // 2
        for seed in range(2000)
    ]
    expected = np.arange(1, 65) ** -0.99
    expected /= expected.sum()
    seen = np.bincount(gaps, minlength=64) / len(gaps)
    assert abs(seen[0] - expected[0]) < 0.04
    assert abs(seen[32:].sum() - expected[32:].sum()) < 0.04


@pytest.mark.parametrize("needles", [1, 4])
@pytest.mark.parametrize("tokenizer", ["bpe4096", "bytes"])
def test_the_needle_is_in_the_context_and_is_the_answer(needles, tokenizer):
    tokenizer = load_tokenizer(tokenizer)
    length = 512 if tokenizer.name == "bpe4096" else 1200
    task = NeedleTask(Needle(length=length, num_needles=needles, answer_only=True), tokenizer)
    prose = re.sub(r"\s+", " ", " ".join(embedded_text("train")))
    lengths = []
    for seed in range(10):
        tokens, targets, *_ = task.example(np.random.default_rng(seed))
        lengths.append(len(tokens))
        (answered,) = np.nonzero(targets >= 0)
        answer = tokenizer.decode(targets[answered])
        prompt = tokenizer.decode(tokens[: answered[0] + 1])
        asked = re.fullmatch(
            r"A special magic number is hidden within the following text\. Make sure to memorize "
            r"it\. I will quiz you about the number afterwards\.\n(.*)\nWhat is the special magic "
            r"number for (\S+) mentioned in the provided text\? The special magic number for \2 "
            r"mentioned in the provided text is",
            prompt,
        )
        assert asked, prompt
        context, key = asked.groups()
        facts = dict(
            re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", context)
        )
        assert len(facts) == needles
        assert answer == f" {facts[key]}."
        assert targets[-1] == tokenizer.eos
        hay = re.sub(r"One of the special magic numbers for \S+ is: \d{7}\.", "\n", context)
        assert all(part.strip() in prose for part in hay.split("\n"))
    assert max(lengths) <= task.length < length
    assert np.mean(lengths) > 0.85 * length


def test_the_haystack_carries_loss_unless_told_otherwise():
    task = NeedleTask(Needle(length=256), load_tokenizer("bpe4096"))
    tokens, targets, *_ = task.example(np.random.default_rng(3))
    assert np.array_equal(tokens[1:], targets[:-1])


def test_rows_hold_as_many_synthetic_documents_as_fit():
    config = DataConfig(
        sources=(AssociativeRecall(length=100),), sequence_length=400, document_alignment=64
    )
    batch = next(train_batches(config))
    (starts,) = np.nonzero(np.diff(batch["segment_ids"][0], prepend=-1) > 0)
    assert starts.tolist() == [0, 128, 256]
    assert np.all(batch["positions"][0, starts] == 0)


def test_two_needle_documents_of_half_a_row_share_it():
    batch = next(train_batches(DataConfig(sources=(Needle(length=256),), sequence_length=512)))
    assert np.all(batch["segment_ids"].max(axis=1) == 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AssociativeRecall(num_pairs=4, num_queries=5), "num_queries=5"),
        (lambda: AssociativeRecall(length=60), "length=60 must be at least"),
        (lambda: Needle(num_needles=0), "num_needles=0 must be positive"),
        (
            lambda: train_batches(DataConfig(sources=(Needle(),), sequence_length=256)),
            r"data\.sources\.0\.length=512 is longer than data\.sequence_length=256",
        ),
        (
            lambda: train_batches(DataConfig(sources=(Needle(length=50),))),
            r"Needle\.length=50 is too short",
        ),
        (
            lambda: train_batches(
                DataConfig(
                    sources=(AssociativeRecall(num_pairs=128, num_queries=8, length=512),),
                    tokenizer="bytes",
                )
            ),
            r"num_pairs=128: tokenizer 'bytes'",
        ),
    ],
    ids=["queries", "length", "needles", "row", "needle-length", "vocabulary"],
)
def test_impossible_tasks_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
