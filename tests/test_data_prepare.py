"""`python -m jhybrid.data.prepare` and the records it writes."""

import gzip
import json
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from jhybrid.config import DataConfig, TokenRecords
from jhybrid.data import load_tokenizer, prepare, train_batches, validation_batches
from jhybrid.data.records import RecordStore, write_records
from jhybrid.data.tokenizer import ByteTokenizer
from jhybrid.errors import UserError

TEXTS = [f"Document {i} " + "of the whale " * (i % 7) for i in range(40)]


@pytest.fixture
def texts(tmp_path):
    """Half of the documents in a .jsonl, half in a .jsonl.gz."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines[:20]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[20:]).encode()))
    return folder


@pytest.fixture
def records(texts, tmp_path):
    out = tmp_path / "records"
    arguments = ["--input", str(texts), "--tokenizer", "bytes", "--out", str(out)]
    assert prepare.main([*arguments, "--shard-tokens", "400"]) == 0
    return out


def test_records_hold_the_documents_in_order(records):
    tokenizer = load_tokenizer("bytes")
    store = RecordStore([str(records)], tokenizer, "data.paths")
    read = [store.read(i, 0, int(n)) for i, n in enumerate(store.lengths)]
    assert [tokenizer.decode(ids) for ids in read] == TEXTS
    assert all(ids[-1] == tokenizer.eos and ids.dtype == np.int32 for ids in read)
    assert len(list(records.glob("*.arrayrecord"))) > 3
    assert tokenizer.decode(store.read(3, 9, 12)) == TEXTS[3][9:12]


def test_training_and_validation_divide_the_records(records):
    config = DataConfig(
        sources=(TokenRecords(paths=(str(records),)),),
        tokenizer="bytes",
        sequence_length=64,
        document_alignment=8,
        batch_size=1,
    )
    training = train_batches(config)
    epoch = [next(training) for _ in range(len(training.sources[0]))]
    held_out = list(validation_batches(config))
    predicted = [
        token
        for batch in epoch + held_out
        for token in batch["targets"][batch["targets"] >= 0].tolist()
    ]
    expected = [token for text in TEXTS for token in [*text.encode()[1:], 256]]
    # The cut may divide a document, and the first token after it is then given, not predicted.
    assert 0 <= len(expected) - len(predicted) <= 1
    difference = np.bincount(expected, minlength=257) - np.bincount(predicted, minlength=257)
    assert difference.min() >= 0 and difference.sum() <= 1
    share = sum(int((batch["targets"] >= 0).sum()) for batch in held_out) / len(expected)
    assert abs(share - 0.05) < 0.005


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.eos = 70_000, 69_999
    metadata = write_records(tmp_path / "out", [np.array([65_536, 1])], tokenizer)
    assert metadata["dtype"] == "uint32"
    store = RecordStore([str(tmp_path / "out")], tokenizer, "data.paths")
    assert store.read(0, 0, 3).tolist() == [65_536, 1, 69_999]


def test_the_number_of_documents_can_be_limited_and_empty_ones_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' + '{"text": "x"}\n' * 9)
    out = tmp_path / "out"
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--out", str(out)]
    assert prepare.main([*arguments, "--max-documents", "5"]) == 0
    assert json.loads((out / "metadata.json").read_text())["documents"] == 4


def test_a_failed_run_leaves_nothing_behind(texts, tmp_path, capsys):
    (texts / "c.jsonl").write_text('{"text": "fine"}\n{"text": "cut')
    out = tmp_path / "new" / "records"
    assert prepare.main(["--input", str(texts), "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "c.jsonl:2: not a complete JSON line" in error
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.txt"], "--input: no such file: nowhere.txt"),
        (["--input", "empty.txt"], "no documents to write"),
        (["--input", "one.txt", "--out", "one.txt"], "--out one.txt: exists already"),
        (["--input", "one.txt", "--out", "one.txt/x"], "--out one.txt/x: cannot be written"),
        (["--input", "one.txt", "--tokenizer", "gpt"], "data.tokenizer: 'gpt' is neither"),
    ],
)
def test_bad_arguments_are_named(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "empty.txt").touch()
    assert prepare.main(["--out", "out", *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "one.txt"]


@pytest.mark.parametrize("flag", ["--max-documents", "--shard-tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_counts_are_at_least_one(capsys, flag, value):
    with pytest.raises(SystemExit) as exited:
        prepare.main(["--input", "one.txt", "--out", "new", flag, value])
    error = capsys.readouterr().err
    assert exited.value.code == 2
    assert error.count("\n") == 1 and flag in error


def test_a_hub_dataset_is_streamed(tmp_path, monkeypatch, capsys):
    asked = {}

    def load_dataset(path, **options):
        asked.update(path=path, **options)
        return iter([{"body": text, "id": 1} for text in TEXTS])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    arguments = ["--hf", "owner/name", "--hf-name", "sample", "--tokenizer", "bytes"]
    out = tmp_path / "out"
    assert prepare.main([*arguments, "--text-field", "body", "--out", str(out)]) == 0
    assert asked == {"path": "owner/name", "name": "sample", "split": "train", "streaming": True}
    assert json.loads((out / "metadata.json").read_text())["documents"] == len(TEXTS)

    assert prepare.main([*arguments, "--out", str(tmp_path / "other")]) == 2
    assert "'text' holds no text in owner/name; fields: body, id" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_stream_that_breaks_off_is_reported(tmp_path, monkeypatch, capsys):
    def load_dataset(path, **options):
        yield {"text": "fine"}
        raise ConnectionError("the hub is gone\nand more")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert prepare.main(["--hf", "owner/name", "--out", str(tmp_path / "out")]) == 2
    assert "--hf owner/name: cannot be streamed (the hub is gone)\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_datasets_package_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare.main(["--hf", "owner/name", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'jhybrid[data]'" in capsys.readouterr().err


def truncate(folder):
    path = folder / "tokens-00001.arrayrecord"
    path.write_bytes(path.read_bytes()[:-100])


def test_records_of_another_tokenizer_or_damaged_ones_are_refused(records):
    def load(tokenizer="bytes"):
        RecordStore([str(records)], load_tokenizer(tokenizer), "data.sources.0.paths")

    with pytest.raises(UserError, match="was prepared with tokenizer 'bytes', which is not"):
        load("bpe4096")
    whole = (records / "metadata.json").read_text()
    (records / "metadata.json").write_text(whole.replace('"bytes"', '"octets"'))
    with pytest.raises(UserError, match=r"metadata\.json is damaged"):
        load()
    (records / "metadata.json").write_text(whole)
    lengths = records / "tokens-00000.lengths.npy"
    right = np.load(lengths)
    np.save(lengths, np.maximum(right, 1) - 1)
    with pytest.raises(UserError, match=r"00000\.lengths\.npy: \d+ tokens instead of \d+"):
        load()
    np.save(lengths, right)
    truncate(records)
    with pytest.raises(UserError, match=r"00001\.arrayrecord is truncated or damaged"):
        load()
    (records / "tokens-00001.arrayrecord").unlink()
    (records / "tokens-00000.lengths.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match=r"00000\.lengths\.npy: missing or damaged"):
        load()
    (records / "metadata.json").write_text("{")
    with pytest.raises(UserError, match=r"metadata\.json is damaged"):
        load()
    (records / "metadata.json").unlink()
    with pytest.raises(UserError, match=r"metadata\.json is missing"):
        load()


def test_a_missing_shard_is_noticed(records):
    (records / "tokens-00001.arrayrecord").unlink()
    with pytest.raises(UserError, match=r"tokens-00001\.arrayrecord is missing"):
        RecordStore([str(records)], load_tokenizer("bytes"), "data.sources.0.paths")


def test_worker_processes_give_the_same_batches(records, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import dataclasses
            import numpy as np
            from absl import app
            from jhybrid.config import AssociativeRecall, DataConfig, TokenRecords
            from jhybrid.data import train_batches

            def main(_):
                sources = TokenRecords(paths=({str(records)!r},)), AssociativeRecall(length=64)
                config = DataConfig(sources=sources, tokenizer="bytes", sequence_length=64)
                here = train_batches(config)
                there = train_batches(dataclasses.replace(config, num_workers=1))
                next(here)
                there.set_state(here.get_state())
                for _ in range(3):
                    assert np.array_equal(next(here)["tokens"], next(there)["tokens"])
                there.close()

            if __name__ == "__main__":
                app.run(main)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
