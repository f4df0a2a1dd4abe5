"""Hugging Face folders into exports and back."""

import dataclasses
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jhybrid.checkpoint import StoredParameters, write_export
from jhybrid.config import DataConfig, Experiment, ModelConfig
from jhybrid.convert.families import Fields, describe, family_of, same_function
from jhybrid.convert.placement import (
    TensorSource,
    TensorSpec,
    is_stacked,
    published_parts,
    read_parameters,
)
from jhybrid.convert.safetensors_files import SafetensorsFolder, read_json, write_folder
from jhybrid.data import check_vocabulary, load_tokenizer
from jhybrid.data.tokenizer import tokenizer_files
from jhybrid.errors import UserError
from jhybrid.serialization import override
from jhybrid.sharding import make_mesh

CONFIG = "config.json"
KEPT_CONFIG = "huggingface_config.json"  # the name of `config.json` inside an export
# Files of a model that say nothing about its function and travel as they are.
TRAVELLING = ("generation_config.json", "special_tokens_map.json", "chat_template.jinja")


def from_hf(
    folder: Path, out: Path, *, tokenizer: str | None = None, assignments: Sequence[str] = ()
) -> Path:
    """Writes the model in `folder` as the export `out`, its tokenizer inside."""
    experiment, params = read_hf(folder, tokenizer=tokenizer, assignments=assignments)
    return write_export(experiment, params, out, files=kept_files(folder))


def kept_files(folder: Path) -> dict[str, Path]:
    """What an export of the model in `folder` keeps of it, by the name it has there."""
    return {KEPT_CONFIG: folder / CONFIG} | {path.name: path for path in travelling(folder)}


def read_hf(
    folder: Path, *, tokenizer: str | None = None, assignments: Sequence[str] = ()
) -> tuple[Experiment, dict[str, jax.Array]]:
    """(experiment, parameters by path, placed as experiment.mesh says).

    `tokenizer` takes the place of the folder's tokenizer.json; `assignments` are `--set` overrides.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    fields = Fields(read_json(folder / CONFIG), str(folder / CONFIG))
    family = family_of(fields)
    model = family.read(fields)
    # What old files hold besides parameters, and tied heads that were stored all the same.
    source = SafetensorsFolder(folder).without(
        lambda name: (
            name.endswith("rotary_emb.inv_freq") or (model.tied_head and name == "lm_head.weight")
        )
    )
    model = with_dtypes(model, stored_dtype(source))
    experiment = experiment_for(folder.name, model, tokenizer or str(folder), assignments)
    mesh = make_mesh(experiment.mesh)
    return experiment, read_parameters(source, family.names, experiment.model, mesh)


def stored_dtype(source: TensorSource) -> str:
    """The narrowest dtype that holds every tensor exactly."""
    found = {spec.dtype for spec in source.tensors.values() if spec.dtype is not None}
    return found.pop().name if len(found) == 1 else "float32"


def with_dtypes(model: ModelConfig, stored: str) -> ModelConfig:
    compute = "float32" if stored == "float32" else "bfloat16"
    return dataclasses.replace(model, param_dtype=stored, compute_dtype=compute)


def experiment_for(
    name: str, model: ModelConfig, tokenizer: str, assignments: Sequence[str]
) -> Experiment:
    """An experiment around an imported model; UserError when `assignments` make it another one."""
    name = re.sub(r"[^\w.-]", "-", name).lstrip(".-") or "imported"
    experiment = Experiment(name=name, model=model, data=DataConfig(tokenizer=tokenizer))
    changed = override(experiment, assignments)
    if not same_function(changed.model, model):
        raise UserError("--set: an import keeps the model's shape and settings")
    check_vocabulary(load_tokenizer(changed.data.tokenizer), changed.model)
    return changed


class Place(NamedTuple):
    """Where a published tensor is in our parameters."""

    path: str
    layer: int | None  # of a stack
    transposed: bool

    def of(self, parameter: np.ndarray) -> np.ndarray:
        own = parameter if self.layer is None else parameter[self.layer]
        return own.T if self.transposed else own

    def spec(self, parameter: jax.ShapeDtypeStruct) -> TensorSpec:
        shape = parameter.shape if self.layer is None else parameter.shape[1:]
        return TensorSpec(shape[::-1] if self.transposed else shape, parameter.dtype)


def to_hf(checkpoint: Path, out: Path) -> Path:
    """Writes the model of an export or a workdir as a Hugging Face folder, whole or not at all."""
    if out.exists():
        raise UserError(f"{out} already exists")
    stored = StoredParameters(checkpoint)
    experiment = stored.experiment
    kept = checkpoint / KEPT_CONFIG
    family, config = describe(experiment.model, read_json(kept) if kept.is_file() else {})
    if experiment.model.param_dtype == "float64":
        raise UserError("model.param_dtype=float64 cannot be written, use float32")
    places: dict[str, Place] = {}
    for path in stored.specs:
        for layer, name in enumerate(published_parts(family.names, path, experiment.model)):
            part = Place(path, layer if is_stacked(path) else None, name.transposed)
            places[name.pattern] = part
    # The tensors of a stack follow each other: each parameter is read once and held alone.
    parameter = functools.lru_cache(maxsize=1)(stored.read)

    def read(name: str) -> np.ndarray:
        return places[name].of(parameter(places[name].path))

    files = tokenizer_files(experiment.data.tokenizer) + travelling(checkpoint)
    specs = {name: place.spec(stored.specs[place.path]) for name, place in places.items()}
    return write_model(out, config, files, specs, read)


def travelling(folder: Path) -> tuple[Path, ...]:
    """The files of `folder` that go along with its model."""
    return tuple(path for name in TRAVELLING if (path := folder / name).is_file())


def write_model(
    out: Path,
    config: Mapping[str, Any],
    files: Iterable[Path],
    tensors: Mapping[str, TensorSpec],
    read: Callable[[str], np.ndarray],
) -> Path:
    """A folder of `config.json`, `files` and `read(name)` of each tensor, whole or not at all."""
    partial = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for file in files:
            shutil.copy(file, partial)
        write_folder(partial, tensors, read)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out
