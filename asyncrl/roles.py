"""What the launcher tells a role's process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

INTERRUPTED = "interrupted"
"""The reason of a stop that the user asked for: no last version is evaluated after it."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Place and peers of one process.

    >>> RoleSettings("actor", 0, 2, "model", "cpu", 1, "gloo", "r", "tcp:h", "runs/r").name
    'actor-0'
    """

    role: Literal["buffer", "actor", "learner"]
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
    visible_gpus: str | None = None
    """Ids of the GPUs it may see; None leaves them to Ray."""
    forked: bool = False
    """Whether it is forked from the machine's fork server, and its engine's core from it."""
    inline_reward: bool = False
    """Whether the reward runs in the actor's own process, where a debugger can stop in it."""

    @property
    def name(self) -> str:
        """E.g. "actor-0"."""
        return f"{self.role}-{self.rank}"

    @property
    def ids_path(self) -> str:
        """Its list of sample ids."""
        return os.path.join(self.run_dir, "logs", f"{self.name}.ids.tsv")


def name_process(name: str) -> None:
    """Show this process under `name` (15 characters count) in ps and top.

    Its title stays: writing one would overwrite the environment, by which a run's processes are
    found (launch/processes/reaper.py).
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
