"""A run that is being looked at: its files read on, and what is costly to know of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.monitor.logs import LogReader
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.budget import Budget
from asyncrl.monitor.reading.finals import Final, finals
from asyncrl.monitor.reading.history import RunHistory

READ_EVERY_S = 0.5
"""How often a run is read on, at most, however many look at it."""
LOG_LINES = 400
"""Of all logs, the newest that are kept."""
THINKING = 0.002
"""Share of a core that final figures, and advice, may each take of a run."""
LATELY_S = 300.0
"""What advice for a running run is made from."""


class OpenRun:
    """A run that is being read. `lock` is held while its history is read or drawn."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.revision = 0
        """Rises with every reading that found something."""
        self.history = RunHistory(folder)
        self._logs = LogReader(folder, tail=True)
        self._lines: deque[dict[str, str]] = deque(maxlen=LOG_LINES)
        self._told = 0
        self._read_at = float("-inf")
        self._budget, self._thinking = Budget(THINKING), Budget(THINKING)
        self._finals: list[Final] = []
        self._advice: list[Mapping[str, Any]] = []
        self._finals_of = self._advice_of = -1

    def update(self) -> None:
        """Read on, with the lock held, unless that was just done."""
        now = time.monotonic()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        self.revision += self.read()

    def read(self) -> bool:
        """Read what was written since; whether there was anything."""
        return self.history.update()

    def finals(self) -> list[Final]:
        """Its final figures so far, as new as the budget allows; lock held."""
        if not self._finals or (self._finals_of != self.revision and self._budget.allows()):
            with self._budget.spend():
                self._finals, self._finals_of = finals(self.history), self.revision
        return self._finals

    def advice(self) -> list[Mapping[str, Any]]:
        """What the last minutes call for (of a run that is over: all of it); lock held."""
        if self._advice_of != self.revision and self._thinking.allows():
            with self._thinking.spend():
                over = panels.brief(self.folder)["over"]
                self._advice = panels.advice(self.folder, self.history, None if over else LATELY_S)
                self._advice_of = self.revision
        return self._advice

    def log(self, after: int) -> tuple[int, list[dict[str, str]]]:
        """The number of the newest line of all logs, and the lines after a number; lock held."""
        for entry in self._logs.update(whole=True):
            self._lines.append(panels.log_line(entry))
            self._told += 1
        news = max(0, self._told - after) if after <= self._told else len(self._lines)
        return self._told, list(self._lines)[-news:] if news else []
