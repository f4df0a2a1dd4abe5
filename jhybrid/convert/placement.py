"""Tensors of a checkpoint file into sharded parameters, one at a time.

The memory a host needs is its own share of the parameters and what a source holds of one tensor:
blocks of rows go straight to their place in the arrays that JAX then takes over without a copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jhybrid.block_groups import block_paths, find_groups
from jhybrid.config import ModelConfig
from jhybrid.convert.families import Name, published_name
from jhybrid.errors import UserError
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten
from jhybrid.sharding import parameter_shardings

ALIGNMENT = 64  # bytes; JAX on CPU takes over aligned arrays without copying them


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype | None  # None: one we cannot read


class TensorSource(Protocol):
    """The tensors of one checkpoint by name, and their values as blocks of rows."""

    @property
    def where(self) -> str: ...  # for messages

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) in order, covering the tensor."""
        ...


def read_parameters(
    source: TensorSource, names: Mapping[str, Name], model: ModelConfig, mesh: Mesh
) -> dict[str, jax.Array]:
    """Every parameter of `model` by path, in `model.param_dtype`, placed as `mesh` says.

    Names and shapes are checked before anything is read.
    """
    abstract = nnx.state(nnx.eval_shape(lambda: HybridLM(model, rngs=nnx.Rngs(0))), nnx.Param)
    wanted, shardings = flatten(abstract), flatten(parameter_shardings(abstract, mesh))
    parts = {path: published_parts(names, path, model) for path in wanted}
    _check(source, wanted, parts)
    return {
        path: _read(source, parts[path], leaf, shardings[path]) for path, leaf in wanted.items()
    }


def published_parts(names: Mapping[str, Name], path: str, model: ModelConfig) -> list[Name]:
    """The tensors a parameter is made of: one, or one for each slice of its `layers` axis."""
    blocks = block_paths(path, find_groups(model.blocks))
    return [published_name(names, block) for block in blocks or [path]]


def is_stacked(path: str) -> bool:
    return path.startswith("groups.")


def _check(source: TensorSource, wanted: Mapping, parts: Mapping[str, Sequence[Name]]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for path, leaf in wanted.items():
        shape = leaf.shape[1:] if is_stacked(path) else leaf.shape
        for name in parts[path]:
            expected[name.pattern] = shape[::-1] if name.transposed else shape
    for name, shape in expected.items():
        spec = source.tensors.get(name)
        if spec is None:
            raise UserError(f"{source.where}: tensor {name} is missing")
        if spec.shape != shape:
            raise UserError(
                f"{source.where}: tensor {name} has shape {list(spec.shape)}, its config says "
                f"{list(shape)}"
            )
        if spec.dtype is None:
            raise UserError(f"{source.where}: tensor {name} has a dtype that is not supported")
    unknown = sorted(set(source.tensors) - set(expected))
    if unknown:
        some = ", ".join(unknown[:3]) + (", ..." if unknown[3:] else "")
        raise UserError(
            f"{source.where}: {len(unknown)} tensors have no place in the model: {some}"
        )


def _read(
    source: TensorSource, parts: Sequence[Name], leaf: jax.ShapeDtypeStruct, sharding: Sharding
) -> jax.Array:
    """One parameter, of which only the shards of this host's devices are ever held."""
    stacked = len(leaf.shape) > len(source.tensors[parts[0].pattern].shape)
    devices = {
        device: tuple(
            slice(*s.indices(n)[:2]) for s, n in zip(index or (), leaf.shape, strict=True)
        )
        for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
    }
    shards = {
        _key(index): (index, _aligned([s.stop - s.start for s in index], leaf.dtype))
        for index in devices.values()
    }
    for layer, name in enumerate(parts):
        views = []
        for index, buffer in shards.values():
            own, view = (index[1:], buffer[layer]) if stacked else (index, buffer)
            views.append((own[::-1], view.T) if name.transposed else (own, view))
        for first, rows in source.rows(name.pattern):
            _copy_rows(first, rows, views)
    arrays = [jax.device_put(shards[_key(index)][1], device) for device, index in devices.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _copy_rows(
    first: int, rows: np.ndarray, views: Iterable[tuple[tuple[slice, ...], np.ndarray]]
) -> None:
    """Writes what each (index into the tensor, array of it) has of rows first, first + 1, ..."""
    for index, view in views:
        start = max(first, index[0].start)
        stop = min(first + len(rows), index[0].stop)
        if start < stop:
            here = view[start - index[0].start : stop - index[0].start]
            here[...] = rows[(slice(start - first, stop - first), *index[1:])]


def _key(index: tuple[slice, ...]) -> tuple:
    return tuple((s.start, s.stop) for s in index)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
