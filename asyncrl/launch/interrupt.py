"""SIGINT and SIGTERM as counts that a loop looks at; the second one does not wait for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Counts the signals. From the second on, KeyboardInterrupt is raised where the code is."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[int, Any] = {}
        self.install()

    def install(self) -> None:
        """Take the signals; once more after Ray has started, which takes SIGTERM for itself."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                old = signal.signal(number, self._handle)
                self._old.setdefault(number, old)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def mute(self) -> None:
        """Only count from now on: the end of the run must not be cut short."""
        for number in self._old:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            signal.signal(number, old)
