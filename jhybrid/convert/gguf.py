"""Reading GGUF files (versions 2 and 3, little-endian): metadata, tensor table, dequantised rows.

The format is ggml's (docs/gguf.md of github.com/ggml-org/ggml). Every length is checked against
what is left of the file before it is used.
"""

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jhybrid.convert.placement import TensorSpec
from jhybrid.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensor data, unless `general.alignment` says otherwise
MAX_DIMENSIONS = 4
BLOCK_BYTES = 1 << 24  # of dequantised rows

# Metadata types: 8 is a string, 9 an array, the rest are numbers.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


class Encoding(NamedTuple):
    """`values` numbers are stored in `size` bytes; decode: [blocks, size] -> [blocks, values]."""

    values: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray]


def _plain(dtype: Any) -> Encoding:
    return Encoding(1, np.dtype(dtype).itemsize, lambda b: b.view(dtype).astype(np.float32))


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The fp16 number at byte `start` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], 1).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """x = d (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """x = d q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """x = d q."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


ENCODINGS = {
    0: _plain("<f4"),
    1: _plain("<f2"),
    2: Encoding(32, 18, _q4_0),
    3: Encoding(32, 20, _q4_1),
    8: Encoding(32, 34, _q8_0),
    30: _plain(ml_dtypes.bfloat16),
}


class _Tensor(NamedTuple):
    encoding: Encoding
    offset: int  # in the file


class GGUF:
    """metadata: values by key. tensors: shapes by name; dtype None for encodings we cannot read."""

    def __init__(self, path: Path):
        self.where = str(path)
        try:
            with path.open("rb") as file:
                self._read_header(_Reader(file, path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        self._path = path

    def _read_header(self, reader: "_Reader") -> None:
        if reader.take(4) != MAGIC:
            raise UserError(f"{self.where}: not a GGUF file")
        version = reader.number("I")
        if version not in VERSIONS:
            raise UserError(f"{self.where}: GGUF version {version} is not supported")
        tensor_count, key_count = reader.number("Q"), reader.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.string()
            self.metadata[key] = reader.value(reader.number("I"))
        entries = [_tensor_entry(reader) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise UserError(f"{self.where}: general.alignment={alignment!r} must be positive")
        start = -(-reader.position // alignment) * alignment
        self.tensors: dict[str, TensorSpec] = {}
        self._tensors: dict[str, _Tensor] = {}
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise UserError(f"{self.where}: tensor {name} appears twice")
            encoding = ENCODINGS.get(kind)
            self.tensors[name] = TensorSpec(shape, encoding and np.dtype(np.float32))
            if encoding is None:
                continue
            if shape[-1] % encoding.values:
                raise UserError(f"{self.where}: tensor {name}: rows are no whole blocks")
            size = math.prod(shape) // encoding.values * encoding.size
            if offset % alignment or start + offset + size > reader.size:
                raise UserError(f"{self.where}: tensor {name} lies outside the file")
            self._tensors[name] = _Tensor(encoding, start + offset)

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Dequantised rows in float32."""
        shape, (encoding, offset) = self.tensors[name].shape, self._tensors[name]
        length, width = shape[0], math.prod(shape[1:])
        # a vector's blocks are cut along its only axis
        step = max(1, BLOCK_BYTES // (4 * width)) if len(shape) > 1 else length
        with self._path.open("rb") as file:
            file.seek(offset)
            for first in range(0, length, step):
                count = min(step, length - first)
                blocks = count * width // encoding.values
                data = np.fromfile(file, np.uint8, blocks * encoding.size)
                values = encoding.decode(data.reshape(blocks, encoding.size))
                yield first, values.reshape(count, *shape[1:])


class _Reader:
    """Takes fields off the front of a file and never more than it holds."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self.size = path.stat().st_size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise UserError(f"{self._path}: truncated, or a length in it is wrong")
        self.position += count
        return self._file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise UserError(f"{self._path}: a string in it is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise UserError(f"{self._path}: metadata of unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind not in SCALARS:
            raise UserError(f"{self._path}: metadata arrays of type {kind} are not supported")
        dtype = np.dtype(f"<{SCALARS[kind]}")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, encoding, offset from the start of the data)."""
    name = reader.string()
    rank = reader.number("I")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise UserError(f"{reader._path}: tensor {name} has {rank} dimensions")
    shape = tuple(reader.number("Q") for _ in range(rank))[::-1]
    if 0 in shape:
        raise UserError(f"{reader._path}: tensor {name} is empty")
    return name, shape, reader.number("I"), reader.number("Q")
