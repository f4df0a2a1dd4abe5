"""The whole model: scanning, remat, packing, state, sharding and parameter views."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from tiny_models import CHUNK, LINEAR, ROUTED, SOFTMAX, build, tiny, tokens

from jhybrid.block_groups import by_block, find_groups, from_blocks
from jhybrid.config import BlockConfig, MeshConfig, ModelConfig, SwiGLUConfig
from jhybrid.losses import next_token_loss
from jhybrid.model import (
    REMAT,
    Context,
    HybridLM,
    Output,
    flops_per_token,
    parameter_count,
    training_context,
)
from jhybrid.parameters import flatten
from jhybrid.recurrent_config import HGRN2Config, LightningConfig, Mamba2Config, RWKV6Config
from jhybrid.sharding import make_mesh, parameter_shardings

pytestmark = pytest.mark.usefixtures("quick_compile")

THREE_KINDS = tiny(LINEAR, SOFTMAX, ROUTED, remat="block")
DOCUMENTS = (19, 21, 24)  # tokens; alone, each fills as many chunks as the others


def batch(*lengths: int, rows: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """`rows` equal-length rows of documents of these lengths, each padded to a chunk boundary."""
    pieces = {"tokens": [], "targets": [], "segment_ids": [], "positions": []}
    for i, length in enumerate(lengths):
        place = np.arange(-(-length // CHUNK) * CHUNK)
        text = np.where(place < length, tokens(rows, place.size, seed=seed + i), 0)
        pieces["tokens"].append(text)
        targets = np.where(place < length - 1, np.roll(text, -1, axis=1), -1)
        pieces["targets"].append(targets)
        pieces["segment_ids"].append(np.where(place < length, i, -1) + 0 * text)
        pieces["positions"].append(place + 0 * text)
    return {name: np.concatenate(parts, 1).astype(np.int32) for name, parts in pieces.items()}


def loss_and_gradients(config: ModelConfig, data: dict, mesh: MeshConfig | None = None):
    """Mean loss, parameter gradients by path and output, jitted as a training step would."""
    graphdef, params = nnx.split(build(config), nnx.Param)

    def loss(params, data):
        model = nnx.merge(graphdef, params)
        output = model(data["tokens"], training_context(data))
        total, count = next_token_loss(model, output.hidden, data["targets"])
        return total / count, output

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    if mesh is None:
        (value, output), grads = step(params, data)
    else:
        devices = make_mesh(mesh)
        with jax.set_mesh(devices):
            params = jax.device_put(params, parameter_shardings(params, devices))
            (value, output), grads = step(params, data)
    return value, flatten(grads), output


def forward(config: ModelConfig, text: np.ndarray) -> Output:
    """The model on whole rows of one document each."""
    graphdef, params = nnx.split(build(config))

    @jax.jit
    def run(params, text):
        context = Context(positions=jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape))
        return nnx.merge(graphdef, params)(text, context)

    return run(params, text)


@functools.cache
def packed_documents():
    """What one device makes of DOCUMENTS packed into one row; two tests compare with it."""
    return loss_and_gradients(THREE_KINDS, batch(*DOCUMENTS, rows=8))


def assert_same(actual, expected, ratio: float):
    assert_close(actual[0], expected[0], ratio, "loss")
    assert actual[1].keys() == expected[1].keys()
    for path, gradient in expected[1].items():
        assert_close(actual[1][path], gradient, ratio, path, floor=1e-9)
    assert_close(actual[2].hidden, expected[2].hidden, ratio, "hidden")
    for name, report in expected[2].reports.items():
        for key, value in report.items():
            assert_close(actual[2].reports[name][key], value, ratio, f"{name} {key}")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("GGGN" * 5 + "N", [("GGGN", 5, 0), ("N", 1, 20)]),
        ("GGGN", [("G", 3, 0), ("N", 1, 3)]),
        ("GGS" * 8, [("GGS", 8, 0)]),
        ("SGG" * 2 + "SG", [("SG", 1, 0), ("GSG", 2, 2)]),
        ("G" * 24, [("G", 24, 0)]),
        ("ABC", [("ABC", 1, 0)]),
    ],
)
def test_groups_compile_the_fewest_distinct_blocks(kinds, expected):
    blocks = {
        kind: BlockConfig(mixer=SOFTMAX, channel_mixer=SwiGLUConfig(width=n))
        for n, kind in enumerate(sorted(set(kinds)), 1)
    }
    kind_of = {found: kind for kind, found in blocks.items()}
    found = find_groups([blocks[kind] for kind in kinds])
    named = [("".join(kind_of[b] for b in group.pattern), group) for group in found]
    assert [(name, group.repeats, group.start) for name, group in named] == expected
    assert kinds == "".join(name * group.repeats for name, group in named)


def test_scanned_blocks_equal_unrolled_blocks_in_values_and_gradients():
    config = tiny(SOFTMAX, ROUTED, SOFTMAX, ROUTED, remat="block")
    data = batch(19, 13)
    unrolled = dataclasses.replace(config, scan_blocks=False)
    assert_same(loss_and_gradients(config, data), loss_and_gradients(unrolled, data), 2e-5)


@pytest.mark.slow
def test_every_remat_policy_gives_the_same_values_and_gradients():
    config = tiny(SOFTMAX, SOFTMAX)
    data = batch(19, 13)
    expected = loss_and_gradients(config, data)
    for remat in REMAT:
        if remat != "none":
            actual = loss_and_gradients(dataclasses.replace(config, remat=remat), data)
            assert_same(actual, expected, 2e-5)


def residual_bytes(remat: str) -> int:
    config = tiny(LINEAR, SOFTMAX, LINEAR, SOFTMAX, remat=remat)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build(config)), nnx.Param)
    text = jnp.zeros((2, 64), jnp.int32)

    def forward(params):
        context = Context(positions=jnp.arange(64)[None] + 0 * text)
        return nnx.merge(graphdef, params)(text, context).hidden

    _, pullback = jax.eval_shape(lambda params: jax.vjp(forward, params), params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))


def test_remat_policies_keep_less_the_stricter_they_are():
    kept = {remat: residual_bytes(remat) for remat in REMAT}
    assert kept["block"] < kept["mixer_outputs"] < kept["dots_and_mixer_outputs"] < kept["none"]
    assert kept["block"] < kept["dots"] < kept["dots_and_mixer_outputs"]


@pytest.mark.slow
def test_a_document_packed_with_others_gives_the_same_outputs_and_gradients_as_alone():
    _, packed_grads, packed = packed_documents()
    total, counted, start = {}, 0, 0
    for i, length in enumerate(DOCUMENTS):
        alone = batch(length, rows=8, seed=i)
        count = (alone["targets"] >= 0).sum()
        _, grads, output = loss_and_gradients(THREE_KINDS, alone)
        hidden = packed.hidden[:, start : start + length]
        assert_close(hidden, output.hidden[:, :length], 1e-5, f"document {i}")
        start += alone["tokens"].shape[1]
        counted += count
        for path, gradient in grads.items():
            total[path] = total.get(path, 0) + count * gradient
    for path, gradient in total.items():
        assert_close(packed_grads[path], gradient / counted, 5e-5, path, floor=1e-9)


@pytest.mark.slow
def test_loss_and_gradients_on_eight_devices_equal_one_device():
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    actual = loss_and_gradients(THREE_KINDS, batch(*DOCUMENTS, rows=8), mesh)
    assert_same(actual, packed_documents(), 5e-5)


@pytest.mark.slow
def test_recurrent_mixers_of_every_kind_on_eight_devices_equal_one_device():
    heads = {"num_heads": 2, "key_dim": 8, "value_dim": 8}
    config = tiny(
        HGRN2Config(**heads),
        Mamba2Config(**heads),
        RWKV6Config(**heads, shift_rank=4, decay_rank=4),
        LightningConfig(**heads),
        HGRN2Config(**heads),
        remat="block",
        embed_norm=True,
    )
    data = batch(*DOCUMENTS, rows=8)
    actual = loss_and_gradients(config, data, MeshConfig(data=2, fsdp=2, tensor=2))
    assert_same(actual, loss_and_gradients(config, data), 5e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny(LINEAR, SOFTMAX, LINEAR, SOFTMAX, ROUTED), id="scanned"),
        pytest.param(tiny(SOFTMAX, SOFTMAX, scan_blocks=False), id="unrolled"),
    ],
)
def test_prefill_in_pieces_and_decoding_equal_the_full_forward(config):
    model = build(config)
    text = tokens(2, 22)
    positions = np.broadcast_to(np.arange(22), text.shape)
    expected = forward(model.config, text).hidden

    @jax.jit
    def advance(state, text, positions):
        output = model(text, Context(positions=positions), state)
        return output.state, output.hidden

    state, start, hidden = model.initial_state(2, 22), 0, []
    for length in (10, 10, 1, 1):
        piece = slice(start, start + length)
        state, part = advance(state, text[:, piece], positions[:, piece])
        hidden.append(part)
        start += length
    assert_close(jnp.concatenate(hidden, 1), expected, 1e-5, "hidden")


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    untied, tied = build(tiny(SOFTMAX)), build(tiny(SOFTMAX, tied_head=True))
    hidden = jax.random.normal(jax.random.key(1), (3, 16))
    assert_close(tied.logits(hidden), hidden @ tied.embed[...].T, 1e-6, "tied")
    assert_close(untied.logits(hidden), hidden @ untied.head[...], 1e-6, "untied")
    assert parameter_count(untied.config) - parameter_count(tied.config) == 53 * 16
    _, grads, _ = loss_and_gradients(tied.config, batch(19))
    assert "head" not in grads
    assert np.all(np.any(np.asarray(grads["embed"]) != 0, axis=1))  # by the softmax over all ids


@pytest.mark.slow
def test_reports_come_out_for_each_routed_block_under_its_own_number():
    text = tokens(2, 24)
    reports = forward(tiny(), text).reports
    assert list(reports) == ["blocks.2", "blocks.5", "blocks.6"]
    for report in reports.values():
        assert report["softmax_fraction"].shape == (2,)
    values = [np.asarray(report["scores"]) for report in reports.values()]
    assert not np.allclose(values[0], values[1])


@pytest.mark.parametrize("scan_blocks", [pytest.param(True, marks=pytest.mark.slow), False])
def test_routes_by_block_reach_each_block(scan_blocks):
    model = build(tiny(ROUTED, ROUTED, LINEAR, ROUTED, scan_blocks=scan_blocks))
    text = tokens(2, 24)
    routes = np.random.default_rng(0).random((4, 2, 3, 2)) < 0.5
    place = jnp.broadcast_to(jnp.arange(24), text.shape)

    @jax.jit
    def run(text, routes):
        return model(text, Context(positions=place, routes=routes)).reports

    reports = run(text, routes)
    for block in (0, 1, 3):
        found = np.asarray(reports[f"blocks.{block}"]["decisions"])
        np.testing.assert_array_equal(found, routes[block])


def test_bf16_compute_keeps_fp32_parameters_and_logits():
    model = build(tiny(LINEAR, SOFTMAX, compute_dtype="bfloat16"))
    text = tokens(2, 16)
    output = forward(model.config, text)
    assert output.hidden.dtype == jnp.bfloat16
    assert model.logits(output.hidden).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    same = forward(tiny(LINEAR, SOFTMAX), text).hidden
    assert_close(output.hidden, same, 0.03, "hidden")


def test_repeats_of_a_block_start_from_different_weights():
    model = HybridLM(tiny(SOFTMAX, SOFTMAX, SOFTMAX, channels=False), rngs=nnx.Rngs(0))
    weight = model.groups[0][0].mixer.q_proj.weight[...]
    assert weight.shape[0] == 3
    assert not np.allclose(weight[0], weight[1])
    assert np.std(weight) == pytest.approx(0.02, rel=0.1)


def test_parameters_are_named_by_path_and_viewed_block_by_block():
    model = build(tiny())
    params = nnx.state(model, nnx.Param)
    named = flatten(params)
    assert {"embed", "head", "norm.weight", "groups.0.1.mixer.q_proj.weight"} <= named.keys()
    values = by_block(params, model.config.blocks)
    stacked = named["groups.0.1.mixer.q_proj.weight"]
    assert_close(values["blocks.1.mixer.q_proj.weight"], stacked[0], 0, "block 1")
    assert_close(values["blocks.4.mixer.q_proj.weight"], stacked[1], 0, "block 4")
    rebuilt = from_blocks(values, nnx.eval_shape(lambda: params), model.config.blocks)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(params)
    for path, value in flatten(rebuilt).items():
        assert_close(value, named[path], 0, path)
    del values["blocks.4.mixer.q_proj.weight"]
    with pytest.raises(ValueError, match=r"no value for parameter blocks\.4\.mixer\.q_proj"):
        from_blocks(values, params, model.config.blocks)


def test_flops_per_token_match_a_count_by_hand():
    D, F, T = 16, 32, 24
    softmax = 2 * (D * 32 + 2 * D * 16 + 32 * D) + 2 * 4 * 2 * 8 * (T + 1) / 2
    linear = 2 * (D * 80 + 4 * 48 + 2 * D * 2) + 6 * 2 * 8 * 8
    channels, head = 2 * 3 * D * F, 2 * D * 53
    config = tiny(SOFTMAX, LINEAR)
    assert flops_per_token(config, T) == 3 * (softmax + linear + 2 * channels + head)


def test_flops_of_a_routed_block_grow_with_the_softmax_fraction_and_a_window_bounds_them():
    few, many = (flops_per_token(tiny(ROUTED), 64, softmax_fraction=f) for f in (0.25, 0.75))
    assert many - few == 3 * 0.5 * 2 * 4 * (4 + 8) * (64 - CHUNK) / 2
    window = dataclasses.replace(SOFTMAX, window=4)
    seen = (1 + 2 + 3 + 4 * 61) / 64
    full = flops_per_token(tiny(SOFTMAX), 64) - flops_per_token(tiny(window), 64)
    assert full == pytest.approx(3 * 2 * 4 * 2 * 8 * (65 / 2 - seen))
