"""Rules of the house that a machine can watch: import direction and readable file sizes."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("jhybrid", "pallas_kernels", "configs", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_files_stay_readable():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > 450} == {}


def test_no_catch_all_modules():
    catch_all = {"utils", "helpers", "common", "misc", "base"}
    assert [str(path) for path in SOURCES if path.stem in catch_all] == []


def test_imports_point_one_way():
    pytest.importorskip("importlinter", reason="import-linter comes with the extra `dev`")
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
