"""The learner as the launcher sees it: its ranks started, watched, restarted together.

    starting ──bound──► setting up ──all──► ready ──► training ──all──► done
       ▲                                                 │
       └── back-off ◄── one rank died, failed, is silent ┘   (incarnation + 1, from the checkpoint)
                └────► the run ends: no checkpoints, a reason that would come again, or too often

A rank cannot train without the others, so that all are ended and started again. The buffer goes
back to the checkpoint's batch at once: actors get no lease before they run the new incarnation.
Rank 0 is found at the same endpoint again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.checkpoints import ResumePoint
from asyncrl.config.schema import Config
from asyncrl.errors import (
    AsyncRLError,
    DeadlineError,
    RoleDiedError,
    RoleFailedError,
    WeightSyncError,
)
from asyncrl.launch.backoff import backoff_s
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.processes.role_main import RoleSpec

OTHERS_S = 3.0
"""After a rank failed: how long to see whether another one died, which the first only met."""
RESTARTED = (RoleDiedError, DeadlineError, WeightSyncError)
"""What a restart may mend. Anything else would come again."""

State = Literal["starting", "setting up", "ready", "training", "failing", "backoff", "done"]


@dataclass
class Rank:
    """One rank's process."""

    name: str
    """E.g. "learner-0"."""
    host: Any = None
    since: float = 0.0
    """When its process was started (time.monotonic)."""


class Learners:
    """All ranks, through all incarnations.

    Args:
        resume: where they begin; None is the start of a run.
        spec_of: what a rank is made from, given its name and where it begins.
        log_of: path of a role's log.
        tell: writes an event (name, fields).
        go_back: finds the checkpoint and takes the buffer back to it; where the next incarnation
            begins. It raises what keeps the run from going on.
    """

    def __init__(
        self, config: Config, cluster: Cluster, *, resume: ResumePoint | None,
        spec_of: Callable[[str, ResumePoint | None], RoleSpec], log_of: Callable[[str], str],
        tell: Callable[..., None], go_back: Callable[[], ResumePoint],
    ) -> None:  # fmt: skip
        self._config, self._cluster, self._resume = config, cluster, resume
        self._spec_of, self._log_of, self._tell, self._go_back = spec_of, log_of, tell, go_back
        self.ranks = [Rank(f"learner-{rank}") for rank in range(config.cluster.learners)]
        self.state: State = "starting"
        self.announce_to = ""
        """Where actors announce themselves: the endpoint of rank 0."""
        self.calls: dict[Any, str] = {}
        """The calls under way, and whose they are."""
        self.done: set[str] = set()
        """Ranks that have trained to the end."""
        self.reason = ""
        """Why rank 0 ended before `run.steps`; empty if it did not."""
        self.restarts = 0
        self._ever_trained = False
        self._failures = 0  # in a row, without a batch in between
        self._errors: list[AsyncRLError] = []
        self._until = 0.0

    @property
    def names(self) -> list[str]:
        """Of all ranks."""
        return [rank.name for rank in self.ranks]

    @property
    def late(self) -> list[str]:
        """Who has not been set up; nobody after the first time."""
        if self._ever_trained or self.restarts or self.state not in ("starting", "setting up"):
            return []
        return sorted(self.calls.values()) or self.names

    # --- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every rank's process; rank 0 binds its sockets."""
        self.state, now = "starting", time.monotonic()
        self._until = now + self._config.cluster.ready_timeout_s
        for rank in self.ranks:
            spec = self._spec_of(rank.name, self._resume)
            rank.host, rank.since = self._cluster.start(spec, self._log_of(rank.name)), now
        port = int(self.announce_to.rpartition(":")[2]) if self.announce_to else 0
        self.calls = {self.ranks[0].host.call.remote("bind", port): self.ranks[0].name}

    def bound(self, result: tuple[str, int, str]) -> None:
        """Rank 0 has bound its sockets: let all ranks join and load the model."""
        host, port, self.announce_to = result
        self.state = "setting up"
        self.calls = {r.host.call.remote("setup", host, port): r.name for r in self.ranks}

    def train(self, buffer: str) -> None:
        """All are set up: let them train."""
        self.state, self._ever_trained = "training", True
        self.calls = {r.host.call.remote("run", buffer): r.name for r in self.ranks}

    # --- what happens to them ----------------------------------------------------------------

    def ended(self, ref: Any, result: Callable[[], Any]) -> None:
        """A call of a rank has ended.

        Args:
            result: its result, or it raises what the rank failed with.

        Raises:
            AsyncRLError: what a restart would meet again.
        """
        name = self.calls.pop(ref)
        try:
            outcome = result()
        except RESTARTED as e:
            self._failed(e)
            return
        if self.state == "starting":
            self.bound(outcome)
        elif self.state == "setting up" and not self.calls:
            self.state = "ready"
        elif self.state == "training":
            self.done.add(name)
            if name == self.ranks[0].name:
                self.reason = outcome
            if self.done.issuperset(self.names):
                self.state = "done"

    def _failed(self, error: AsyncRLError) -> None:
        if self.state != "failing":
            self.state, self._until = "failing", time.monotonic() + OTHERS_S
        self._errors.append(error)

    def tick(self, step: int, silent: Callable[[Rank], bool], *, ending: bool) -> str:
        """Go on with what waits for its time; what to tell people, if anything.

        Args:
            step: the last batch that is trained.
            silent: whether a rank has said nothing for too long.
            ending: whether the run is to end: then nothing is restarted.

        Raises:
            RoleDiedError: they cannot be restarted.
            DeadlineError: restarted ones are not set up in time.
        """
        now = time.monotonic()
        if self.state == "training":
            for rank in self.ranks:
                if rank.name not in self.done and silent(rank):
                    self._cluster.kill_role(rank.name)
                    self._failed(RoleDiedError(f"{rank.name} stood still: no sign of life of it"))
        if self.state == "failing" and (now >= self._until or not self.calls):
            return self._decide(step, ending)
        if self.state == "backoff" and now >= self._until:
            self.restarts += 1
            self._tell("learner_restarted", restarts=self.restarts)
            self.start()
        elif self.state in ("starting", "setting up") and self.restarts and now >= self._until:
            limit = self._config.cluster.ready_timeout_s
            raise DeadlineError(
                f"the learner was not back within cluster.ready_timeout_s={limit:.0f}; see "
                f"{self._log_of(self.ranks[0].name)}"
            )
        return ""

    def _decide(self, step: int, ending: bool) -> str:
        """Restart all ranks, or raise what ended one of them."""
        errors, self._errors = self._errors, []
        # A rank that fails because another is gone says less than that one's end.
        error = min(errors, key=lambda e: type(e) is not RoleDiedError)
        broken = isinstance(error, RoleFailedError) and not self._ever_trained
        if ending or broken or self._config.checkpoint.every is None:
            raise error
        began = 0 if self._resume is None else self._resume.step
        self._failures = 1 if step > began else self._failures + 1
        limit = self._config.cluster.max_restarts
        if self._failures > limit:
            raise RoleDiedError(
                f"{error}; more than cluster.max_restarts={limit} times in a row without a batch"
            ) from error
        for rank in self.ranks:
            self._cluster.kill(rank.host)
            self._cluster.kill_role(rank.name)  # one that is stopped would keep rank 0's port
        self.calls.clear()
        self.done.clear()
        self._resume = self._go_back()
        wait = backoff_s(self._config.cluster.restart_backoff_s, self._failures, at_once=True)
        self.state, self._until = "backoff", time.monotonic() + wait
        why = str(error).splitlines()[0]
        self._tell(
            "learner_died", reason=why, restart_in_s=round(wait, 1), batch=self._resume.step,
            next_incarnation=self._resume.incarnation,
        )  # fmt: skip
        where = f"batch {self._resume.step}" if self._resume.checkpoint else "the initial model"
        return f"{why}; restarting from {where}, as incarnation {self._resume.incarnation}"
