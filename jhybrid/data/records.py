"""Tokenized documents on disk: ArrayRecord shards, their lengths, and one metadata.json.

A folder holds `tokens-00000.arrayrecord` (one record per document: its ids, little-endian uint16
or uint32, the last one the end-of-text id), `tokens-00000.lengths.npy`, and `metadata.json`, which
names the tokenizer. The folder appears complete or not at all.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from jhybrid.config import require
from jhybrid.data.text import find_files
from jhybrid.data.tokenizer import Tokenizer
from jhybrid.errors import UserError
from pallas_kernels.array_types import Int

METADATA = "metadata.json"
FORMAT = 1
SHARD_SIZES = ("documents", "tokens", "bytes")  # what metadata.json says of each shard


@dataclasses.dataclass
class _Shard:
    """Where the next documents go."""

    path: pathlib.Path

    def __post_init__(self):
        # One record per group: random access reads one document, not its neighbours.
        self._writer = ArrayRecordWriter(str(self.path), "group_size:1")
        self._lengths: list[int] = []
        self.tokens = 0

    def write(self, ids: np.ndarray) -> None:
        self._writer.write(ids.tobytes())
        self._lengths.append(len(ids))
        self.tokens += len(ids)

    def close(self) -> dict[str, int | str]:
        self._writer.close()
        np.save(self.path.with_suffix(".lengths.npy"), np.asarray(self._lengths, np.uint32))
        return {
            "file": self.path.name,
            "documents": len(self._lengths),
            "tokens": self.tokens,
            "bytes": self.path.stat().st_size,
        }


def write_records(
    out: pathlib.Path,
    documents: Iterable[Int[np.ndarray, "n"]],
    tokenizer: Tokenizer,
    shard_tokens: int = 100_000_000,
) -> dict:
    """Writes documents (ids without the end-of-text id) to the new folder `out`.

    Everything is written to a hidden folder beside it, which is renamed at the end.
    Returns the metadata.
    """
    require(not out.exists(), f"--out {out}: exists already")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    try:
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65535 else "<u4")
        shards, current = [], None
        for ids in documents:
            if current is None:
                current = _Shard(partial / f"tokens-{len(shards):05d}.arrayrecord")
            current.write(np.append(ids, tokenizer.eos).astype(dtype))
            if current.tokens >= shard_tokens:
                shards.append(current.close())
                current = None
        if current is not None:
            shards.append(current.close())
        require(len(shards) > 0, "no documents to write")
        metadata = {
            "format": FORMAT,
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "documents": sum(s["documents"] for s in shards),
            "tokens": sum(s["tokens"] for s in shards),
            "shards": shards,
        }
        (partial / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return metadata


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


class RecordStore:
    """Documents of prepared ArrayRecord files, or a range of their tokens; read on demand."""

    def __init__(self, paths: Sequence[str], tokenizer: Tokenizer, field: str):
        files = find_files(paths, (".arrayrecord",), field)
        digest = hashlib.sha256()
        lengths = []
        listed: set[pathlib.Path] = set()
        for file in files:
            shards = _read_shards(file.parent, tokenizer, field)
            shard = _check_shard(file, shards, field)
            listed.update(file.parent / name for name in shards)
            digest.update(json.dumps(shard).encode())
            lengths.append(_read_lengths(file, shard))
        for missing in sorted(listed - set(files)):
            folder = any(missing.parent == pathlib.Path(path).expanduser() for path in paths)
            require(not folder, f"{field}: {missing} is missing")
        self.lengths = np.concatenate(lengths)
        self.fingerprint = digest.hexdigest()
        self._files = files
        self._source = grain.sources.ArrayRecordDataSource([str(file) for file in files])

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, "n"]:
        try:
            raw = self._source[document]
        except Exception as error:  # the reader raises whatever its C++ side reports
            raise UserError(
                f"record {document} of {self._files[0].parent} cannot be read ({error})"
            ) from None
        wide = len(raw) == 4 * int(self.lengths[document])
        return np.frombuffer(raw, "<u4" if wide else "<u2")[start:stop].astype(np.int32)


def _read_shards(folder: pathlib.Path, tokenizer: Tokenizer, field: str) -> dict[str, dict]:
    """What the folder's metadata says of each shard, if the tokenizer is the one it names."""
    path = folder / METADATA
    require(
        path.is_file(),
        f"{field}: {path} is missing; ArrayRecord files are made by python -m jhybrid.data.prepare",
    )
    try:
        metadata = json.loads(path.read_text())
        shards = {shard["file"]: shard for shard in metadata["shards"]}
        sizes = [int(shard[name]) for shard in shards.values() for name in SHARD_SIZES]
        made_with, made_for = metadata["tokenizer"], metadata["tokenizer_sha256"]
        version = metadata["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{field}: {path} is damaged") from None
    require(min(sizes, default=0) >= 0, f"{field}: {path} is damaged")
    require(version == FORMAT, f"{field}: {path} has format {version}, expected {FORMAT}")
    require(
        made_for == tokenizer.fingerprint,
        f"{field}: {folder} was prepared with tokenizer {made_with!r}, which is not "
        f"data.tokenizer={tokenizer.name!r}",
    )
    return shards


def _check_shard(file: pathlib.Path, shards: dict[str, dict], field: str) -> dict:
    """The metadata of one shard, after checking that it is whole."""
    require(file.name in shards, f"{field}: {file} is not listed in {file.parent / METADATA}")
    shard, size = shards[file.name], file.stat().st_size
    require(
        size == shard["bytes"],
        f"{field}: {file} is truncated or damaged ({size} bytes instead of {shard['bytes']})",
    )
    return shard


def _read_lengths(file: pathlib.Path, shard: dict) -> np.ndarray:
    path = file.with_suffix(".lengths.npy")
    try:
        lengths = np.load(path)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path}: missing or damaged") from None
    for what, found in (("documents", len(lengths)), ("tokens", int(lengths.sum()))):
        require(found == shard[what], f"{path}: {found} {what} instead of {shard[what]}")
    return lengths
