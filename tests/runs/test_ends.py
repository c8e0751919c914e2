"""However a launch ends, nothing of it stays behind but its folder."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.runs.ends import WAYS, Footprint

LAUNCHES = int(os.environ.get("ENDS_LAUNCHES", "50"))

pytestmark = [pytest.mark.run, pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.fixture
def temporary(monkeypatch):
    """A TMPDIR for launches alone, short enough for their sockets."""
    folder = Path(tempfile.mkdtemp(prefix="e-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_after_fifty_launches_everything_is_as_before(start, temporary):
    before = Footprint(temporary)
    for number, (way, codes) in enumerate(
        itertools.islice(itertools.cycle(WAYS.items()), LAUNCHES), 1
    ):  # fmt: skip
        code = way(start)
        how = f"launch {number} {way.__name__}, exit code {code}"
        print(how, flush=True)
        assert code in codes, how
        before.check(how)
