"""What is decided about where a role runs, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Placement:
    """What each role runs with.

    >>> Placement("cpu", "gloo", actor_threads=1, learner_threads=1).gpus(6, 2)
    0
    """

    device: Literal["cpu", "cuda"]
    weight_backend: Literal["gloo", "nccl"]
    """What crosses the network, to actors or to relays."""
    actor_threads: int
    learner_threads: int
    actor_gpus: int = 0
    """GPUs of each actor."""
    learner_gpus: int = 0
    """GPUs of each learner rank."""
    weight_strategy: Literal["broadcast", "relay"] = "broadcast"

    def resolved(self, config: Config) -> Config:
        """The configuration with what `auto` has become, where roles must agree on it."""
        weights = config.weights.model_copy(update={"strategy": self.weight_strategy})
        return config.model_copy(update={"weights": weights})

    def gpus(self, actors: int, learners: int) -> int:
        """GPUs that the run needs."""
        return actors * self.actor_gpus + learners * self.learner_gpus


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one role member runs.

    >>> Seat(None, "this machine", 8, gpus=("2", "3")).visible_gpus
    '2,3'
    """

    node: str | None
    """Ray's id of the node; None: there is only one."""
    label: str
    """The node, for people."""
    threads: int
    num_gpus: int = 0
    """GPUs to ask Ray for: 0 when `gpus` names them."""
    gpus: tuple[str, ...] = ()
    """Ids chosen by the user."""

    @property
    def visible_gpus(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of its process; None leaves it to Ray."""
        return ",".join(self.gpus) if self.gpus else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A seat for every role member, by rank."""

    actors: tuple[Seat, ...]
    learners: tuple[Seat, ...]

    @property
    def buffer(self) -> Seat:
        """With learner rank 0: every sample ends there."""
        return Seat(self.learners[0].node, self.learners[0].label, threads=1)

    def place(self, role: str, rank: int) -> Seat:
        """The seat of e.g. ("actor", 3)."""
        if role == "buffer":
            return self.buffer
        return {"actor": self.actors, "learner": self.learners}[role][rank]
