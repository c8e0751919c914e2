"""The lines of a file that grows, each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

CHUNK_BYTES = 4 << 20
"""Read at a time: a day's run must not be in memory whole."""


class Lines(Protocol):
    """JSON lines that become more, wherever they lie."""

    malformed: int
    """Whole lines that were no JSON object, or not one of those expected; left out."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was written since the last call."""


class Decoder:
    """JSON objects out of bytes that come in pieces; a torn last line waits."""

    def __init__(self) -> None:
        self.malformed = 0
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The objects whose lines these bytes end."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            try:
                value = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            elif line.strip():
                self.malformed += 1


class Tail(Decoder):
    """Whole lines of a JSON lines file, from where the last call ended; a torn last line waits.

    A file that is not there yet has no lines. One that became shorter is another one: it is read
    from its start, and `restarted` counts that.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.restarted = 0
        self._at = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was written since the last call."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self._at:
                self._at, self._rest = 0, b""
                self.restarted += 1
            file.seek(self._at)
            while data := file.read(CHUNK_BYTES):
                self._at += len(data)
                yield from self.feed(data)
