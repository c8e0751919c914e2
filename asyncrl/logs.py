"""How a process writes its log: one line a record, which `asyncrl logs` reads back.

    2026-11-30T08:07:53.123Z WARNING asyncrl.actors.rollout: sample ... failed

Time is UTC. The first line of a process says whose log it is: role, rank, run and pid. What
libraries print themselves stands in between, as they print it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import TextIO

LINE = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
BEGIN = "%s of run %s begins, pid %d"
"""The message of a process's first line."""

log = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    """Times in UTC, to the millisecond; a traceback follows the line."""

    def __init__(self) -> None:
        super().__init__(LINE, "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime


def _handler(stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    return handler


def write_to(stream: TextIO, name: str, run_id: str) -> None:
    """Have all records of this process written there from now on, and nowhere else."""
    logging.basicConfig(level=logging.INFO, handlers=[_handler(stream)], force=True)
    log.info(BEGIN, name, run_id, os.getpid())


@contextlib.contextmanager
def written_to(stream: TextIO, name: str, run_id: str) -> Iterator[None]:
    """Have all records of this process written there too, for a while."""
    root, handler = logging.getLogger(), _handler(stream)
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        log.info(BEGIN, name, run_id, os.getpid())
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
