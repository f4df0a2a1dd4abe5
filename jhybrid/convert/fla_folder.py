"""Folders of flash-linear-attention models (config.json, safetensors) into exports and back."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from jhybrid.block_groups import block_paths, find_groups
from jhybrid.checkpoint import StoredParameters, write_export
from jhybrid.config import ModelConfig
from jhybrid.convert.families import Fields
from jhybrid.convert.fla import Source, sources
from jhybrid.convert.fla_config import describe, read_config
from jhybrid.convert.huggingface import (
    CONFIG,
    KEPT_CONFIG,
    experiment_for,
    kept_files,
    stored_dtype,
    travelling,
    with_dtypes,
    write_model,
)
from jhybrid.convert.placement import TensorSource, TensorSpec
from jhybrid.convert.safetensors_files import SafetensorsFolder, read_json
from jhybrid.data.tokenizer import tokenizer_files
from jhybrid.errors import UserError
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten
from jhybrid.sharding import make_mesh, parameter_shardings


def from_fla(
    folder: Path, out: Path, *, tokenizer: str | None = None, assignments: Sequence[str] = ()
) -> Path:
    """Writes the model in `folder` as the export `out`, its tokenizer inside."""
    model, source = open_fla(folder)
    experiment = experiment_for(folder.name, model, tokenizer or str(folder), assignments)
    values = read_fla(experiment.model, source)
    abstract = nnx.state(nnx.eval_shape(lambda: HybridLM(model, rngs=nnx.Rngs(0))), nnx.Param)
    shardings = flatten(parameter_shardings(abstract, make_mesh(experiment.mesh)))
    params = {path: jax.device_put(value, shardings[path]) for path, value in values.items()}
    return write_export(experiment, params, out, files=kept_files(folder))


def to_fla(checkpoint: Path, out: Path) -> Path:
    """Writes the model of an export or a workdir as a folder that flash-linear-attention loads.

    UserError when flash-linear-attention has no such model.
    """
    if out.exists():
        raise UserError(f"{out} already exists")
    stored = StoredParameters(checkpoint)
    experiment = stored.experiment
    kept = checkpoint / KEPT_CONFIG
    config = describe(experiment.model, read_json(kept) if kept.is_file() else {})
    if experiment.model.param_dtype == "float64":
        raise UserError("model.param_dtype=float64 cannot be written, use float32")
    tensors = parts_of(experiment.model, stored.specs)
    specs = {
        name: TensorSpec(
            (sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype
        )
        for name, parts in tensors.items()
    }
    parameter = functools.lru_cache(maxsize=1)(stored.read)

    def read(name: str) -> np.ndarray:
        return np.concatenate([part.of(parameter(part.path)) for part in tensors[name]])

    files = tokenizer_files(experiment.data.tokenizer) + travelling(checkpoint)
    return write_model(out, config, files, specs, read)


class Part(NamedTuple):
    """Rows of a tensor of theirs, or all of it, and where they are in our parameters."""

    source: Source
    path: str
    layer: int | None  # of a stack
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, parameter: np.ndarray) -> np.ndarray:
        value = parameter if self.layer is None else parameter[self.layer]
        return self.source.layout.theirs(value)


def parts_of(
    model: ModelConfig, parameters: Mapping[str, np.ndarray | jax.ShapeDtypeStruct]
) -> dict[str, list[Part]]:
    """The parts of each tensor by its name, in the order of their rows.

    The tensors of a stack follow each other, so that each parameter is read once and held alone.
    """
    theirs, groups = sources(model), find_groups(model.blocks)
    found: dict[str, list[Part]] = {}
    for path, spec in parameters.items():
        names = block_paths(path, groups)
        shape = spec.shape if names is None else spec.shape[1:]
        for layer, name in enumerate(names or [path]):
            source = theirs[name]
            like = source.layout.theirs(np.broadcast_to(np.zeros((), spec.dtype), shape))
            place = None if names is None else layer
            found.setdefault(source.name, []).append(
                Part(source, path, place, like.shape, like.dtype)
            )
    for parts in found.values():
        parts.sort(key=lambda part: part.source.rows or (0, 0))
    return found


def open_fla(folder: Path) -> tuple[ModelConfig, SafetensorsFolder]:
    """The model a folder describes, in the dtype it is stored in, and its tensors."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    model = read_config(Fields(read_json(folder / CONFIG), str(folder / CONFIG)))
    # Early Gated DeltaNet checkpoints carry a parameter that their own layer never used, and tied
    # heads may be stored all the same.
    source = SafetensorsFolder(folder).without(
        lambda name: name.endswith(".attn.D") or (model.tied_head and name == "lm_head.weight")
    )
    return with_dtypes(model, stored_dtype(source)), source


def read_fla(model: ModelConfig, source: TensorSource) -> dict[str, np.ndarray]:
    """Every parameter by path, in `model.param_dtype`; UserError when names or shapes differ."""
    abstract = nnx.state(nnx.eval_shape(lambda: HybridLM(model, rngs=nnx.Rngs(0))), nnx.Param)
    theirs = sources(model)
    used = {entry.name for entry in theirs.values()}
    for name in sorted(used):
        if name not in source.tensors:
            raise UserError(f"{source.where}: tensor {name} is missing")
        if source.tensors[name].dtype is None:
            raise UserError(f"{source.where}: tensor {name} has a dtype that is not supported")
    if unknown := sorted(set(source.tensors) - used):
        raise UserError(
            f"{source.where}: {len(unknown)} tensors have no place in the model: "
            + ", ".join(unknown[:3])
        )
    groups, values = find_groups(model.blocks), {}
    for path, like in flatten(abstract).items():
        names = block_paths(path, groups)
        shape = like.shape if names is None else like.shape[1:]
        parts = [_read(source, theirs[name], shape) for name in names or [path]]
        value = parts[0] if names is None else np.stack(parts)
        values[path] = value.astype(like.dtype)
    return values


def _read(source: TensorSource, entry: Source, shape: tuple[int, ...]) -> np.ndarray:
    tensor = np.concatenate([rows for _, rows in source.rows(entry.name)])
    try:
        value = entry.convert(tensor)
    except (ValueError, IndexError):  # it has not even the right number of dimensions
        value = tensor
    if value.shape != shape:
        raise UserError(
            f"{source.where}: tensor {entry.name} has shape {list(tensor.shape)}, which gives "
            f"{list(value.shape)} where its config says {list(shape)}"
        )
    return value
