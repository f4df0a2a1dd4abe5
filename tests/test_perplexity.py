"""Perplexity by context length, the text it is measured on, and the Markov baseline."""

import math

import numpy as np
import pytest

from jhybrid.config import AssociativeRecall, DataConfig, EmbeddedText, TextFiles
from jhybrid.data import embedded_text, load_tokenizer
from jhybrid.errors import UserError
from jhybrid.evals import markov, text
from jhybrid.evals.perplexity import perplexity, windows

VOCAB = 8
BYTE_LENGTHS = np.array([0, 1, 2, 3, 1, 2, 3, 1], np.int32)  # token 0 ends a document


class LookUp:
    """A language model that is a table: log p(target | input, position)."""

    def __init__(self, length: int):
        logits = np.random.default_rng(0).normal(size=(VOCAB, length, VOCAB))
        self.table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.shapes = set()

    def __call__(self, inputs, targets):
        self.shapes.add(inputs.shape)
        positions = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
        found = self.table[inputs, positions, np.maximum(targets, 0)]
        return np.where(targets >= 0, found, 0.0)


def stream(n: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, n).astype(np.int32)


def test_windows_predict_every_token_but_the_first_once():
    tokens = np.arange(10, dtype=np.int32) + 100
    inputs, targets = windows(tokens, 4)
    assert inputs.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 0, 0, 0]]
    assert targets.tolist() == [[101, 102, 103, 104], [105, 106, 107, 108], [109, -1, -1, -1]]


@pytest.mark.parametrize(("length", "batch_size"), [(4, 1), (4, 3), (16, 2), (29, 2), (28, 4)])
def test_perplexity_equals_a_sum_by_hand(length, batch_size):
    model, tokens = LookUp(length), stream(30)
    row = perplexity(model, tokens, BYTE_LENGTHS, length=length, batch_size=batch_size)
    losses = [
        (-model.table[tokens[i], i % length, tokens[i + 1]], BYTE_LENGTHS[tokens[i + 1]])
        for i in range(29)
        if tokens[i + 1] != 0
    ]
    total, bytes_ = sum(loss for loss, _ in losses), sum(size for _, size in losses)
    assert row["tokens"] == len(losses)
    assert row["bytes"] == bytes_
    assert row["windows"] == math.ceil(29 / length)
    assert row["loss"] == pytest.approx(total / len(losses), abs=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(total / len(losses)), abs=1e-4)
    assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / bytes_, abs=1e-6)
    assert model.shapes == {(min(batch_size, row["windows"]), length)}


def test_the_same_tokens_are_scored_at_every_length():
    tokens = stream(500)
    rows = [
        perplexity(LookUp(n), tokens, BYTE_LENGTHS, length=n, batch_size=2) for n in (16, 64, 300)
    ]
    assert len({(row["tokens"], row["bytes"]) for row in rows}) == 1


def test_loss_by_position_sorts_by_how_much_was_read():
    tokens = np.ones(601, np.int32)

    def model(inputs, targets):
        return np.where(targets >= 0, -np.arange(inputs.shape[1], dtype=float), 0.0)

    row = perplexity(model, tokens, BYTE_LENGTHS, length=300, batch_size=1)
    assert row["loss_by_position"] == [
        {"positions": "0-63", "loss": 31.5},
        {"positions": "64-127", "loss": 95.5},
        {"positions": "128-255", "loss": 191.5},
        {"positions": "256-299", "loss": 277.5},
    ]
    assert row["standard_error"] == 0.0
    assert row["loss"] == pytest.approx(149.5)


def test_a_text_shorter_than_the_length_does_not_fit():
    row = perplexity(LookUp(32), stream(32), BYTE_LENGTHS, length=32, batch_size=1)
    assert row == {"result": "does not fit, needs a text of > 32 tokens, has 32"}
    row = perplexity(LookUp(32), stream(33), BYTE_LENGTHS, length=32, batch_size=1)
    assert (row["windows"], row["standard_error"]) == (1, None)


# ---- the text ----


def test_validation_text_is_what_training_holds_out():
    tokenizer = load_tokenizer("bpe4096")
    data = DataConfig(sources=(AssociativeRecall(), EmbeddedText()))
    documents = text.config_documents(data, "validation", tokenizer, 1 << 20)
    assert [tokenizer.decode(ids) for ids in documents] == embedded_text("validation")
    assert all(ids[-1] == tokenizer.eos for ids in documents)
    short = text.config_documents(data, "validation", tokenizer, 100)
    assert np.array_equal(np.concatenate(short), documents[0][:100])


def test_a_text_file_is_read_whole(tmp_path):
    (tmp_path / "a.txt").write_text("One two.\nThree — four.")
    tokenizer = load_tokenizer("bytes")
    (document,) = text.file_documents(str(tmp_path / "a.txt"), tokenizer)
    assert bytes(document[:-1].tolist()).decode() == "One two.\nThree — four."
    with pytest.raises(UserError, match=r"absent\.txt"):
        text.file_documents(str(tmp_path / "absent.txt"), tokenizer)


def test_a_config_without_text_says_so():
    with pytest.raises(UserError, match="--text"):
        text.config_documents(
            DataConfig(sources=(AssociativeRecall(),)), "validation", load_tokenizer("bytes"), 10
        )


# ---- the Markov baseline ----


def test_the_markov_model_equals_counting_by_hand():
    train, validation = ["abcabcabd", "abca"], ["abcd", "zabc"]

    def probability(context: bytes, byte: int) -> float:
        joint = total = 0
        for document in train:
            data = bytes(3) + document.encode()
            for i in range(3, len(data)):
                total += data[i - 3 : i] == context
                joint += data[i - 3 : i] == context and data[i] == byte
        return (joint + 0.01) / (total + 2.56)

    bits = []
    for document in validation:
        data = bytes(3) + document.encode()
        bits += [-math.log2(probability(data[i - 3 : i], data[i])) for i in range(3, len(data))]
    assert markov.bits_per_byte(train, validation) == pytest.approx(sum(bits) / len(bits))


def test_a_markov_model_of_nothing_is_uniform():
    assert markov.bits_per_byte(["q"], ["abcdefgh"]) == pytest.approx(8.0, abs=0.2)


def test_the_baseline_command_prints_the_number_to_beat(capsys, tmp_path):
    assert markov.main([]) == 0
    shown = capsys.readouterr().out
    assert "order-3 byte Markov model, add-0.01: 2.45" in shown


def test_the_baseline_reads_the_files_of_a_config(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc abc " * 1000)
    data = DataConfig(sources=(TextFiles(paths=(str(tmp_path),)),))
    tokenizer = load_tokenizer("bytes")
    parts = [
        [tokenizer.decode(ids) for ids in text.config_documents(data, split, tokenizer, 1 << 20)]
        for split in ("train", "validation")
    ]
    assert markov.bits_per_byte(*parts) < 0.05  # its three first bytes of 600 are dear
