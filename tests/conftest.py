"""How tests share the machine: one thread each, two workers, whole runs on one of them."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Before anything imports torch: its threads spin while they wait for each other, and on cores that
# others use tests of tiny tensors take five times as long with two. Roles have counts of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

RUNS = "tests/runs/"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole runs first: they take longest, and the other worker does the rest meanwhile."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(RUNS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, and so do all whole runs: never two tests of them at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RUNS if nodeid.startswith(RUNS) else nodeid.split("::")[0]

    config.option.loadscopereorder = False
    return Rooms(config, log)
