"""The benchmark checks closeness before it times, and writes what it printed."""

import json

import pytest

from pallas_kernels import benchmark, gated_delta_rule
from pallas_kernels.gated_delta_rule.cases import BY_NAME, accepted

CASE = BY_NAME["one-token"]


def test_one_command_times_what_runs_here_and_writes_json(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--op", "gated_delta_rule", "--case", CASE.name, "--no-memory"]
    rows = benchmark.main([*arguments, "--implementation", "xla", "--json", str(path)])
    written = json.loads(path.read_text())
    assert [row["implementation"] for row in written["rows"]] == ["xla"]
    assert written["rows"][0]["forward_ms"] == rows[0].forward_ms > 0
    assert rows[0].closeness_outputs <= 5e-3
    assert CASE.name in capsys.readouterr().out


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
