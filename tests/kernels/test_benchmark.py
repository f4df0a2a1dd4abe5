"""The benchmark checks closeness before it times, and writes what it printed."""

import dataclasses
import functools
import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import BlockMask, benchmark, gated_delta_rule, gated_linear_attention
from pallas_kernels.block_sparse_attention import gpu_parts, gpu_peers, tpu_peers
from pallas_kernels.block_sparse_attention import pallas_gpu_plan as planning
from pallas_kernels.block_sparse_attention.cases import Case
from pallas_kernels.gated_delta_rule import gpu_peers as rule_peers
from pallas_kernels.gated_delta_rule.cases import BY_NAME, accepted
from pallas_kernels.gated_linear_attention import gpu_peers as gated_peers
from pallas_kernels.gated_linear_attention.cases import BY_NAME as GATED

CASE = BY_NAME["one-token"]


def test_one_command_times_what_runs_here_and_writes_json(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--op", "gated_delta_rule", "--case", CASE.name, "--no-memory"]
    rows = benchmark.main([*arguments, "--implementation", "xla", "--json", str(path)])
    written = json.loads(path.read_text())
    assert [row["implementation"] for row in written["rows"]] == ["xla"]
    assert written["rows"][0]["forward_ms"] == rows[0].forward_ms > 0
    assert rows[0].closeness_outputs <= 5e-3
    assert written["rows"][0]["memory"] == list(rows[0].memory)
    printed = capsys.readouterr().out
    assert CASE.name in printed
    assert "kept for the backward pass" in printed and "temporaries beside" in printed


def test_an_implementation_that_is_wrong_is_not_timed():
    def half_as_much(*arguments, implementation, **options):
        o, state = gated_delta_rule(*arguments, implementation=implementation, **options)
        return (o / 2 if implementation == "xla" else o), state

    row = benchmark.measure(
        half_as_much, CASE, "bfloat16", "xla", accepted("bfloat16"), gate_tokens=64, memory=False
    )
    assert row.forward_ms is None
    assert row.note.startswith("not close to the reference: o 5.0e-01 > 0.005")


def test_an_unknown_case_and_an_unwritable_file_are_named(tmp_path, capsys):
    for wrong in (["--case", "33k"], ["--json", str(tmp_path / "missing" / "out.json")]):
        with pytest.raises(SystemExit):
            benchmark.main(["--op", "gated_delta_rule", *wrong])
        assert wrong[0] in capsys.readouterr().err


ATTENTION = Case("small", 1, 64, 64, 2, 2, 16, 16, 2, mask="blocks", block_size=16)


def test_a_peer_is_checked_on_what_it_computes(monkeypatch):
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    wrong = functools.partial(jax.nn.dot_product_attention, is_causal=False)
    given = {
        "dense": (gpu_peers.Dense(dense, True), None),
        "wrong": (gpu_peers.Dense(wrong, True), None),
    }
    given["absent"] = (None, "takes K = V")
    peers = {name: lambda case, found=found: found for name, found in given.items()}
    monkeypatch.setattr(gpu_peers, "PEERS", peers)
    rows = {x: benchmark.measure_peer(x, gpu_peers, ATTENTION, "bfloat16", 32) for x in peers}
    assert rows["dense"].closeness_outputs <= 1e-2
    assert rows["dense"].forward_backward_ms > 0
    assert (rows["wrong"].forward_ms, rows["wrong"].note) == (None, "not close to its reference")
    assert rows["absent"].note == "takes K = V"


def test_a_peer_that_is_not_installed_is_named():
    if importlib.util.find_spec("tokamax"):
        pytest.skip("tokamax is installed")
    row = benchmark.measure_peer("tokamax dense", gpu_peers, ATTENTION, "bfloat16", 32)
    assert (row.forward_ms, row.note) == (None, "tokamax is not installed")
    assert set(tpu_peers.installed()) == {"jax-splash"}


@pytest.mark.slow
def test_peers_of_the_delta_rule_are_checked_and_those_not_installed_are_named(monkeypatch):
    def rule(q, k, v, g, beta):
        return gated_delta_rule(q, k, v, g, beta, implementation="xla")[0]

    def no_gradient(arguments, do):
        raise RuntimeError("wrong gradients on this GPU")

    peer = rule_peers.Jax(rule)
    peer.forward_backward = no_gradient
    absent = rule_peers._peer("no_such_package.ops", lambda case: None, lambda ops: None)
    monkeypatch.setattr(rule_peers, "PEERS", {"ours": lambda case: (peer, None), "absent": absent})
    case = BY_NAME["T63"]
    ours, absent = (
        benchmark.measure_peer(name, rule_peers, case, "bfloat16", 32)
        for name in ("ours", "absent")
    )
    assert ours.closeness_outputs <= 5e-3 and ours.forward_ms > 0
    assert (ours.forward_backward_ms, ours.note) == (None, "wrong gradients on this GPU")
    assert absent.note == "no_such_package is not installed"


def test_peers_of_gated_linear_attention_get_the_arguments_of_the_rule(monkeypatch):
    names = {rule: gated_peers._names(GATED[f"{rule}-T65"]) for rule in ("gla", "rwkv6", "kda")}
    assert [x[4:] for x in names.values()] == [(), ("bonus",), ("beta",)]

    def attend(q, k, v, g, bonus):
        return gated_linear_attention(q, k, v, g, bonus=bonus, implementation="xla")[0]

    case = GATED["rwkv6-one-token"]
    ours = gated_peers.Jax(attend, names["rwkv6"])
    monkeypatch.setattr(gated_peers, "PEERS", {"ours": lambda case: (ours, None)})
    row = benchmark.measure_peer("ours", gated_peers, case, "bfloat16", 32)
    assert row.closeness_outputs <= 5e-3 and row.forward_backward_ms > 0
    absent = gated_peers._peer("no_such_package.ops", ("rwkv6",), lambda ops, case: None)
    assert absent(case) == (None, "no_such_package is not installed")
    other = gated_peers._peer("pallas_kernels.work", ("other",), lambda ops, case: None)
    assert other(case) == (None, "has kernels for other, not rwkv6")


@pytest.mark.slow
def test_maxtexts_rule_gets_a_query_head_for_every_value_head(monkeypatch):
    def chunked(query, key, value, g, beta, *, chunk_size, compute_dtype):
        assert query.shape[2] == key.shape[2] == value.shape[2]
        assert (chunk_size, compute_dtype) == (64, value.dtype)
        return gated_delta_rule(query, key, value, g, beta, implementation="xla")[0], None

    models = types.SimpleNamespace(jax_chunk_gated_delta_rule=chunked)
    peers = {"MaxText": lambda case: (rule_peers._maxtext(models), None)}
    monkeypatch.setattr(rule_peers, "PEERS", peers)
    case = dataclasses.replace(BY_NAME["T65-grouped"], write_mask=False)
    row = benchmark.measure_peer("MaxText", rule_peers, case, "bfloat16", 32)
    assert row.closeness_outputs <= 5e-3 and row.forward_backward_ms > 0


def test_a_case_is_compared_with_the_one_it_names():
    def row(name, implementation, forward, both):
        times = {"forward_ms": forward, "forward_backward_ms": both}
        return benchmark.Row(name, "", "bfloat16", implementation, **times)

    rows = [
        row("32k", "xla", 2.0, 4.0),
        row("32k-packed", "xla", 2.2, 4.2),
        row("32k-packed", "pallas_gpu", 1.0, 2.0),  # its plain row was not timed
        row("32k-routed", "xla", None, None),
    ]
    (line,) = benchmark.comparisons(BY_NAME, rows)
    assert line.startswith("32k-packed takes the time of 32k times 1.10 forward, 1.05 forward+back")


def test_a_step_is_timed_with_the_state_it_carries_and_rated_by_bytes():
    arguments = ["--op", "gated_delta_step", "--case", "small", "--no-memory"]
    (row,) = benchmark.main([*arguments, "--implementation", "xla"])
    assert row.forward_ms > 0 and row.note.endswith("GB/s")


def test_a_part_that_fails_leaves_its_reason_and_the_others_are_timed():
    def fails():
        raise ValueError("too many registers")

    parts = types.SimpleNamespace(
        parts=lambda case, dtype: iter([("first", fails), ("second", lambda: jnp.ones(3))])
    )
    first, second = benchmark.measure_parts(parts, ATTENTION, "bfloat16")
    assert (first.forward_ms, first.note) == (None, "too many registers")
    assert second.forward_ms > 0


def test_work_over_time_stands_beside_the_times():
    row = benchmark.Row("small", "", "bfloat16", "xla", forward_ms=2e-3, forward_backward_ms=7e-3)
    flops = ATTENTION.work("bfloat16", False).flops
    note = benchmark.rates(ATTENTION, "bfloat16", row).note
    assert note == f"{flops / 2e-3 / 1e9:.0f} / {3.5 * flops / 7e-3 / 1e9:.0f} TFLOP/s"


def test_an_op_without_peers_or_parts_says_so(capsys):
    for wanted in ("--peers", "--parts"):
        with pytest.raises(SystemExit):
            benchmark.main(["--op", "simple_linear_attention", wanted])
        assert f"{wanted}: simple_linear_attention has none" in capsys.readouterr().err


def test_every_variant_of_a_kernel_differs_from_the_default():
    for block in (64, 128):
        mask = BlockMask.streaming(1, 1, block)
        plans = planning.plans(mask, 128, 128, False)
        changes = gpu_parts._FORWARD, gpu_parts._DQ, gpu_parts._DKV
        for plan, changed in zip(plans, changes, strict=True):
            found = dict(gpu_parts.variants(plan, changed))
            assert found.pop("default") == plan
            assert plan not in found.values()
            assert len(found) >= 2
