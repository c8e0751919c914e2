"""The runs that are served: known by name, read when somebody looks at them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.monitor.figures.kit import Run
from asyncrl.monitor.reading.open_run import OpenRun
from asyncrl.monitor.reading.retired import Retired
from asyncrl.monitor.words import run_name

LOOK_EVERY_S = 2.0
"""How often folders are looked for new runs, at most."""


class ServedRun(OpenRun):
    """A run as figures take it: with what its recording tells."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.retired = Retired(folder)

    def read(self) -> bool:
        """Read on; whether there were new records."""
        self.retired.update()
        return super().read()

    def drawn(self) -> Run:
        """As figures take it."""
        return Run(self.name, self.history, self.retired)


class Shelf:
    """Runs by name: those in a folder of runs, now and later, and those named by their path.

    Only these names are ever looked up, so that no name leads anywhere else.

    Args:
        directory: of runs.
        named: further folders of runs.
    """

    def __init__(self, directory: Path, named: Sequence[Path] = ()) -> None:
        self._directory = directory
        self._named = {folder.resolve(): folder for folder in named}
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._open: dict[str, ServedRun] = {}
        self._looked = float("-inf")

    def names(self) -> list[str]:
        """The runs, those launched last first."""
        with self._lock:
            self._look()
            return list(self._folders)

    def name_of(self, folder: Path) -> str:
        """What a run's folder is called here."""
        with self._lock:
            self._look()
            return next(n for n, f in self._folders.items() if f.resolve() == folder.resolve())

    def open(self, name: str) -> ServedRun:
        """The run of this name.

        Raises:
            KeyError: there is none.
        """
        with self._lock:
            if name not in self._folders:
                self._looked = float("-inf")
                self._look()
            folder = self._folders[name]
            if name not in self._open:
                self._open[name] = ServedRun(name, folder)
            return self._open[name]

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        ages: dict[Path, float] = {}
        inside = (config.parent for config in self._directory.glob("*/config.yaml"))
        for folder in (*self._named.values(), *inside):
            try:
                ages.setdefault(folder.resolve(), (folder / "config.yaml").stat().st_mtime)
            except OSError:
                ages.setdefault(folder.resolve(), 0.0)
        self._folders = {}
        for folder in sorted(ages, key=lambda f: -ages[f]):
            self._folders[run_name(folder, self._folders)] = folder
