"""The pytest plugin behind `--record-status`: which kinds of run passed in this session.

`@pytest.mark.covers(op, implementation, *passes, how="run", where=...)`: both passes by default,
on the device JAX runs on. "{chip}" in any of them is the test's parameter of that name. Workers
of pytest-xdist report through the properties of each test.
"""

from pathlib import Path

import jax

from pallas_kernels import status

PROPERTY = "covers"


def add_properties(items) -> None:
    """Writes what each test covers where its report carries it."""
    for item in items:
        params = getattr(item, "callspec", None)
        for mark in item.iter_markers("covers"):
            op, implementation, *passes = mark.args
            how, where = mark.kwargs.get("how", "run"), mark.kwargs.get("where")
            where = where or ("CPU" if how == "interpreted" else _device())
            for direction in passes or status.PASSES:
                kind = (op, implementation, how, where, direction)
                if params is not None:
                    kind = tuple(part.format_map(params.params) for part in kind)
                item.user_properties.append((PROPERTY, kind))


def _device() -> str:
    kind = jax.devices()[0].device_kind
    return "CPU" if kind == "cpu" else kind


class Recorder:
    """Counts outcomes by kind and merges them into the file of records when the session ends."""

    def __init__(self, path: Path = status.FILE):
        self.path = path
        self.passed: dict[tuple, int] = {}
        self.failed: set[tuple] = set()

    def pytest_runtest_logreport(self, report):
        kinds = [tuple(value) for name, value in report.user_properties if name == PROPERTY]
        for kind in kinds:
            if report.failed:
                self.failed.add(kind)
            elif report.passed and report.when == "call":
                self.passed[kind] = self.passed.get(kind, 0) + 1

    def pytest_sessionfinish(self):
        new = [
            status.Record(op, implementation, how, where, direction, jax.__version__, tests)
            for (op, implementation, how, where, direction), tests in self.passed.items()
        ]
        old = status.load(self.path) if self.path.exists() else []
        status.save(status.merge(old, new, self.failed), self.path)
