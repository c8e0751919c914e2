"""The process group that the learner's code finds in a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A group of one."""
    with ranks.one_rank():
        yield
