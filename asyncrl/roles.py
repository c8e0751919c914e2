"""What the launcher tells the process of an actor or a learner rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Place and peers of one process.

    >>> RoleSettings("actor", 0, 2, "model", "cpu", 1, "gloo", "r", "tcp:b", "tcp:h", "runs/r").name
    'actor-0'
    """

    role: Literal["actor", "learner"]
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
    buffer_endpoint: str
    hub_endpoint: str
    run_dir: str
    host: str = "127.0.0.1"
    """Address that its sockets bind."""

    @property
    def name(self) -> str:
        """E.g. "actor-0"."""
        return f"{self.role}-{self.rank}"

    @property
    def ids_path(self) -> str:
        """Its list of sample ids."""
        return os.path.join(self.run_dir, "logs", f"{self.name}.ids.tsv")
