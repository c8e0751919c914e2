"""What the launcher tells a role's process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.checkpoints import ResumePoint
from asyncrl.security import Keys
from asyncrl.spans import SpanLog, span_log

INTERRUPTED = "interrupted"
"""The reason of a stop that the user asked for: no last version is evaluated after it."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Place and peers of one process.

    >>> RoleSettings("actor", 0, 2, "model", "cpu", 1, "gloo", "r", "tcp:h", "runs/r").name
    'actor-0'
    """

    role: Literal["buffer", "actor", "learner", "relay"]
    rank: int
    world: int
    """Processes of this role."""
    model_path: str
    """Folder of the initial model."""
    device: Literal["cpu", "cuda"]
    threads: int
    """CPU threads for its arithmetic."""
    weight_backend: Literal["gloo", "nccl"]
    run_id: str
    hub_endpoint: str
    run_dir: str
    host: str = "127.0.0.1"
    """Address that its sockets bind."""
    port: int = 0
    """Port of the buffer's socket; 0 is the system's choice."""
    visible_gpus: str | None = None
    """Ids of the GPUs it may see; None leaves them to Ray."""
    forked: bool = False
    """Whether it is forked from the machine's fork server, and its engine's core from it."""
    inline_reward: bool = False
    """Whether the reward runs in the actor's own process, where a debugger can stop in it."""
    keys: Keys | None = None
    """Of the data plane; None: plain text."""
    relay: str = ""
    """Where its machine's receiver offers weights; "" where they are broadcast to actors."""
    resume: ResumePoint | None = None
    """Learner: where it goes on; None is the start of a run."""

    @property
    def name(self) -> str:
        """E.g. "actor-0"."""
        return f"{self.role}-{self.rank}"

    @property
    def ids_path(self) -> str:
        """Its list of sample ids."""
        return os.path.join(self.run_dir, "logs", f"{self.name}.ids.tsv")

    def span_log(self, max_mib: float | None) -> SpanLog:
        """Where its process notes what it does when; None: nowhere."""
        return span_log(self.run_dir, self.role, self.rank, self.run_id, max_mib)


def end_with(*pids: int, first: Callable[[], None] = lambda: None) -> None:
    """End this process when one of `pids` ends, or has ended; `first` is called just before.

    A thread waits on pidfds, which cannot mistake a reused pid for the process that is meant.
    """
    fds: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(pid))

    def watch() -> None:
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        if len(fds) == len(pids):
            poller.poll()
        first()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="asyncrl-end-with", daemon=True).start()


def name_process(name: str) -> None:
    """Show this process under `name` (15 characters count) in ps and top.

    Its title stays: writing one would overwrite the environment, by which a run's processes are
    found (launch/processes/reaper.py).
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
