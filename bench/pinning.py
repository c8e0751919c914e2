"""Gives the actors of a running run one core and its learners another, from outside.

A role's process, and whatever it starts (engine, reward child), writes to the role's log in the
run's folder: that, or descent from such a process, says whose it is. Affinity belongs to threads:
every thread of these processes is set, and new ones inherit it. The launcher, the buffer and Ray's
own processes stay free.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_LOG = re.compile(r"/logs/(actor|learner)-\d+\.log$")


class Pinning:
    """Cores by role, applied again and again while the run starts."""

    def __init__(self, folder: Path, cores: Mapping[str, int]) -> None:
        self.folder, self.cores = folder, cores
        self.pinned: dict[str, set[int]] = {role: set() for role in cores}
        """Processes found so far, by role."""

    def apply(self) -> None:
        """Set every thread of every role's process that is there now."""
        for pid, role in roles_below(self.folder):
            self.pinned[role].add(pid)
            for thread in threads_of(pid):
                with contextlib.suppress(OSError):  # it ended meanwhile
                    os.sched_setaffinity(thread, {self.cores[role]})

    def astray(self) -> list[str]:
        """Threads of known processes that may run elsewhere; none if all is well."""
        found = []
        for role, pids in self.pinned.items():
            for thread in (t for pid in pids for t in threads_of(pid)):
                with contextlib.suppress(OSError):
                    allowed = os.sched_getaffinity(thread)
                    if allowed != {self.cores[role]}:
                        found.append(f"thread {thread} of {role}: {sorted(allowed)}")
        return found


def threads_of(pid: int) -> list[int]:
    """Thread ids of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def roles_below(folder: Path) -> Iterator[tuple[int, str]]:
    """(pid, role) of the actors' and learners' processes of the run in `folder`."""
    root = os.path.realpath(folder)
    parents: dict[int, int] = {p.pid: p.info["ppid"] for p in psutil.process_iter(["ppid"])}
    own = {pid: role for pid in parents if (role := _role_of_log(pid, root))}
    for pid in parents:
        at: int | None = pid
        while at and at not in own:
            at = parents.get(at)
        if at:
            yield pid, own[at]


def _role_of_log(pid: int, root: str) -> str | None:
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            match = _LOG.search(target)
            if match and target.startswith(root + os.sep):
                return match[1]
    return None


def cpu_seconds(root: int) -> dict[int, float]:
    """CPU time so far of `root` and the processes below it, by pid."""
    found: dict[int, float] = {}
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
    return found
