"""Nothing of a run stays behind, however it ended.

Every process of a run inherits `ASYNCRL_RUN_ID` in its environment, and that is how its
processes are found again: the engines' children and Ray's own included. Some of Ray's wipe their
environment, and lose their parent when it dies with the launcher: these have files open below the
run's scratch folder. `sweep` ends them all; the guard is a small process that sweeps when the
launcher dies without a word (SIGKILL).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "ASYNCRL_RUN_ID"


def processes_of(run_id: str, scratch: str = "") -> list[psutil.Process]:
    """Processes of the run and all below them, this one and its parents left out.

    Args:
        scratch: the run's scratch folder; whoever has a file below it open is the run's too.
    """
    me = psutil.Process()
    spare = {me.pid, *(p.pid for p in me.parents())}
    wanted = f"{MARK}={run_id}".encode()
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in spare:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            # The raw file: a process that set a title of its own may have overwritten the first
            # entries (psutil reads only up to there), or all: such a one is found below its parent.
            raw = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted in raw.split(b"\0") or (scratch and _has_open(process.pid, scratch)):
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return [p for pid, p in found.items() if pid not in spare and not _is_guard(p)]


def _has_open(pid: int, folder: str) -> bool:
    """Whether the process has a file below the folder open, or had: it may be deleted."""
    fds = Path(f"/proc/{pid}/fd")
    for fd in os.listdir(fds):
        with contextlib.suppress(OSError):
            if os.readlink(fds / fd).startswith(os.path.join(folder, "")):
                return True
    return False


def _is_guard(process: psutil.Process) -> bool:
    try:
        return "asyncrl.launch.processes.reaper" in process.cmdline()
    except psutil.Error:
        return False


def is_guard_of(process: psutil.Process, run_id: str) -> bool:
    """Whether the process is the guard of a launch of this run."""
    with contextlib.suppress(psutil.Error):
        return _is_guard(process) and run_id in process.cmdline()
    return False


def sweep(run_id: str, grace_s: float = 2.0, scratch: str = "") -> list[int]:
    """End what is left of the run: SIGTERM, then SIGKILL after `grace_s`; the pids ended."""
    left = processes_of(run_id, scratch)
    pids = [p.pid for p in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    # A process may have been started between the listing and the signal.
    for process in processes_of(run_id, scratch):
        with contextlib.suppress(psutil.Error):
            process.kill()
    return pids


def kill_role(run_id: str, name: str) -> None:
    """Kill a role's process on this machine, e.g. "buffer-0": one that is stopped or hangs does
    not notice that its host ends."""
    for process in processes_of(run_id):
        with contextlib.suppress(psutil.Error):
            if process.name() == name:
                process.kill()
                process.wait(timeout=5)


class Guard:
    """The launcher's insurance: a child that sweeps when this process is gone.

    It removes `scratch` then too: the folder of the run's sockets.
    """

    def __init__(self, run_id: str, scratch: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.processes.reaper", run_id, scratch],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal must not reach it
        )  # fmt: skip

    def dismiss(self) -> None:
        """The run ended in order: the guard goes without sweeping."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"done\n")
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Wait for the launcher's word or its end; sweep if there was no word."""
    run_id, scratch = sys.argv[1:]
    os.environ.pop(MARK, None)
    if sys.stdin.buffer.readline() != b"done\n":
        deadline = time.monotonic() + 20
        while processes_of(run_id, scratch) and time.monotonic() < deadline:
            sweep(run_id, scratch=scratch)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
