"""The processes of a run as the launcher holds them: Ray, hosts, calls under way.

Ray ► hosts of buffer and learners ‖ Fleet (actors) ► buffer bound ► learners' set-up
waits for each by cluster.ready_timeout_s, or for Ctrl-C
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from asyncrl.buffer.client import BufferClient
from asyncrl.errors import AsyncRLError, DeadlineError
from asyncrl.launch.buffer_slot import BufferSlot
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.desk import Desk
from asyncrl.launch.fleet import Fleet
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.placement import Placement
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.launch.remote import result
from asyncrl.roles import RoleSettings

TICK_S = 0.25
LAUNCHER_PATIENCE_S = 5.0
"""Deadline of the launcher's own questions to the buffer."""


class Crew:
    """Starts every role; `fleet` has the actors, `calls` what the learners are doing."""

    cluster: Cluster
    fleet: Fleet
    buffer: BufferSlot
    announce_to: str
    """Where actors announce themselves: learner rank 0."""

    def __init__(
        self, desk: Desk, placement: Placement, model_path: str, scratch: str, interrupt: Interrupt
    ) -> None:
        self.desk, self.config, self.folder = desk, desk.config, desk.folder
        self._placement, self._model_path, self._scratch = placement, model_path, scratch
        self._interrupt = interrupt
        self.client: BufferClient | None = None
        self.hosts: dict[str, Any] = {}
        """Of the learners."""
        self.calls: dict[Any, str] = {}
        """The calls to them that are under way."""

    @property
    def learners(self) -> list[str]:
        """Names of the learner ranks."""
        return [f"learner-{rank}" for rank in range(self.config.cluster.learners)]

    def start(self) -> None:
        """Start every role's process and set-up, beside each other; the buffer answers."""
        self.desk.phase("starting Ray")
        began = time.monotonic()
        self.cluster = Cluster(self.config, self._placement, self.desk.run_id, self._scratch)
        self._interrupt.install()
        self.desk.startup("ray", began)
        self._start_hosts()
        self._start_buffer()

    def _start_hosts(self) -> None:
        """Every role's host, and the actors' set-up, which needs nobody else."""
        c = self.config.cluster
        self.desk.phase(f"starting {c.actors} actor(s) and {c.learners} learner rank(s)")
        self.buffer = BufferSlot(
            self.config, self.cluster, spec_of=partial(self.spec_of, "buffer-0"),
            log=self.folder.log_of("buffer-0"), tell=self.desk.event,
        )  # fmt: skip
        self.desk.board.fleet.update("buffer-0", state="starting")
        self.buffer.start()
        for name in self.learners:
            self.desk.board.fleet.update(name, state="starting")
            self.hosts[name] = self.cluster.start(self.spec_of(name), self.folder.log_of(name))
        self.placed(["buffer-0", *self.learners, *(f"actor-{r}" for r in range(c.actors))])
        self.fleet = Fleet(
            self.config, self.cluster, spec_of=lambda rank: self.spec_of(f"actor-{rank}"),
            log_of=self.folder.log_of, tell=self.desk.event, gone=self.actor_gone,
        )  # fmt: skip
        self.desk.hub.listen(self.fleet.write)
        self.fleet.start()

    def placed(self, names: Iterable[str]) -> None:
        """Tell in the events where these roles run."""
        for name in names:
            seat = self.cluster.seat(name)
            self.desk.event("placed", name=name, node=seat.node, on=seat.label, gpus=seat.gpus)

    def _start_buffer(self) -> None:
        """The buffer and the learners' rendezvous, which the set-up of the learners needs."""
        began = time.monotonic()
        self.wait_one(self.buffer.host.pid.remote(), "buffer-0")
        self.desk.startup("imports", began)
        began = time.monotonic()
        bound = self.hosts["learner-0"].call.remote("bind")
        self.buffer.bind()
        self.buffer.serve(self.wait_one(self.buffer.ref, "buffer-0"))
        self.client = BufferClient(
            self.buffer.endpoint, self.desk.run_id, "launcher", 0, timeout_s=LAUNCHER_PATIENCE_S,
            keys=self.desk.keys,
        )  # fmt: skip
        self.client.hello()
        self.desk.event("bound", name="buffer-0", endpoint=self.buffer.endpoint)
        host, port, self.announce_to = self.wait_one(bound, "learner-0")
        self.desk.startup("buffer", began)
        for name in self.learners:
            self.calls[self.hosts[name].call.remote("setup", host, port)] = name

    def spec_of(self, name: str, port: int = 0) -> RoleSpec:
        """What the role of this name is made from; the buffer has a port to bind."""
        p, cluster = self._placement, self.config.cluster
        role, _, rank = name.partition("-")
        seat = self.cluster.seat(name)
        worlds = {"actor": cluster.actors, "learner": cluster.learners}
        settings = RoleSettings(
            role=role, rank=int(rank), world=worlds.get(role, 1),  # type: ignore[arg-type]
            model_path=self._model_path, device="cpu" if role == "buffer" else p.device,
            threads=1 if role == "buffer" else seat.threads,
            weight_backend=p.weight_backend, run_id=self.desk.run_id,
            hub_endpoint=self.desk.hub.endpoint, run_dir=self.folder.path,
            visible_gpus=seat.visible_gpus, forked=p.device == "cpu",
            keys=self.desk.keys,
            port=port,
        )  # fmt: skip
        return RoleSpec(self.config, settings)

    def wait_one(self, ref: Any, name: str) -> Any:
        """The result of one call of the start, by cluster.ready_timeout_s."""
        import ray

        timeout = self.config.cluster.ready_timeout_s
        deadline = time.monotonic() + timeout
        with self.desk.waits.on(f"{name} to start", deadline_s=timeout):
            while not ray.wait([ref], timeout=TICK_S)[0]:
                self.desk.view.refresh()
                if self._interrupt.count:
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"launcher waited cluster.ready_timeout_s={timeout:.0f} s for {name} to "
                        f"start; see {self.folder.log_of(name)}"
                    )
        return self.result_of(ref, name)

    def train(self) -> None:
        """All learner ranks are set up: let them train."""
        self.desk.training()
        for name in self.learners:
            self.calls[self.hosts[name].call.remote("run", self.buffer.endpoint)] = name

    def actor_gone(self, name: str, why: str) -> None:
        """Give the leases of an actor whose process has ended to others."""
        # A buffer that is down hears of it from the actor's silence, or its successor's hello.
        if self.client is not None and self.buffer.state == "serving":
            with suppress(AsyncRLError):
                self.client.gone(name, why)

    def result_of(self, ref: Any, name: str) -> Any:
        """The result of a role's call, or what it failed with (`remote.result`)."""
        return result(ref, name, self.folder.log_of(name))

    def close(self) -> None:
        """End Ray and every socket."""
        if self.client is not None:
            self.client.close()
        if hasattr(self, "cluster"):
            self.cluster.close()
