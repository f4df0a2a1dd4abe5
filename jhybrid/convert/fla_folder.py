"""Folders of flash-linear-attention models (`config.json` and safetensors) into exports."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jhybrid.block_groups import block_paths, find_groups
from jhybrid.checkpoint import write_export
from jhybrid.config import ModelConfig
from jhybrid.convert.families import Fields
from jhybrid.convert.fla import Source, sources
from jhybrid.convert.fla_config import read_config
from jhybrid.convert.huggingface import CONFIG, experiment_for, stored_dtype, with_dtypes
from jhybrid.convert.placement import TensorSource
from jhybrid.convert.safetensors_files import SafetensorsFolder, read_json
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
    return write_export(experiment, params, out)


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
