"""What a recording's index tells of each actor, counted while it grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.monitor.reading.tail import Tail
from asyncrl.recording import INDEX


class Retired:
    """Counts of `trajectories/`; a batch that was trained again counts again.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.trained: Counter[tuple[str, int]] = Counter()
        """Samples trained, by actor and head staleness."""
        self._index = Tail(folder / "trajectories" / INDEX)

    def update(self) -> None:
        """Read what was written since."""
        for line in self._index.lines():
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError):
                self._index.malformed += 1

    @property
    def malformed(self) -> int:
        """Lines that could not be read, and were left out."""
        return self._index.malformed

    def _take(self, line: Mapping[str, Any]) -> None:
        if line["outcome"] == "trained":
            incarnation, oldest = line["version_min"]
            head = int(line["version"]) - int(oldest)
            if incarnation != line["incarnation"]:
                head = max(0, head)
            self.trained[str(line["actor"]), head] += 1
