"""`python -m jhybrid.benchmark.chunk_layer`: one layer timed, the authors' beside it or why not."""

import pytest

from jhybrid.benchmark import chunk_layer as benchmark


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(benchmark, "ours", lambda shape: (1.25, 4.5, 0.5))
    monkeypatch.setattr(benchmark.commandline, "use_compile_cache", lambda folder: None)


def test_the_reason_is_told_where_the_released_layer_cannot_run(run_command, monkeypatch):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    status, shown, _ = run_command(benchmark, "--shape", "8x4096", "--shape", "1x32768")
    assert status == 0 and "released: needs PyTorch" in shown and "not installed" in shown
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["ours", "8x4096", "0.500", "1.250", "4.500"],
        ["ours", "1x32768", "0.500", "1.250", "4.500"],
    ]


def test_a_failure_of_one_layer_leaves_the_others_times(run_command, monkeypatch):
    def fails(shape):
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setattr(benchmark, "unavailable", lambda: None)
    monkeypatch.setattr(benchmark, "theirs", fails)
    _, shown, _ = run_command(benchmark, "--shape", "1x64")
    lines = shown.splitlines()[-2:]
    assert lines[0].split()[:2] == ["ours", "1x64"]
    assert lines[1].split(maxsplit=2)[2] == "RuntimeError: no kernel image"
