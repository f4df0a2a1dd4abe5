"""Checkpoints of a run (Orbax, asynchronous) and exports of its model.

A workdir holds
    config.json                      the experiment, as last started
    checkpoints/<step>/params        parameters by dotted path
    checkpoints/<step>/train         optimizer state, counters, RNG
    checkpoints/<step>/data          state of the data iterator, the same in every process
    checkpoints/<step>/config        the experiment that wrote this checkpoint
An export holds `params/`, one Orbax checkpoint by the same paths, `config.json` and, unless it is a
shipped one, the tokenizer. Both are written under a temporary name and renamed when durable, so
what is on disk is always whole.

    python -m jhybrid.checkpoint export WORKDIR OUT
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from jhybrid.commandline import Parser, run
from jhybrid.config import Experiment
from jhybrid.data.tokenizer import SETTINGS, tokenizer_files
from jhybrid.errors import UserError, first_line
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten, unflatten
from jhybrid.serialization import from_json, override, to_json

CARRIED_TOKENIZER = "tokenizer.json"  # what data.tokenizer says in an export that carries one

# What may change between a checkpoint and the run that resumes it: where and how the same numbers
# are computed (up to rounding), what is measured, and how long the run goes on.
RESUMABLE_CHANGES = (
    "name",
    "mesh",
    "model.remat",
    "model.scan_blocks",
    "model.loss_chunk_tokens",
    "model.implementation",
    "data.num_workers",
    "optimizer.accumulation_steps",
    "training.steps",
    "training.init_from",
    "training.log_every_steps",
    "training.eval_every_steps",
    "training.eval_batches",
    "training.checkpoint_every_steps",
    "training.keep_checkpoints",
    "training.max_skipped_steps",
)


def differing_fields(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Dotted paths at which two configs (or their JSON) differ, with both values."""
    if dataclasses.is_dataclass(ours):
        ours, theirs = json.loads(to_json(ours)), json.loads(to_json(theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        found = [
            differing_fields(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
            for key in keys
        ]
        return [field for fields in found for field in fields]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        found = [
            differing_fields(a, b, f"{path}.{i}")
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        ]
        return [field for fields in found for field in fields]
    return [] if ours == theirs else [f"{path} ({_short(theirs)} there, {_short(ours)} here)"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_resumable(experiment: Experiment, saved: Experiment, where: Path) -> None:
    """Raises UserError naming the fields in which `saved` is another experiment."""
    fields = [
        field
        for field in differing_fields(experiment, saved)
        if not any(field.startswith((f"{known} ", f"{known}.")) for known in RESUMABLE_CHANGES)
    ]
    if fields:
        shown = "; ".join(fields[:5]) + (f"; and {len(fields) - 5} more" if fields[5:] else "")
        raise UserError(
            f"{where} holds a checkpoint of another config: {shown}. Use another --workdir"
        )


def check_workdir(workdir: Path) -> None:
    """UserError if `workdir` can be seen, without creating anything, not to take files."""
    found = next(path for path in (workdir, *workdir.absolute().parents) if os.path.exists(path))
    if not found.is_dir():
        raise UserError(f"--workdir {workdir}: {found} is not a directory")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UserError(f"--workdir {workdir}: {found} is not writable")


def prepare_workdir(workdir: Path) -> None:
    """Creates `workdir`; UserError if nothing can be written there."""
    probe = workdir / f".writable-{os.getpid()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--workdir {workdir}: cannot be written ({error.strerror})") from None


def latest(workdir: Path) -> tuple[int, Experiment] | None:
    """The last durable step of a workdir and the experiment that wrote it; None without one.

    Creates nothing, and every process of a run gets the same answer.
    """
    found = None
    if (workdir / "checkpoints").is_dir():
        with _reader(workdir) as manager:
            step = manager.latest_step()
            found = None if step is None else (step, _config(manager, step))
    if jax.process_count() > 1:  # before the first of them creates the folder
        multihost_utils.sync_global_devices("the workdir's latest checkpoint is known")
    return found


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


class Checkpoints:
    """The checkpoints of one workdir.

    `save` returns once the arrays are copied to the host; writing goes on behind the next steps.
    An error while writing is raised by the next `save`, `wait` or `close`.
    """

    def __init__(self, workdir: Path, keep: int):
        self._root = workdir / "checkpoints"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self._root.absolute(), options=options)

    def save(
        self,
        step: int,
        params: Mapping[str, jax.Array],
        train: Any,
        data_iterator: grain.DatasetIterator,
        experiment: Experiment,
    ) -> None:
        """Saves parameters by path, any pytree `train` and where the data iterator stands."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(dict(params)),
                train=ocp.args.StandardSave(train),
                data=ocp.args.JsonSave(data_iterator.get_state()),
                config=ocp.args.JsonSave(json.loads(to_json(experiment))),
            ),
        )

    def restore(
        self, step: int, params: Any, train: Any, data_iterator: grain.DatasetIterator | None
    ) -> tuple[Any, Any]:
        """(params, train) of `step`, placed as the abstract `params` and `train` say.

        Sets `data_iterator` to where it stood. Both trees are shapes with shardings; that every
        array came back with its shape, dtype and sharding is checked, not hoped for.
        """
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(params),
            train=ocp.args.StandardRestore(train),
            data=ocp.args.JsonRestore(),
        )
        restored = _restore(self._manager, step, items)
        for wanted, got in ((params, restored["params"]), (train, restored["train"])):
            jax.tree_util.tree_map_with_path(_require_as_asked, wanted, got)
        if data_iterator is not None:
            data_iterator.set_state(restored["data"])
        return restored["params"], restored["train"]

    def wait(self) -> None:
        """Returns when everything saved is durable; raises what went wrong in writing it."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _reader(workdir: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False)
    return ocp.CheckpointManager((workdir / "checkpoints").absolute(), options=options)


def _restore(manager: ocp.CheckpointManager, step: int, items: ocp.args.Composite) -> Any:
    try:
        return manager.restore(step, args=items)
    except Exception as error:  # Orbax and TensorStore raise plain Exceptions for damaged files
        reason = first_line(error)
        where = f"{manager.directory}/{step}"
        raise UserError(f"{where}: the checkpoint cannot be read ({reason})") from error


def _config(manager: ocp.CheckpointManager, step: int) -> Experiment:
    restored = _restore(manager, step, ocp.args.Composite(config=ocp.args.JsonRestore()))
    return from_json(json.dumps(restored["config"]))


def _require_as_asked(path: tuple, wanted: jax.ShapeDtypeStruct, got: jax.Array) -> None:
    same_layout = got.sharding.is_equivalent_to(wanted.sharding, len(wanted.shape))
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype) or not same_layout:
        raise RuntimeError(
            f"checkpoint: {jax.tree_util.keystr(path)} came back as {got.dtype}{got.shape} "
            f"{got.sharding}, not {wanted.dtype}{wanted.shape} {wanted.sharding}"
        )


def export(workdir: str | Path, out: str | Path) -> Path:
    """Writes the latest parameters and the config of a run as a self-contained folder `out`."""
    return write_export(*_read_workdir(Path(workdir)), Path(out))


def write_export(
    experiment: Experiment,
    params: Mapping[str, jax.Array],
    out: Path,
    *,
    files: Mapping[str, Path | bytes] = {},
) -> Path:
    """`params` by path and their config as a folder `load_model` reads, whole or not at all.

    The tokenizer is copied into it, and `files` (by name, to copy or to write) as well.
    """
    if out.exists():
        raise UserError(f"export: {out} already exists")
    partial = out.with_name(f".{out.name}-{os.getpid()}").absolute()
    tokenizer = tokenizer_files(experiment.data.tokenizer)
    if tokenizer:
        experiment = _with_tokenizer(experiment, CARRIED_TOKENIZER)
    try:
        partial.mkdir(parents=True)
        # Weights hardly compress, and compressed they would be in memory twice while written.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(partial / "params", dict(params))
        names = (CARRIED_TOKENIZER, SETTINGS)
        for name, content in (*zip(names, tokenizer, strict=False), *files.items()):
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)
        (partial / "config.json").write_text(to_json(experiment))
        partial.rename(out)
    except OSError as error:
        raise UserError(f"export: {out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _with_tokenizer(experiment: Experiment, name: str) -> Experiment:
    data = dataclasses.replace(experiment.data, tokenizer=name)
    return dataclasses.replace(experiment, data=data)


def load_model(path: str | Path, assignments: Sequence[str] = ()) -> tuple[Experiment, HybridLM]:
    """The experiment and the model of a run's workdir (its latest step) or of an export.

    `assignments` ("a.b=c") change settings that leave the parameters as they are.
    """
    path = Path(path)
    is_export = (path / "params").is_dir()
    experiment, leaves = _read_export(path) if is_export else _read_workdir(path)
    experiment = override(experiment, assignments)
    graphdef, template = _abstract_model(experiment)
    stored = {(path, leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    wanted = {(path, leaf.shape, leaf.dtype) for path, leaf in flatten(template).items()}
    if stored != wanted:
        changed = min(path for path, _, _ in stored ^ wanted)
        raise UserError(f"--set {' '.join(assignments)}: changes parameter {changed}")
    return experiment, nnx.merge(graphdef, unflatten(template, leaves))


class StoredParameters:
    """The parameters of a run's workdir (its latest step) or of an export, on disk until read.

    Attributes:
      experiment: the config they belong to.
      specs: shape and dtype of each by path, in the model's order.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if (path / "params").is_dir():
            self.experiment, self._folder = _export_experiment(path), path.absolute() / "params"
        else:
            self.experiment, step = _workdir_experiment(path)
            self._folder = path.absolute() / "checkpoints" / str(step) / "params"
        self.specs = _abstract_params(self.experiment)
        with _reading(self._folder), ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(self._folder).item_metadata
            stored = {name: tuple(metadata[name].shape) for name in metadata}
        _require_same_shapes(path, stored, self.specs)

    def read(self, path: str) -> np.ndarray:
        """One parameter, in the config's dtype; nothing else is read."""
        arguments = ocp.args.PyTreeRestore(
            item={path: self.specs[path]},
            restore_args={
                path: ocp.RestoreArgs(restore_type=np.ndarray, dtype=self.specs[path].dtype)
            },
            partial_restore=True,
        )
        with _reading(self._folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(self._folder, args=arguments)[path]


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Orbax and TensorStore raise many kinds of errors for damaged files: UserError instead."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{folder}: cannot be read ({first_line(error)})") from None


def _abstract_model(experiment: Experiment) -> tuple[nnx.GraphDef, nnx.State]:
    abstract = nnx.eval_shape(lambda: HybridLM(experiment.model, rngs=nnx.Rngs(0)))
    return nnx.split(abstract, nnx.Param)


def _abstract_params(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter by path, to be restored onto one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = flatten(_abstract_model(experiment)[1])
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
        for path, leaf in leaves.items()
    }


def _read_export(path: Path) -> tuple[Experiment, dict[str, jax.Array]]:
    experiment = _export_experiment(path)
    wanted = _abstract_params(experiment)
    folder = path.absolute() / "params"
    with ocp.StandardCheckpointer() as checkpointer:
        with _reading(path / "params"):
            metadata = checkpointer.metadata(folder).item_metadata
            stored = {name: tuple(metadata[name].shape) for name in metadata}
        _require_same_shapes(path, stored, wanted)
        with _reading(path / "params"):
            return experiment, checkpointer.restore(folder, wanted)


def _export_experiment(path: Path) -> Experiment:
    experiment = _read_config(path / "config.json")
    if experiment.data.tokenizer == CARRIED_TOKENIZER:
        experiment = _with_tokenizer(experiment, str(path / CARRIED_TOKENIZER))
    return experiment


def _require_same_shapes(path: Path, stored: Mapping, wanted: Mapping) -> None:
    for name, leaf in wanted.items():
        if stored.get(name) != leaf.shape:
            found = f"has shape {stored[name]}" if name in stored else "is missing"
            raise UserError(f"{path}: parameter {name} {found}, its config says {leaf.shape}")


def _read_workdir(workdir: Path) -> tuple[Experiment, dict[str, jax.Array]]:
    experiment, step = _workdir_experiment(workdir)
    wanted = _abstract_params(experiment)
    arguments = ocp.args.Composite(params=ocp.args.StandardRestore(wanted))
    with _reader(workdir) as manager:
        return experiment, _restore(manager, step, arguments)["params"]


def _workdir_experiment(workdir: Path) -> tuple[Experiment, int]:
    """The config of the latest step, and which it is."""
    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"{workdir}: neither a run's workdir (checkpoints/) nor an export")
    with _reader(workdir) as manager:
        step = manager.latest_step()
        if step is None:
            raise UserError(f"{workdir}: no checkpoint has been written yet")
        return _config(manager, step), step


def _read_config(path: Path) -> Experiment:
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {first_line(error)}") from None


def _main() -> int:
    parser = Parser(prog="python -m jhybrid.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="write parameters and config alone")
    command.add_argument("workdir")
    command.add_argument("out")
    arguments = parser.parse_args()
    print(f"wrote {export(arguments.workdir, arguments.out)}")
    return 0


if __name__ == "__main__":
    run(_main)
