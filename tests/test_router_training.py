"""Training head routers: the four commands on a tiny backbone, and what a step does to what."""

import dataclasses
import json

import gguf_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_elastic
from flax import nnx

import eval as evaluation
import train
from jhybrid import head_budget, head_gains, head_masks, routing_report
from jhybrid.checkpoint import load_model
from jhybrid.config import DataConfig, GeneratedTask
from jhybrid.convert.gguf_llama import from_gguf
from jhybrid.data import train_batches
from jhybrid.errors import UserError
from jhybrid.parameters import flatten
from jhybrid.sharding import make_mesh
from jhybrid.training.backbone import Backbone
from jhybrid.training.step import Program

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """The export of a tiny Llama, from a GGUF file."""
    folder = tmp_path_factory.mktemp("backbone")
    file = folder / "tiny.gguf"
    file.write_bytes(gguf_cases.file_bytes(gguf_cases.METADATA, gguf_cases.llama()))
    return from_gguf(file, folder / "model")


def at(backbone):
    """The experiment that starts from it."""
    return tiny.change(
        tiny_elastic.config(),
        training={"init_from": str(backbone)},
        data={"tokenizer": str(backbone / "tokenizer.json")},
    )


def parameters(path):
    return flatten(nnx.state(load_model(path)[1], nnx.Param))


def test_the_four_commands(backbone, run_command, tmp_path):
    workdir, out = tmp_path / "run", tmp_path / "report.html"
    code, printed, err = run_command(
        train,
        *("--config", tiny_elastic.__file__, "--workdir", workdir),
        *("--set", f"training.init_from={backbone}", "--set", f"data.tokenizer={backbone}"),
    )
    assert (code, err) == (0, "")
    assert "finished: 3 steps" in printed and "(GeneratedTask): endless" in printed

    before, after = parameters(backbone), parameters(workdir)
    routers = after.keys() - before.keys()
    assert routers and all(".router." in path for path in routers)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    count = sum(after[path].size for path in routers)
    assert f"{count:,} parameters to train, {sum(x.size for x in before.values()):,} fr" in printed

    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["event"] == "train"]
    assert [record["step"] for record in trained] == [1, 2, 3]
    for record in trained:
        found = record["sparsity"]
        assert found["penalty"] > 0 and np.isfinite(record["loss"])
        assert list(found["tasks"]) == sorted(tiny_elastic.config().data.tasks)
        for task in found["tasks"].values():
            assert task["documents"] == 1 and task["loss"] > 0
            assert 0 <= task["sparse"] <= 1 and task["linear"] > 0
    first, *_, last = (record["sparsity"]["tasks"]["lead"] for record in trained)
    assert last["linear"] > first["linear"] == 2.0  # the target is 1: it only rises

    code, printed, err = run_command(
        evaluation,
        *("--checkpoint", workdir, "--tasks", "perplexity,ruler:niah_single_1"),
        *("--lengths", "1024", "--num-samples", "2", "--out", tmp_path / "results.json"),
        *("--text", text(tmp_path), "--cache", tmp_path / "cache"),
    )
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["perplexity", "ruler:niah_single_1"]
    assert rows[0]["loss"] > 0 and 0 <= rows[1]["score"] <= 100

    code, printed, err = run_command(
        routing_report,
        *("--checkpoint", workdir, "--out", out, "--documents", "4"),
        *("--lengths", "1024,1280", "--plots", tmp_path / "plots"),
    )
    assert (code, err) == (0, "")
    report = json.loads(out.with_suffix(".json").read_text())
    tasks = tiny_elastic.config().data.tasks
    groups = {(group["task"], group["length"]): group for group in report["groups"]}
    assert set(groups) == {(task, length) for task in tasks for length in (1024, 1280)}
    for group in groups.values():
        full = np.array(group["full"])  # [layer, head]
        assert full.shape == (gguf_cases.DEPTH, gguf_cases.KV_HEADS)
        assert group["msr"] == pytest.approx(1 - full.mean())
        assert 0 <= group["esr"] <= 1 - 160 / 1280 and group["documents"] == 4
    assert "<h3>copy_code</h3>" in out.read_text()
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"share_of_sparse_heads.svg", "linear_multiplier.svg", "loss.svg"} <= names


def text(folder):
    path = folder / "prose.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 30)
    return path


@pytest.fixture(scope="module")
def program(backbone):
    experiment = at(backbone)
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        built = Program(experiment, mesh)
        places = built.state.params | built.state.frozen
        loaded = Backbone(str(backbone), experiment.model, places).read()
        state = built.init(np.asarray([0, 0], np.uint32), loaded=loaded)
        return built, state, jax.jit(built._gradients)


def test_the_frozen_part_has_no_optimizer_state_and_no_gradient(program):
    built, state, _ = program
    routers = sum(x.nbytes for x in state.params.values())
    assert all(x.dtype == jnp.float32 for x in state.params.values())
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.nbytes for x in moments) == 2 * routers
    assert sum(x.nbytes for x in state.frozen.values()) > 2 * routers / 3
    with jax.set_mesh(built.mesh):
        batch = {name: x for name, x in built.batch.items()}
        grads, _, _ = jax.eval_shape(built._gradients, built.state, batch)
    assert set(grads["params"]) == set(state.params)
    assert all(".router." in path for path in grads["params"])


@pytest.mark.slow
def test_every_layers_router_learns_from_the_sparsity_of_a_document_too_short_for_the_loss(program):
    built, state, gradients = program
    length = tiny_elastic.LENGTH
    batch = {
        "tokens": np.ones((5, length), np.int32),
        "targets": np.full((5, length), -1, np.int32),
        "segment_ids": np.where(np.arange(length) < 100, 0, -1) + np.zeros((5, 1), np.int32),
        "positions": np.arange(length) + np.zeros((5, 1), np.int32),
        "prompt": np.ones((5, length), np.int32),
        "task": np.full((5, length), 3, np.int32),
    }
    with jax.set_mesh(built.mesh):
        batch = built.put_whole_batch({name: x.astype(np.int32) for name, x in batch.items()})
        grads, sums, _ = gradients(state, batch)
    assert float(sums["loss"]) == 0 and float(sums["penalty"]) > 0
    for path, grad in grads["params"].items():
        if path.endswith("route_out.bias"):
            assert np.all(np.abs(np.asarray(grad)).max(-1) > 0), path  # [layers, 2]
            assert grad.shape[0] == gguf_cases.DEPTH
    assert np.all(np.asarray(grads["multipliers"]["linear"])[[0, 1, 2, 4]] == 0)
    assert float(grads["multipliers"]["linear"][3]) == pytest.approx(
        1 - float(sums["tasks"]["sparse"][3]) / 5, rel=1e-5
    )


@pytest.mark.slow
def test_noise_changes_from_step_to_step(program):
    built, state, run = program
    with jax.set_mesh(built.mesh):
        batch = built.put_batch(next(train_batches(built.experiment.data)))
        later = dataclasses.replace(state, step=state.step + 1)
        shares = [np.asarray(run(s, batch)[1]["tasks"]["sparse"]) for s in (state, state, later)]
    np.testing.assert_array_equal(shares[0], shares[1])
    assert np.any(shares[0] != shares[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, norm_eps=1e-6), r"another model: norm_eps \(1e-05 there"),
        (lambda m: dataclasses.replace(m, blocks=m.blocks[:1]), r"another model: blocks"),
        (
            lambda m: dataclasses.replace(
                m,
                blocks=(
                    m.blocks[0],
                    dataclasses.replace(m.blocks[1], mixer=m.blocks[1].mixer.attention),
                ),
            ),
            r"parameter groups\.0\.0\..* has no place in this one",
        ),
    ],
    ids=["epsilon", "depth", "half"],
)
def test_only_the_same_model_can_be_started_from(backbone, program, change, message):
    experiment = at(backbone)
    model = change(experiment.model)
    experiment = dataclasses.replace(experiment, model=model)
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        built = Program(experiment, mesh)
    with pytest.raises(UserError, match=message):
        Backbone(str(backbone), model, built.state.params | built.state.frozen)


def test_a_missing_backbone_is_refused_before_anything_is_written(run_command, tmp_path, backbone):
    workdir = tmp_path / "run"
    code, _, err = run_command(
        train,
        *("--config", tiny_elastic.__file__, "--workdir", workdir),
        *("--set", "training.init_from=nowhere", "--set", f"data.tokenizer={backbone}"),
    )
    assert code == 2 and err.count("\n") == 1 and "nowhere" in err
    assert not workdir.exists()


def test_tasks_and_targets_must_be_the_same():
    recipe = tiny_elastic.config()
    source = GeneratedTask(generator="lead", task="lead")
    data = DataConfig(tasks=("lead",), sources=(source,), batch_size=5)
    with pytest.raises(UserError, match=r"sparsity\.targets: .* must be the tasks of data\.tasks"):
        dataclasses.replace(recipe, data=data)


@pytest.mark.slow
def test_gains_of_heads_are_slopes_and_become_static_masks(backbone, run_command, tmp_path):
    out = tmp_path / "masks"
    code, printed, err = run_command(
        head_gains,
        *("--config", tiny_elastic.__file__, "--tasks", "lead,copy_code", "--documents", "2"),
        *("--set", f"training.init_from={backbone}", "--set", f"data.tokenizer={backbone}"),
        *("--out", out, "--json", tmp_path / "gains.json"),
    )
    assert (code, err) == (0, "") and "4: copy_code: loss" in printed and "needle" not in printed
    gains = json.loads((tmp_path / "gains.json").read_text())
    assert list(gains) == [f"blocks.{i}.mixer" for i in range(gguf_cases.DEPTH)]
    order = np.argsort([value for values in gains.values() for value in values])

    stored = parameters(out)
    (path,) = (path for path in stored if path.endswith(head_gains.MASK))
    np.testing.assert_array_equal(np.argsort(np.ravel(stored[path])), order)
    np.testing.assert_allclose(np.sort(np.ravel(stored[path])), np.linspace(0, 1, len(order)))
    for name, value in parameters(backbone).items():
        np.testing.assert_array_equal(stored[name], value, err_msg=name)
    half = head_masks.threshold(np.ravel(stored[path]), 0.5)
    assert half.sparse == 0.5

    budget = tmp_path / "budget.json"
    code, _, err = run_command(
        head_budget,
        *("--checkpoint", out, "--text", text(tmp_path), "--sparse", "0.5"),
        *("--documents", "2", "--out", budget),
    )
    assert (code, err) == (0, "")
    full, as_is, cut = json.loads(budget.read_text())
    assert (full["sparse"], full["higher"]) == (0, 0) and as_is["bias"] is None
    assert cut["sparse"] == half.sparse and cut["tasks"]["lead"]["sparse"] == half.sparse
    below = np.ravel(stored[path]) <= cut["route_threshold"]
    assert np.mean(below) == half.sparse
    assert set(cut["tasks"]) == set(tiny_elastic.config().data.tasks)

    masked = head_gains.Masked(at(backbone))
    source = masked.experiment.data.sources[3]
    batch = next(
        train_batches(dataclasses.replace(masked.experiment.data, sources=(source,), batch_size=1))
    )
    _, found = masked.gains(source, 1)
    step = 0.25
    weights = np.full(stored[path].shape, 0.5, np.float32)
    losses = []
    for w in (0.5 - step, 0.5 + step):
        weights[1, 0] = w
        losses.append(float(masked.gradient({path: jnp.asarray(weights)}, masked.params, batch)[0]))
    slope = (losses[0] - losses[1]) / (2 * step)
    assert found[path][1, 0] == pytest.approx(slope, rel=0.05, abs=2e-3)


def test_heads_cannot_be_ranked_without_a_backbone(run_command, tmp_path, backbone):
    common = ("--config", tiny_elastic.__file__, "--out", tmp_path / "masks")
    for more, message in (
        (("--tasks", "chess"), "--tasks chess: no source"),
        (("--set", "training.init_from=nowhere"), "nowhere: neither a run's workdir"),
        (("--set", "training.init_from=None"), "training.init_from must name a backbone"),
    ):
        code, _, err = run_command(head_gains, *common, *more)
        assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = run_command(head_gains, "--config", tiny_elastic.__file__, "--out", backbone)
    assert code == 2 and "already exists" in err
