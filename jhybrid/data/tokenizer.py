"""Tokenizers: the shipped BPE, raw bytes, or any Hugging Face `tokenizer.json`.

Special tokens are never produced from text: a document that spells one out is encoded letter by
letter, so a stray "<|endoftext|>" in the data cannot end a document.
"""

import abc
import functools
import gzip
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import tokenizers

from jhybrid.config import ModelConfig, require
from jhybrid.errors import UserError
from pallas_kernels.array_types import Int

END_OF_TEXT = "<|endoftext|>"
SHIPPED_BPE = pathlib.Path(__file__).parent / "tokenizers" / "bpe4096.json.gz"
SETTINGS = "tokenizer_config.json"  # beside a tokenizer.json
# Names of the end-of-document token in public tokenizers, tried in this order.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
      name: as the config spells it.
      fingerprint: sha256 of what decides the encoding; equal fingerprints give equal ids.
      vocab_size: ids are smaller than this.
      eos: the id that ends a document.
      bos: the id that begins a text, where the tokenizer has one.
      opening: the ids that the tokenizer's own template puts before a text; `encode` does not.
      byte_lengths: UTF-8 bytes each id stands for, 0 for special ids.
      ordinary_ids: the ids that stand for text, sorted.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos: int
    bos: int | None = None
    opening: tuple[int, ...] = ()
    byte_lengths: Int[np.ndarray, "vocab"]

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, ids: Iterable[SupportsIndex]) -> str: ...

    def special(self, token: str) -> int:
        """The id of a special token; UserError when there is none of this name."""
        raise UserError(f"data.tokenizer: {self.name!r} has no special token {token}")

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "n"]]:
        """One int32 array of ids per text."""
        return [np.asarray(self.encode(text), np.int32) for text in texts]

    @functools.cached_property
    def ordinary_ids(self) -> Int[np.ndarray, "ordinary"]:
        return np.flatnonzero(self.byte_lengths > 0).astype(np.int32)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    vocab_size = 257
    eos = 256

    def __init__(self):
        self.byte_lengths = np.array([1] * 256 + [0], np.int32)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "n"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library, without its template of special tokens."""

    def __init__(
        self,
        name: str,
        serialized: bytes,
        end_name: str | None = None,
        begin_name: str | None = None,
    ):
        self.name = name
        self.fingerprint = hashlib.sha256(serialized).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(serialized)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {name} is not a tokenizer.json ({error})") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = END_NAMES if end_name is None else (end_name,)
        found = [vocabulary[n] for n in names if n in vocabulary]
        require(bool(found), f"data.tokenizer: {name} has no end-of-text token among {names}")
        self.eos = found[0]
        self.bos = None if begin_name is None else vocabulary.get(begin_name)
        templated = self._tokenizer.encode("a")
        inside = templated.special_tokens_mask.index(0)
        self.opening = tuple(templated.ids[:inside])
        self.byte_lengths = np.zeros(self.vocab_size, np.int32)
        byte_level = "ByteLevel" in str(json.loads(serialized).get("decoder"))
        for token, index in vocabulary.items():
            self.byte_lengths[index] = _byte_length(token, byte_level)
        for index, token in self._tokenizer.get_added_tokens_decoder().items():
            self.byte_lengths[index] = 0 if token.special else len(token.content.encode())

    def special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        return super().special(token) if found is None else found

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "n"]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int32) for e in encoded]


def _byte_length(token: str, byte_level: bool) -> int:
    """UTF-8 bytes of text a vocabulary entry stands for.

    A byte-level vocabulary spells one byte per character. Others spell text, with "▁" for a blank
    and "<0xNN>" for a single byte.
    """
    if byte_level:
        return len(token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """ "bpe4096" (shipped), "bytes", or the path of a tokenizer.json or of the folder it is in."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe4096":
        return HuggingFaceTokenizer(name, gzip.decompress(SHIPPED_BPE.read_bytes()), END_OF_TEXT)
    path = tokenizer_files(name)[0]
    try:
        serialized = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.tokenizer: {path} cannot be read ({error.strerror})") from None
    end, begin = (_configured(path.parent, f"{which}_token") for which in ("eos", "bos"))
    return HuggingFaceTokenizer(name, serialized, end, begin)


def tokenizer_files(name: str) -> tuple[pathlib.Path, ...]:
    """What tokenizer `name` is read from: nothing if it is shipped, else its tokenizer.json first.

    UserError when there is no such tokenizer.
    """
    if name in ("bytes", "bpe4096"):
        return ()
    path = pathlib.Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    require(
        path.is_file(),
        f"data.tokenizer: {name!r} is neither 'bpe4096', 'bytes' nor a tokenizer.json file",
    )
    beside = path.with_name(SETTINGS)
    return (path, beside) if beside.is_file() else (path,)


def _configured(folder: pathlib.Path, which: str) -> str | None:
    """The special token `which` of the `tokenizer_config.json` beside a tokenizer, if it exists."""
    path = folder / SETTINGS
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_bytes()).get(which)
    except (ValueError, AttributeError):
        raise UserError(f"data.tokenizer: {path} is not a JSON object") from None
    return token.get("content") if isinstance(token, dict) else token


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    require(
        tokenizer.vocab_size <= model.vocab_size,
        f"data.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} entries, more than "
        f"model.vocab_size={model.vocab_size}",
    )
