"""Batches: reproducible, resumable anywhere, divided among processes, mixed as asked."""

import collections
import dataclasses
import json
import math

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jhybrid.config import AssociativeRecall, DataConfig, EmbeddedText, TextFiles
from jhybrid.data import embedded_text, load_tokenizer, train_batches, validation_batches
from jhybrid.errors import UserError

WORDS = ["whale", "ship", "sea", "captain", "harpoon", "leviathan", "voyage"]


@pytest.fixture
def files(tmp_path):
    """Sixty short documents of different lengths."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, rng.integers(1, 60))) + f" {i}." for i in range(60)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return TextFiles(paths=(str(path),), weight=2.0)


@pytest.fixture
def config(files):
    recall = AssociativeRecall(num_pairs=4, num_queries=4, length=64, weight=1.0)
    return DataConfig(
        sources=(files, recall),
        tokenizer="bytes",
        sequence_length=128,
        document_alignment=16,
        batch_size=4,
    )


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


def assert_equal(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(np.array_equal(batch[name], other[name]) for name in batch)


def test_batches_have_the_promised_shape_and_type(config):
    batch = next(train_batches(config))
    assert set(batch) == {"tokens", "targets", "segment_ids", "positions", "prompt", "task"}
    assert all(array.shape == (4, 128) and array.dtype == np.int32 for array in batch.values())


def test_two_runs_give_the_same_batches_and_another_seed_gives_others(config):
    assert_equal(take(train_batches(config), 12), take(train_batches(config), 12))
    other = next(train_batches(dataclasses.replace(config, seed=1)))
    assert not np.array_equal(next(train_batches(config))["tokens"], other["tokens"])


def test_resuming_at_any_batch_continues_exactly(config):
    batches = take(train_batches(config), 40)
    for cut in [*range(12), 25, 39]:
        first = train_batches(config)
        take(first, cut)
        state = json.loads(json.dumps(first.get_state()))
        second = train_batches(config)
        next(second)  # a restored iterator may have been used before
        second.set_state(state)
        assert_equal(take(second, min(3, 40 - cut)), batches[cut : cut + 3])


def test_the_state_stays_small(config):
    iterator = train_batches(config)
    take(iterator, 30)
    assert len(json.dumps(iterator.get_state())) < 100


def test_grains_checkpoint_in_orbax_restores_the_next_batch(config, tmp_path):
    iterator = train_batches(config)
    take(iterator, 5)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        expected = take(iterator, 2)
        restored = train_batches(config)
        args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(restored))
        manager.restore(5, args=args)
    assert_equal(take(restored, 2), expected)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_divide_every_batch(config, processes):
    whole = take(train_batches(config), 9)
    parts = [
        take(train_batches(config, process_index=i, process_count=processes), 9)
        for i in range(processes)
    ]
    joined = [
        {name: np.concatenate([part[i][name] for part in parts]) for name in whole[i]}
        for i in range(9)
    ]
    assert_equal(joined, whole)


def test_a_run_continues_with_another_number_of_processes(config):
    one = train_batches(config)
    take(one, 7)
    expected = next(one)
    pair = [train_batches(config, process_index=i, process_count=2) for i in range(2)]
    for iterator in pair:
        iterator.set_state({**one.get_state(), "batches": 7})
    tokens = np.concatenate([next(iterator)["tokens"] for iterator in pair])
    assert np.array_equal(tokens, expected["tokens"])


def test_an_indivisible_batch_is_refused(config):
    with pytest.raises(UserError, match=r"data\.batch_size=4 must be a multiple of the 3"):
        train_batches(config, process_count=3)


def test_weights_are_shares_of_token_positions(config):
    recall = text = 0
    for batch in take(train_batches(config), 60):
        is_text = (batch["tokens"] == ord(" ")).sum(axis=1) > 8
        text += int(is_text.sum())
        recall += int((~is_text).sum())
    assert abs(text - 2 * recall) <= 3


def test_an_epoch_reads_every_training_document_once_and_the_next_in_another_order(files):
    config = DataConfig(
        sources=(files,), tokenizer="bytes", sequence_length=512, document_alignment=1, batch_size=1
    )
    iterator = train_batches(config)
    rows = len(iterator.sources[0])

    def documents(batches):
        for batch in batches:
            for segment in range(batch["segment_ids"].max() + 1):
                yield bytes(batch["tokens"][batch["segment_ids"] == segment].tolist()).decode()

    first, second = list(documents(take(iterator, rows))), list(documents(take(iterator, rows)))
    lines = [json.loads(line)["text"] for line in open_lines(files)]
    whole = [line for line in lines if line in set(first)]
    assert collections.Counter(first) == collections.Counter(second)
    assert len(first) - len(whole) <= 1  # the document the validation cut divides
    assert whole == lines[: len(whole)] and len(whole) > 50
    assert first != second


def open_lines(files):
    with open(files.paths[0], encoding="utf-8") as file:
        return file.readlines()


def test_state_of_other_data_is_refused(config, tmp_path):
    state = train_batches(config).get_state()
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(open_lines(config.sources[0])))
    source = dataclasses.replace(config.sources[0], paths=(str(moved),))
    elsewhere = dataclasses.replace(config, sources=(source, config.sources[1]))
    train_batches(elsewhere).set_state(state)  # the same text in another place

    moved.write_text(moved.read_text() + '{"text": "One more line."}\n')
    for other in (elsewhere, dataclasses.replace(config, batch_size=8)):
        with pytest.raises(UserError, match="the checkpoint was made with other data"):
            train_batches(other).set_state(state)


def test_validation_covers_the_held_out_bytes_and_repeats_exactly():
    config = DataConfig(sequence_length=512, batch_size=8)
    batches = validation_batches(config)
    tokenizer = load_tokenizer(config.tokenizer)
    texts = embedded_text("validation")
    # The first token of a document is given, all others are predicted; so is the end, of 0 bytes.
    expected = sum(
        len(text.encode()) - tokenizer.byte_lengths[tokenizer.encode(text)[0]] for text in texts
    )
    assert sum(int(batch["bytes"].sum()) for batch in batches) == expected
    assert all(batch["tokens"].shape == (8, 512) for batch in batches)
    assert all(np.all(batch["bytes"][batch["targets"] < 0] == 0) for batch in batches)
    assert_equal(list(validation_batches(config)), list(batches))
    assert_equal(list(batches[1:3]), [batches[1], batches[2]])


def test_training_and_validation_share_no_row(config):
    seen = {row.tobytes() for batch in take(train_batches(config), 60) for row in batch["tokens"]}
    for sources in ([0], [1]):
        for batch in validation_batches(config, sources=sources):
            held_out = batch["tokens"][batch["segment_ids"].max(axis=1) >= 0]
            assert not seen & {row.tobytes() for row in held_out}


def test_validation_is_on_text_unless_there_is_none(config):
    total = sum(int((batch["targets"] >= 0).sum()) for batch in validation_batches(config))
    text = sum(
        int((batch["targets"] >= 0).sum()) for batch in validation_batches(config, sources=[0])
    )
    assert total == text
    synthetic = validation_batches(dataclasses.replace(config, sources=config.sources[1:]))
    assert len(synthetic) == 16 and synthetic[0]["bytes"].sum() > 0


def test_validation_batches_are_divided_among_processes(config):
    whole = validation_batches(config)
    halves = [validation_batches(config, process_index=i, process_count=2) for i in range(2)]
    assert [len(half) for half in halves] == [len(whole)] * 2
    for i, batch in enumerate(whole):
        joined = np.concatenate([half[i]["tokens"] for half in halves])
        assert np.array_equal(joined, batch["tokens"])


def test_sources_without_text_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    config = DataConfig(sources=(EmbeddedText(), TextFiles(paths=(str(tmp_path),))))
    with pytest.raises(UserError, match=r"data\.sources\.1: no train text"):
        train_batches(config)


def test_worker_processes_ask_for_parsed_flags(config):
    with pytest.raises(UserError, match=r"data\.num_workers=1: .*absl"):
        train_batches(dataclasses.replace(config, num_workers=1))


def test_the_log_says_what_packing_costs(config):
    lines = train_batches(config).describe().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("data.sources.0 (TextFiles): 58 documents, ")
    assert lines[0].endswith("% padding")
    assert lines[1] == "data.sources.1 (AssociativeRecall): endless, 0.0% padding"


def test_the_default_mixture_loses_little_to_padding():
    config = DataConfig(sequence_length=1024)
    batches = take(train_batches(config), 20)
    assert np.mean([batch["segment_ids"] < 0 for batch in batches]) < 0.02
    assert math.isclose(sum(b["tokens"].size for b in batches), 20 * 8 * 1024)
