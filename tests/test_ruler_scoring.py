"""Golden scores: NVIDIA's metric definitions worked out by hand."""

import pytest

from jhybrid.evals.ruler import scoring


@pytest.mark.parametrize(
    ("prediction", "cleaned"),
    [
        ("  7 \n", "7"),
        ("a\tb\x00c", "a\nb\nc"),
        ("\x07 x", "x"),
        ("a\x1fb\x20c\x7f", "a\nb c\x7f"),
        ("\x00\x01", ""),
    ],
)
def test_predictions_are_cleaned_as_published(prediction, cleaned):
    assert scoring.clean(prediction) == cleaned


@pytest.mark.parametrize(
    ("prediction", "references", "all_", "part"),
    [
        ("the numbers are 123 and 456", ["123", "456"], 1.0, 1.0),
        ("the numbers are 123 and 457", ["123", "456"], 0.5, 1.0),
        ("1234", ["123", "456", "789", "000"], 0.25, 1.0),
        ("denver broncos", ["Denver Broncos"], 1.0, 1.0),
        ("DENVER", ["Denver Broncos"], 0.0, 0.0),
        ("", ["x"], 0.0, 0.0),
        ("x", ["x", "x", "y"], 2 / 3, 1.0),
    ],
)
def test_matches_are_case_insensitive_substrings(prediction, references, all_, part):
    assert scoring.match_all(prediction, references) == pytest.approx(all_)
    assert scoring.match_part(prediction, references) == part


def test_a_perfect_answer_to_a_question_scores_one_hundred():
    # The mean over references would give 85.9 on SQuAD; any reference is enough.
    rows = [{"outputs": ["France", "in France", "the country of France"]}] * 2
    assert scoring.summarize("part", ["France", "france."], rows)["score"] == 100.0


def test_the_summary_counts_errors_and_empty_predictions():
    rows = [{"outputs": ["1", "2"]}, {"outputs": ["3"]}, {"outputs": ["4"]}, {"outputs": ["5"]}]
    summary = scoring.summarize("all", ["1", "3", " \x00", "no"], rows)
    # Scores 0.5, 1, 0, 0: mean 0.375, sample deviation sqrt(0.6875 / 3), n = 4.
    assert summary == {
        "score": 37.5,
        "standard_error": 23.94,
        "metric": "string_match_all",
        "num_samples": 4,
        "nulls": 1,
    }


def test_one_sample_has_no_standard_error():
    summary = scoring.summarize("all", ["1"], [{"outputs": ["1"]}])
    assert (summary["score"], summary["standard_error"]) == (100.0, None)


def test_needles_are_counted_by_their_depth():
    rows = [
        {"outputs": ["11", "22"], "depths": [0.0, 100.0]},
        {"outputs": ["33", "44"], "depths": [19.99, 20.0]},
    ]
    bins = scoring.summarize("all", ["11", "44"], rows)["by_depth"]
    assert [(b["depth"], b["score"], b["needles"]) for b in bins] == [
        ("0-20", 50.0, 2),
        ("20-40", 100.0, 1),
        ("40-60", None, 0),
        ("60-80", None, 0),
        ("80-100", 0.0, 1),
    ]
