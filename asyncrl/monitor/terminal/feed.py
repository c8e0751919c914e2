"""Where a run's figures come from: its folder. (remote.py: the JSON of another machine's page.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.budget import Budget
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.reading.open_run import OpenRun

SAMPLING = 0.004
"""Share of a core that reading samples anew may take."""
EVENTS = 30


class Feed(Protocol):
    """A run that is read; all from one thread."""

    name: str
    history: RunHistory

    @property
    def revision(self) -> int:
        """Rises with every reading that found something."""

    def update(self) -> None:
        """Read on."""

    def state(self) -> dict[str, Any]:
        """As reading/panels.py has it: figures, roles, ledger, events."""

    def log(self) -> Sequence[Mapping[str, str]]:
        """The newest lines of all logs."""

    def samples(self, only: str) -> Sequence[Mapping[str, str]]:
        """The last samples; `only`: trained, other, or nothing for all."""

    def advice(self) -> Sequence[Mapping[str, Any]]:
        """What would make the run faster or better."""


class FolderFeed:
    """A run whose folder is on this machine."""

    def __init__(self, folder: Path) -> None:
        self._run = OpenRun(folder.resolve().name, folder)
        self.name, self.history = self._run.name, self._run.history
        self._budget = Budget(SAMPLING)
        self._samples: dict[str, list[dict[str, str]]] = {}

    @property
    def revision(self) -> int:
        """Rises with every reading that found something."""
        return self._run.revision

    def update(self) -> None:
        """Read on."""
        self._run.update()

    def state(self) -> dict[str, Any]:
        """Figures, roles, ledger, events."""
        return panels.state(self._run.folder, self.history, self._run.finals(), EVENTS)

    def log(self) -> Sequence[Mapping[str, str]]:
        """The newest lines of all logs."""
        return self._run.log(0)[1]

    def samples(self, only: str) -> Sequence[Mapping[str, str]]:
        """The last samples, as new as the budget allows."""
        if only not in self._samples or self._budget.allows():
            with self._budget.spend():
                self._samples[only] = panels.samples(self._run.folder, only)
        return self._samples[only]

    def advice(self) -> Sequence[Mapping[str, Any]]:
        """What would make the run faster or better."""
        return self._run.advice()
