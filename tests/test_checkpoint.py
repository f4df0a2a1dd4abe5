"""Checkpoints of a run, exports of its model, and what is refused."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import build

from jhybrid import checkpoint
from jhybrid.checkpoint import (
    Checkpoints,
    check_resumable,
    check_workdir,
    export,
    latest,
    load_model,
    prepare_workdir,
)
from jhybrid.config import MeshConfig
from jhybrid.errors import UserError
from jhybrid.parameters import flatten
from jhybrid.sharding import make_mesh

ROOT = pathlib.Path(__file__).parent.parent


def numbers():
    return iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset())


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with one checkpoint, the parameters in it and the next item of its iterator."""
    workdir = tmp_path_factory.mktemp("run")
    experiment = tiny.config()
    params = flatten(nnx.state(build(experiment.model), nnx.Param))
    train = {"step": jnp.int32(3), "opt_state": (jnp.arange(4.0), {"a.b": jnp.ones(2)})}
    iterator = numbers()
    for _ in range(7):
        next(iterator)
    checkpoints = Checkpoints(workdir, keep=2)
    checkpoints.save(3, params, train, iterator, experiment)
    checkpoints.close()
    return workdir, params, train, next(iterator)


def test_everything_comes_back_and_the_iterator_goes_on(saved):
    workdir, params, train, following = saved
    checkpoints = Checkpoints(workdir, keep=2)
    iterator = numbers()
    restored = checkpoints.restore(3, abstract(params), abstract(train), iterator)
    checkpoints.close()
    for wanted, got in zip(
        jax.tree.leaves((params, train)), jax.tree.leaves(restored), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    assert jax.tree.structure(restored[1]) == jax.tree.structure(train)
    assert next(iterator) == following


def test_restore_places_arrays_as_asked(saved):
    workdir, params, train, _ = saved
    mesh = make_mesh(MeshConfig(fsdp=8))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    wanted = {
        path: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=rows if path == "embed" else everywhere
        )
        for path, x in params.items()
    }
    checkpoints = Checkpoints(workdir, keep=2)
    restored, _ = checkpoints.restore(3, wanted, abstract(train), None)
    checkpoints.close()
    assert restored["embed"].sharding.is_equivalent_to(rows, 2)
    np.testing.assert_array_equal(restored["embed"], params["embed"])


def test_a_save_that_was_killed_is_not_the_latest_step(saved, tmp_path):
    workdir, *_ = saved
    unfinished = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert latest(workdir)[0] == 3
    checkpoints = Checkpoints(workdir, keep=2)
    deadline = time.monotonic() + 30  # Orbax clears it away behind our back
    while unfinished.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    checkpoints.close()
    assert not unfinished.exists()


def test_only_the_last_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": jnp.ones(2)}, {"step": step}, numbers(), tiny.config())
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_checkpoint_of_another_config_names_the_fields(saved):
    workdir, *_ = saved
    other = tiny.change(tiny.config(), model={"dim": 32}, data={"seed": 5})
    with pytest.raises(UserError) as raised:
        check_resumable(other, tiny.config(), workdir)
    message = str(raised.value)
    assert "model.dim (16 there, 32 here)" in message and "data.seed (0 there, 5 here)" in message
    assert "\n" not in message


def test_a_run_may_be_extended_logged_differently_and_moved_to_other_devices():
    ours = tiny.change(tiny.config(), training={"steps": 50, "log_every_steps": 3})
    ours = dataclasses.replace(ours, mesh=MeshConfig(data=2))
    check_resumable(ours, tiny.config(), "run")


def test_a_change_inside_a_block_is_found():
    mixer = dataclasses.replace(tiny.config().model.blocks[1].mixer, sampler="gumbel")
    blocks = list(tiny.config().model.blocks)
    blocks[1] = dataclasses.replace(blocks[1], mixer=mixer)
    ours = tiny.change(tiny.config(), model={"blocks": tuple(blocks)})
    with pytest.raises(UserError, match=r"model\.blocks\.1\.mixer\.sampler"):
        check_resumable(ours, tiny.config(), "run")


def same_model(model, params):
    found = flatten(nnx.state(model, nnx.Param))
    assert set(found) == set(params)
    for path, wanted in params.items():
        np.testing.assert_array_equal(found[path], wanted, err_msg=path)


def test_a_workdir_loads_as_a_model(saved):
    workdir, params, *_ = saved
    experiment, model = load_model(workdir)
    assert experiment == tiny.config()
    same_model(model, params)


def test_an_export_stands_alone_and_loads_as_the_same_model(saved, tmp_path):
    workdir, params, *_ = saved
    out = export(workdir, tmp_path / "deep" / "model")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "params"]
    assert list(out.parent.iterdir()) == [out]
    experiment, model = load_model(out)
    assert experiment == tiny.config()
    same_model(model, params)


def test_the_export_command_says_what_it_wrote(saved, tmp_path, capsys, monkeypatch):
    workdir, *_ = saved
    out = tmp_path / "model"
    monkeypatch.setattr("sys.argv", ["checkpoint", "export", str(workdir), str(out)])
    assert checkpoint._main() == 0
    assert str(out) in capsys.readouterr().out
    with pytest.raises(UserError, match="already exists"):
        export(workdir, out)


def test_an_export_is_a_plain_orbax_checkpoint(saved, tmp_path):
    out = export(saved[0], tmp_path / "model")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out / "params")
    assert {path: value.shape for path, value in restored.items()} == {
        path: value.shape for path, value in saved[1].items()
    }


def refusals(*paths) -> list[str]:
    """What `load_model` says of each, in a process of its own: a failed read of Orbax leaves others
    behind that would be reported as errors of some later test."""
    code = (
        "import sys\n"
        "from jhybrid.checkpoint import load_model\n"
        "from jhybrid.errors import UserError\n"
        "for path in sys.argv[1:]:\n"
        "    try: load_model(path)\n"
        "    except UserError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


def test_damaged_exports_and_checkpoints_are_refused_by_name(saved, tmp_path):
    out = export(saved[0], tmp_path / "model")
    for part in (out / "params").rglob("*"):
        if part.is_file() and part.stat().st_size > 1000:
            part.write_bytes(part.read_bytes()[:-500])
    workdirs = [tmp_path / "params", tmp_path / "config"]
    for workdir in workdirs:
        shutil.copytree(saved[0], workdir)
        item = workdir / "checkpoints" / "3" / workdir.name
        largest = max(filter(pathlib.Path.is_file, item.rglob("*")), key=lambda x: x.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    damaged, *truncated = refusals(out, *workdirs)
    assert "model/params: cannot be read" in damaged
    for workdir, said in zip(workdirs, truncated, strict=True):
        assert f"{workdir.name}/checkpoints/3: the checkpoint cannot be read" in said


def test_a_broken_config_of_an_export_is_refused_by_name(saved, tmp_path):
    out = export(saved[0], tmp_path / "model")
    for content in (b"{", b"\xff"):
        (out / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"model/config\.json: "):
            load_model(out)


def test_an_export_of_other_shapes_names_the_parameter(saved, tmp_path):
    out = export(saved[0], tmp_path / "model")
    config = json.loads((out / "config.json").read_text())
    config["model"]["dim"] = 24
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"parameter .* has shape"):
        load_model(out)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=name):
        load_model(tmp_path / name)


def test_an_unwritable_workdir_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir .*file/run: .*/file is not a directory"):
        check_workdir(tmp_path / "file" / "run")
    check_workdir(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write all
    with pytest.raises(UserError, match=f"--workdir .*/a/b: {tmp_path} is not writable"):
        check_workdir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(UserError, match=r"--workdir .*file/run: cannot be written"):
        prepare_workdir(tmp_path / "file" / "run")
