"""The buffer as the launcher sees it: started, watched, restarted where that loses nothing.

    starting ──bound──► serving ──died, stuck──► back-off ──► starting, on the same port
                                          └────► the run ends: no store, or too often in a row

Its clients reconnect by themselves and send again what was not answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, RoleDiedError
from asyncrl.launch.backoff import backoff_s
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.processes.role_main import RoleSpec

NAME = "buffer-0"
STUCK_S = 120.0
"""It is ended, and restarted, when it has answered nobody for so long."""


class BufferSlot:
    """The buffer, through all its processes.

    Args:
        spec_of: what it is made from, given the port to bind (0: the system's choice).
        log: path of its log.
        tell: writes an event (name, fields).
    """

    def __init__(
        self, config: Config, cluster: Cluster, *, spec_of: Callable[[int], RoleSpec], log: str,
        tell: Callable[..., None],
    ) -> None:  # fmt: skip
        self._config, self._cluster = config, cluster
        self._spec_of, self._log, self._tell = spec_of, log, tell
        self.state: Literal["starting", "serving", "backoff"] = "starting"
        self.endpoint = ""
        self.host: Any = None
        self.ref: Any = None
        """The host's call that is under way."""
        self.heard = 0.0
        """When it last answered the launcher."""
        self.restarts = 0
        self._failures = 0  # in a row, without a batch in between
        self._failed_at_step = -1
        self._until = 0.0

    def start(self) -> None:
        """Start its process; `bind` follows."""
        port = int(self.endpoint.rpartition(":")[2]) if self.endpoint else 0
        self.host = self._cluster.start(self._spec_of(port), self._log)

    def bind(self) -> None:
        """Let it take its port, and what its store holds."""
        self.state, self.ref = "starting", self.host.call.remote("start")
        self._until = time.monotonic() + self._config.cluster.ready_timeout_s

    def serve(self, endpoint: str) -> None:
        """It is bound: let it answer."""
        self.endpoint = endpoint
        self.state, self.ref = "serving", self.host.call.remote("run")
        self.heard = time.monotonic()

    def ended(self, result: Callable[[], Any], step: int) -> str:
        """Its call has ended; what to tell people, in a line.

        Args:
            result: the call's result, or it raises what the buffer failed with.
            step: the last batch that is trained.

        Raises:
            RoleDiedError: it died and cannot be restarted.
            AsyncRLError: it failed for a reason that a restart would meet again.
        """
        try:
            outcome = result()
        except RoleDiedError as e:
            return self._died(e, step)
        if self.state == "serving":
            raise RoleDiedError(f"{NAME} ended early; see {self._log}")
        self.serve(outcome)
        self._tell("buffer_restarted", restarts=self.restarts)
        return f"{NAME} is back"

    def _died(self, error: RoleDiedError, step: int) -> str:
        limit, durability = self._config.cluster.max_restarts, self._config.buffer.durability
        if durability == "none":
            raise RoleDiedError(f"{error}; with buffer.durability=process it would be restarted")
        self._failures = 1 if step > self._failed_at_step else self._failures + 1
        self._failed_at_step = step
        if self._failures > limit:
            raise RoleDiedError(
                f"{error}; more than cluster.max_restarts={limit} times in a row"
            ) from error
        self._cluster.kill(self.host)
        self.host = self.ref = None
        wait = backoff_s(self._config.cluster.restart_backoff_s, self._failures, at_once=True)
        self.state, self._until = "backoff", time.monotonic() + wait
        why = str(error).splitlines()[0]
        self._tell("buffer_died", reason=why, restart_in_s=round(wait, 1))
        return f"{why}; restarting"

    def tick(self, step: int) -> str:
        """Restart it when its back-off is over, or when it is stuck; what to tell people, if so.

        Raises:
            RoleDiedError: it is stuck and cannot be restarted.
            DeadlineError: a restarted one is not back in time.
        """
        now = time.monotonic()
        if self.state == "serving":
            if now - self.heard < STUCK_S:
                return ""
            stuck = f"{NAME} stood still: no answer for {STUCK_S:.0f} s; see {self._log}"
            self._cluster.kill_role(NAME)  # or it would keep port and store
            return self._died(RoleDiedError(stuck), step)
        if now < self._until:
            return ""
        if self.state == "starting":
            raise DeadlineError(
                f"{NAME} was not back within cluster.ready_timeout_s="
                f"{self._config.cluster.ready_timeout_s:.0f}; see {self._log}"
            )
        self.restarts += 1
        self.start()
        self.bind()
        return ""
