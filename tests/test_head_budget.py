"""What head routing costs: windows, differences by window, and which answers are right."""

import numpy as np
import pytest

from jhybrid.head_budget import ROWS, against, right, windows


def test_windows_are_consecutive_and_come_in_whole_batches():
    tokens = np.arange(100, dtype=np.int32)
    (batch,) = windows(tokens, 9)  # 11 windows, of which 8 fill a batch
    np.testing.assert_array_equal(batch["tokens"], np.arange(9 * ROWS).reshape(ROWS, 9))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["positions"][-1], np.arange(9))
    (few,) = windows(tokens, 30)
    assert few["tokens"].shape == (3, 30)


def test_the_error_is_that_of_differences_by_window():
    base = np.array([1.0, 3.0, 2.0])
    row = against(base + np.array([0.01, 0.03, 0.02]), base)
    assert row["loss"] == pytest.approx(2.02)
    assert row["perplexity"] == pytest.approx(np.exp(2.02))
    assert row["higher"] == pytest.approx(np.exp(0.02) - 1)
    assert row["standard_error"] == pytest.approx(np.exp(0.02) * 0.01 / np.sqrt(3))
    assert against(base[:1], base[:1])["standard_error"] is None


def test_an_answer_is_right_when_each_of_its_tokens_is_the_likeliest():
    batch = {
        "segment_ids": np.array([[0, 0, 0, 0, 1, 1, 1, -1]]),
        "prompt": np.array([[1, 1, 0, 0, 1, 1, 0, 0]]),
        "targets": np.array([[5, 6, 7, 8, 5, 6, 7, -1]]),
    }
    # the last token of a prompt predicts the first of its answer
    for wrong, expected in ((0, [1, 1]), (1, [0, 1]), (3, [0, 1]), (4, [1, 1]), (5, [1, 0])):
        likeliest = np.arange(8)[None] != wrong
        assert list(right(batch, likeliest)) == [bool(x) for x in expected]
