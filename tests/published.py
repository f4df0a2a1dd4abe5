"""Published data and recordings that are not part of this repository."""

import os
import pathlib

import pytest

_BESIDE = pathlib.Path(__file__).parent.parent.parent / "shared"


def published(relative: str) -> pathlib.Path:
    """`relative` in $JHYBRID_DATA, else in `shared/` beside the repository; skips without it."""
    path = pathlib.Path(os.environ.get("JHYBRID_DATA", _BESIDE)) / relative
    if not path.exists():
        pytest.skip(f"needs {relative} in $JHYBRID_DATA or in shared/ beside the repository")
    return path
