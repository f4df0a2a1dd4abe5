"""The status matrix: records of passed tests, merged by kind and printed as a table."""

import json
import types
from typing import ClassVar

import pytest
import record_status

from pallas_kernels import status

RAN = status.Record("op", "xla", "run", "CPU", "forward", "0.11.2", 3)
BACKWARD = status.Record("op", "xla", "run", "CPU", "backward", "0.11.2", 2)
COMPILED = status.Record("op", "pallas_tpu", "compiled", "v6e", "forward", "0.11.2", 1)


def test_a_new_record_replaces_its_kind_and_a_failure_removes_it():
    newer = status.Record("op", "xla", "run", "CPU", "forward", "0.12.0", 4)
    assert status.merge([RAN, COMPILED], [newer], []) == [COMPILED, newer]
    assert status.merge([RAN, COMPILED], [newer], [RAN.kind]) == [COMPILED]


def test_a_file_holds_what_was_saved(tmp_path):
    status.save([RAN, COMPILED], tmp_path / "status.json")
    assert status.load(tmp_path / "status.json") == [COMPILED, RAN]


def test_the_table_has_a_row_per_implementation_and_a_column_per_way():
    assert status.table([RAN, BACKWARD, COMPILED]).splitlines() == [
        "| op | implementation | run on | interpreted | compiled ahead of time for |",
        "|---|---|---|---|---|",
        "| `op` | `pallas_tpu` | - | - | v6e: forward (JAX 0.11.2, 1 test) |",
        "| `op` | `xla` | CPU: forward, backward (JAX 0.11.2, 3 tests) | - | - |",
    ]


def test_a_mark_names_the_parameters_of_its_test():
    class Item:
        callspec = types.SimpleNamespace(params={"name": "pallas_tpu", "chip": "v6e"})
        user_properties: ClassVar = []

        @staticmethod
        def iter_markers(name):
            return [getattr(pytest.mark, name)("op", "{name}", how="compiled", where="{chip}").mark]

    record_status.add_properties([Item])
    kinds = [("op", "pallas_tpu", "compiled", "v6e", direction) for direction in status.PASSES]
    assert Item.user_properties == [(record_status.PROPERTY, kind) for kind in kinds]


def test_only_kinds_that_passed_whole_are_recorded(tmp_path):
    def report(kind, outcome):
        named = {"failed": outcome == "failed", "passed": outcome == "passed", "when": "call"}
        properties = [(record_status.PROPERTY, list(kind))]
        return type("Report", (), {**named, "user_properties": properties})

    recorder = record_status.Recorder(tmp_path / "status.json")
    for kind, outcome in [(RAN.kind, "passed"), (RAN.kind, "failed"), (BACKWARD.kind, "passed")]:
        recorder.pytest_runtest_logreport(report(kind, outcome))
    recorder.pytest_sessionfinish()
    (found,) = json.loads((tmp_path / "status.json").read_text())
    assert (found["direction"], found["tests"]) == ("backward", 1)


def test_the_readme_shows_the_records():
    text = status.FILE.with_name("README.md").read_text()
    shown = text.partition("<!-- status -->\n")[2].partition("\n<!-- end of status -->")[0]
    assert shown == status.table(status.load(status.FILE))
