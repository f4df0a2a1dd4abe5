"""`python -m jhybrid.benchmark.heads` at a tiny size: the work it sets, what it makes of times."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_elastic
from closeness import assert_close

from jhybrid import commandline
from jhybrid.benchmark import head_layer, heads, models, work
from jhybrid.mixers import head_cache
from pallas_kernels import xattention_select

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = tiny_elastic.config().model
SETTINGS = head_layer.Settings(config=CONFIG, sparse=0.5, decode_sparse=0.5, kept=0.28, dense="xla")


@pytest.mark.slow
def test_xattention_is_computed_and_then_set():
    H, N = 3, 100
    spread = np.asarray(head_layer.spread_blocks(0.28, (1, H, N, N)))[0]
    assert not np.triu(spread, 1).any()
    assert spread[:, :, 0].all() and spread[:, range(N), range(N)].all()
    share = spread.sum((1, 2)) / (N * (N + 1) / 2)
    np.testing.assert_allclose(share, 0.28, atol=0.04)  # the first block and the own come on top
    assert (spread[0] != spread[1]).any()

    q, k, _ = head_layer.heads(SETTINGS, 256)
    options = {"block_size": 32, "stride": 16}
    forced = head_layer.forced_selection(0.28, q, k, **options)
    np.testing.assert_array_equal(forced, head_layer.spread_blocks(0.28, forced.shape))
    assert (forced != xattention_select(q, k, **options)).any()
    select = jax.jit(lambda q, k: head_layer.forced_selection(0.28, q, k, **options))
    assert "dot" in select.lower(q, k).compile().as_text()  # the scores are still computed


def test_one_launch_and_two_are_the_same_attention(monkeypatch):
    monkeypatch.setattr(head_layer, "median_ms", lambda run: 2.0)
    rows = list(head_layer.launches(SETTINGS, 320))
    G = SETTINGS.mixer.attention.num_kv_heads
    assert [row["msr"] for row in rows] == [n / G for n in range(1, G)]
    assert all(row["largest_difference"] < 1e-5 and row["speedup"] == 1.0 for row in rows)
    q, k, v = head_layer.heads(SETTINGS, 320)
    dense = head_layer.dense_attention(q, k, v, by="xla")
    full = head_layer.one_launch(SETTINGS.mixer, q, k, v, jnp.ones((1, G), bool))
    assert_close(full, dense, 1e-5)


def test_heads_are_shared_out_over_all_blocks():
    model = dataclasses.replace(CONFIG, blocks=CONFIG.blocks[:1] * 32)
    G = SETTINGS.mixer.attention.num_kv_heads
    counts = work.full_heads(model, 0.35)
    assert sum(counts) == round(0.35 * 32 * G) and max(counts) - min(counts) <= 1
    routes = work.random_routes(model, 3, 64, 0.35)
    assert routes is not None and routes.shape == (32, 3, 1, G)
    np.testing.assert_array_equal(routes.sum((2, 3)), np.broadcast_to(counts, (3, 32)).T)
    assert work.routed_fraction(model, routes) == pytest.approx(sum(counts) / (32 * G))
    rooms = [b.mixer.kv_capacity * G for b in work.with_room(model, 0.35).blocks]
    np.testing.assert_allclose(rooms, np.maximum(counts, 1))


@pytest.mark.slow
def test_the_command_times_every_part(run_command, tmp_path, monkeypatch):
    def once(run):
        jax.block_until_ready(run())
        return next(times)

    # router; attention and model: cuDNN's, FA-SSA, XA-SSA; then launches
    times = iter([0.1, 10.0, 100.0, 4.0, 80.0, 3.0, 60.0, *[1.0, 1.5] * 8])
    for module in (heads, head_layer):
        monkeypatch.setattr(module, "median_ms", once)
    monkeypatch.setattr(models, "DECODED", 2)
    monkeypatch.setattr(models, "DECODE_BATCHES", 1)
    monkeypatch.setattr(commandline, "use_compile_cache", lambda folder: None)
    out = tmp_path / "out.json"
    code, printed, err = run_command(
        heads,
        *("--config", tiny_elastic.__file__, "--dense", "xla", "--json", out),
        *("--prefill", "512", "--decode", "2x512", "--launch", "512"),
        *("--sparse", "0.5", "--decode-sparse", "0.5"),
    )
    assert (code, err) == (0, "")
    rows = json.loads(out.read_text())["rows"]
    assert not [row for row in rows if "failed" in row]
    assert {row["part"] for row in rows} == set(heads.PARTS)
    assert rows[0] == {"part": "router", "tokens": 512, "layer_ms": 0.1}
    assert "of_bound=" in printed and "cache_bytes_of_full=" in printed

    L = len(CONFIG.blocks)
    found = {row["model"]: row for row in rows if "bound" in row}
    blocks, width = 16, 5 * 32
    pairs = [min(i, width) for i in range(1, 513)]
    sparse = sum(pairs) / (512 * 513 / 2)
    kept = np.asarray(head_layer.spread_blocks(0.28, (1, 4, blocks, blocks))).sum()
    for model, ms, retrieval in (
        ("FA-SSA", 80.0, 1.0),
        ("XA-SSA", 60.0, kept / 4 / (blocks * (blocks + 1) / 2)),
    ):
        row = found[model]
        w = (retrieval + sparse) / 2
        assert row["msr"] == 0.5 and row["kept_work"] == pytest.approx(w)
        bound = 100.0 / (w * 10 * L + 100 - 10 * L)
        assert row["bound"] == pytest.approx(bound)
        assert row["of_bound"] == pytest.approx(100.0 / ms / bound)
    share = next(row["cache_bytes_of_full"] for row in rows if "cache_bytes_of_full" in row)
    room = head_cache.whole_pages(512 + 2 * 2)
    held = 0.5 * room + width  # whole caches, and rings
    assert share == pytest.approx(held / room, rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sparse", "1"), "--sparse 1.0: must lie in (0, 1)"),
        (("--parts", "prefill,flight"), "--parts flight: known are router, prefill"),
        (("--config", tiny.__file__), "--config: every block must be head-routed"),
    ],
)
def test_what_cannot_be_timed_is_refused(run_command, arguments, message):
    config = () if "--config" in arguments else ("--config", tiny_elastic.__file__)
    code, _, err = run_command(heads, *config, *arguments)
    assert code == 2 and message in err
