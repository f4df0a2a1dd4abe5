"""Where token documents come from: text encoded in memory, and token ranges of other stores."""

import hashlib
from collections.abc import Iterable

import numpy as np

from jhybrid.data.rows import TokenStore
from jhybrid.data.tokenizer import Tokenizer
from pallas_kernels.array_types import Int

# Texts encoded at a time: enough for the tokenizer's threads, little enough to hold twice.
BATCH = 1024


class TextStore:
    """Texts, encoded once and held in memory as one array of ids."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer):
        dtype = np.uint16 if tokenizer.vocab_size <= 65535 else np.uint32
        end = np.array([tokenizer.eos], dtype)
        texts = list(texts)
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for i in range(0, len(texts), BATCH):
            for ids in tokenizer.encode_batch(texts[i : i + BATCH]):
                parts += [ids.astype(dtype), end]
                lengths.append(len(ids) + 1)
        self._ids = np.concatenate(parts) if parts else np.zeros(0, dtype)
        self.lengths = np.asarray(lengths, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.fingerprint = hashlib.sha256(self._ids.tobytes()).hexdigest()

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        first = int(self._starts[document])
        return self._ids[first + start : first + stop].astype(np.int32)


class TokenRange:
    """Tokens first..last of a store's documents laid end to end, as documents of their own."""

    def __init__(self, store: TokenStore, first: int, last: int):
        starts = np.concatenate([[0], np.cumsum(store.lengths, dtype=np.int64)])
        begin = np.clip(first - starts[:-1], 0, store.lengths)
        end = np.clip(last - starts[:-1], 0, store.lengths)
        self._documents = np.flatnonzero(end > begin)
        self._begin = begin[self._documents]
        self.lengths = (end - begin)[self._documents]
        self.fingerprint = f"{store.fingerprint}:{first}:{last}"
        self._store = store

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        offset = int(self._begin[document])
        return self._store.read(int(self._documents[document]), offset + start, offset + stop)
