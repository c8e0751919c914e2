"""Whether an engine failed for lack of memory: its words in the log, and who killed it."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable

from asyncrl import out_of_memory
from asyncrl.errors import EngineError

TAIL_BYTES = 64 << 10


class EngineMemory:
    """Remembers how things stood before the engine was started."""

    def __init__(self) -> None:
        self._kills = out_of_memory.kills()
        self._began = _log_size()

    def start_error(self, model_path: str, error: Exception) -> EngineError:
        """What the failure of a start comes to: vLLM tells the cause in the log alone."""
        if why := out_of_memory.said(str(error)) or out_of_memory.said(self._log()):
            return out_of_memory.at_start(why)
        return EngineError(f"vLLM did not start with {model_path}: {error}")

    def fault(self, exit_codes: Iterable[int | None]) -> str:
        """Why an engine that died has run out of memory, in words; "" if it did not.

        Args:
            exit_codes: of its processes; a worker that is killed takes the core with it.
        """
        if why := out_of_memory.said(self._log()):
            return f"the engine ran out of memory ({why})"
        now = out_of_memory.kills()
        if self._kills is not None and now is not None and now > self._kills:
            return "the engine was killed by the kernel, which had no memory left"
        sigkill = -signal.SIGKILL in exit_codes
        if sigkill and out_of_memory.killed(self._kills, now):
            return "the engine was killed by SIGKILL, for lack of memory as far as can be told"
        return ""

    def _log(self) -> str:
        """What this process and its engine have written to their log since the start."""
        try:
            with open("/proc/self/fd/2", "rb") as log:
                if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
                    return ""
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._began, size - TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:  # stderr is a pipe or a terminal
            return ""


def _log_size() -> int:
    try:
        found = os.fstat(2)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
