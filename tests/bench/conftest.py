"""The benches are scripts: their folder is on the path, as when one is started."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == FOLDER:
            del sys.modules[name]
