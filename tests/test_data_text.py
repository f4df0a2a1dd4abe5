"""Text files, the embedded corpus and the tokenizers."""

import gzip
import json
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jhybrid.config import BlockConfig, ModelConfig, SoftmaxConfig
from jhybrid.data import check_vocabulary, embedded_text, load_tokenizer
from jhybrid.data.text import SUFFIXES, find_files, read_documents, split_documents
from jhybrid.errors import UserError

SPECIAL = "<|endoftext|>"


def test_the_corpus_has_the_published_size_and_its_splits_join_to_the_whole():
    train, validation = embedded_text("train"), embedded_text("validation")
    sizes = [sum(len(text.encode()) for text in part) for part in (train, validation)]
    assert sum(sizes) == 1_204_997 + 2_143_081
    assert abs(sizes[1] / sum(sizes) - 0.05) < 1e-4
    assert train[0].startswith("CHAPTER 1. Loomings.")
    novel = train[0] + validation[0]
    assert novel.rstrip().endswith("the sea rolled on as it rolled five thousand years ago.")


@given(st.lists(st.text(alphabet="ab é😀\n", max_size=30), max_size=6), st.sampled_from([0.1, 0.5]))
def test_splitting_keeps_every_character_in_order(documents, fraction):
    parts = split_documents(documents, fraction)
    assert "".join(parts["train"] + parts["validation"]) == "".join(documents)
    assert all(parts["train"]) and all(parts["validation"])


@pytest.mark.parametrize("name", ["bpe4096", "bytes"])
def test_decoding_undoes_encoding(name):
    tokenizer = load_tokenizer(name)
    text = embedded_text("validation")[0] + " naïve 😀\n\n\x00\t"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert np.array_equal(tokenizer.encode_batch([text])[0], ids)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert max(ids) < tokenizer.vocab_size and tokenizer.eos < tokenizer.vocab_size
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(text) == ids


@pytest.mark.parametrize("name", ["bpe4096", "bytes"])
def test_a_special_token_spelled_in_the_text_does_not_end_the_document(name):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(f"a{SPECIAL}b")
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == f"a{SPECIAL}b"
    assert tokenizer.eos not in tokenizer.ordinary_ids


def save_word_tokenizer(folder, special, name="tokenizer.json"):
    vocabulary = {"<unk>": 0, "▁the": 1, "▁whale": 2, "<0x0A>": 3}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", *special])
    tokenizer.add_tokens(["é"])
    tokenizer.save(str(folder / name))
    return str(folder / name)


def test_a_hugging_face_file_is_loaded_with_its_end_token_and_byte_counts(tmp_path):
    path = save_word_tokenizer(tmp_path, ["</s>", "<stop>"])
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eos) == (7, 4)
    assert tokenizer.byte_lengths.tolist() == [0, 4, 6, 1, 0, 0, 2]
    assert tokenizer.ordinary_ids.tolist() == [1, 2, 3, 6]


def test_the_end_token_named_beside_the_tokenizer_wins(tmp_path):
    save_word_tokenizer(tmp_path, ["</s>", "<stop>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(str(tmp_path)).eos == 5


def test_unusable_tokenizers_are_named(tmp_path):
    with pytest.raises(UserError, match=r"neither 'bpe4096', 'bytes' nor a tokenizer\.json"):
        load_tokenizer("bpe4k")
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"broken\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(UserError, match="has no end-of-text token"):
        load_tokenizer(save_word_tokenizer(tmp_path, [], "endless.json"))


def test_a_vocabulary_larger_than_the_models_is_refused():
    mixer = SoftmaxConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    block = BlockConfig(mixer=mixer, channel_mixer=None)
    check_vocabulary(load_tokenizer("bytes"), ModelConfig(vocab_size=257, dim=8, blocks=(block,)))
    with pytest.raises(UserError, match=r"'bpe4096' has 4096 entries.*model\.vocab_size=1024"):
        small = ModelConfig(vocab_size=1024, dim=8, blocks=(block,))
        check_vocabulary(load_tokenizer("bpe4096"), small)


def test_files_are_found_in_folders_globs_and_by_name_in_a_fixed_order(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.jsonl", "deep/c.txt.gz", "deep/ignored.csv"):
        (tmp_path / name).touch()
    names = [p.name for p in find_files([str(tmp_path)], SUFFIXES, "f")]
    assert names == ["a.jsonl", "b.txt", "c.txt.gz"]
    found = find_files([f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"], SUFFIXES, "f")
    assert [p.name for p in found] == ["b.txt"]


def test_documents_come_whole_from_every_format(tmp_path):
    texts = ["first\r\nline", "été"]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt").write_bytes(texts[0].encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(texts[1].encode()))
    assert list(read_documents(tmp_path / "a.jsonl", "body")) == texts
    assert list(read_documents(tmp_path / "a.jsonl.gz", "body")) == texts
    assert list(read_documents(tmp_path / "a.txt")) == texts[:1]
    assert list(read_documents(tmp_path / "a.txt.gz")) == texts[1:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', r"cut\.jsonl:2: not a complete JSON line"),
        ("no.jsonl", b'{"txt": "a"}\n', r"no\.jsonl:1: has no text field 'text'"),
        ("half.jsonl", b'{"text": "a \\ud800 b"}\n', r"half\.jsonl:1: field 'text' is not Unicode"),
        ("deep.jsonl", b"[" * 200_000, r"deep\.jsonl:1: JSON nested too deeply"),
        ("list.jsonl", b"[1]\n", r"list\.jsonl:1: has no text field"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: not UTF-8"),
        ("cut.txt.gz", gzip.compress(b"words " * 99)[:-9], r"cut\.txt\.gz: truncated or damaged"),
        ("bad.txt.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff", r"bad\.txt\.gz: "),
        ("plain.txt.gz", b"not compressed", r"plain\.txt\.gz: cannot be read \(Not a gzipped"),
    ],
    ids=[
        "cut",
        "no-field",
        "surrogate",
        "deep",
        "list",
        "latin",
        "cut-gzip",
        "bad-gzip",
        "plain-gzip",
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_documents(tmp_path / name))


def test_missing_files_are_named(tmp_path):
    for entry in ("nowhere.txt", "nowhere/*.txt"):
        with pytest.raises(UserError, match=r"data\.paths: no such file: .*nowhere"):
            find_files([str(tmp_path / entry)], SUFFIXES, "data.paths")
    with pytest.raises(UserError, match=r"data\.paths: no \.txt.* file in folder"):
        find_files([str(tmp_path)], SUFFIXES, "data.paths")
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=r"a\.csv is not one of \.txt"):
        find_files([str(tmp_path / "a.csv")], SUFFIXES, "data.paths")
