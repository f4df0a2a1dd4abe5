"""Folders of safetensors files: reading blocks of rows, writing one tensor at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jhybrid.convert.placement import TensorSpec
from jhybrid.errors import UserError, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
BLOCK_BYTES = 1 << 24
SHARD_BYTES = 5 * 10**9


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the files its index names.

    Each tensor's file is opened for that tensor alone, so that no more than one tensor is ever
    mapped into memory.
    """

    def __init__(self, folder: Path):
        self.where = str(folder)
        self._files = _files_by_tensor(folder)
        self.tensors: dict[str, TensorSpec] = {}
        for path in dict.fromkeys(self._files.values()):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118, not a mapping
                    view = file.get_slice(name)
                    dtype = DTYPES.get(view.get_dtype())
                    if self._files.get(name) == path:
                        self.tensors[name] = TensorSpec(tuple(view.get_shape()), dtype)
        for name, path in self._files.items():
            if name not in self.tensors:
                raise UserError(f"{path}: tensor {name} is missing, {INDEX} says it is there")

    def without(self, names: Callable[[str], bool]) -> "SafetensorsFolder":
        """Forgets the tensors that `names` is true of."""
        self.tensors = {name: spec for name, spec in self.tensors.items() if not names(name)}
        return self

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        shape, dtype = self.tensors[name]
        assert dtype is not None
        step = max(1, BLOCK_BYTES // (dtype.itemsize * math.prod(shape[1:])))
        with _opened(self._files[name]) as file:
            view = file.get_slice(name)
            for first in range(0, shape[0], step):
                yield first, view[first : min(first + step, shape[0])]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map must be an object of tensor and file names")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{index}: weight_map.{name}={file!r} is not a file of its folder")
        return {name: folder / file for name, file in weight_map.items()}
    path = folder / SINGLE
    if not path.is_file():
        raise UserError(f"{folder}: neither {SINGLE} nor {INDEX}; other formats are not read")
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({first_line(error)})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a JSON object")
    return values


def write_folder(
    folder: Path, tensors: Mapping[str, TensorSpec], read: Callable[[str], np.ndarray]
) -> None:
    """Writes `read(name)` for each of `tensors`, into several files if they are large."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + _bytes(spec) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(spec)
    if len(shards) == 1:
        _write(folder / SINGLE, tensors, read)
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file, {name: tensors[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
    total = sum(map(_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _write(
    path: Path, tensors: Mapping[str, TensorSpec], read: Callable[[str], np.ndarray]
) -> None:
    """The library can only write tensors that are all in memory; the format is a JSON header."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors.items():
        start, end = end, end + _bytes(spec)
        code = codes[spec.dtype]
        header[name] = {"dtype": code, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            np.ascontiguousarray(read(name)).view(np.uint8).tofile(file)


def _bytes(spec: TensorSpec) -> int:
    assert spec.dtype is not None
    return math.prod(spec.shape) * spec.dtype.itemsize
