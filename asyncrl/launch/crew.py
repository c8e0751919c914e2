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
from asyncrl.checkpoints import ResumePoint, list_checkpoints
from asyncrl.errors import AsyncRLError, DeadlineError
from asyncrl.launch.buffer_slot import BufferSlot
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.desk import Desk
from asyncrl.launch.fleet import Fleet
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.learners import Learners
from asyncrl.launch.placement import Placement
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.launch.relays import Relays
from asyncrl.launch.remote import result
from asyncrl.launch.resume.lineage import Lineage
from asyncrl.monitor.fleet_view import RoleState
from asyncrl.roles import RoleSettings

TICK_S = 0.25
WRITING = "the checkpoint of batch"
"""What a learner rank waits for meanwhile (learner/checkpointing/saver.py)."""
LAUNCHER_PATIENCE_S = 5.0
"""Deadline of the launcher's own questions to the buffer."""


class Crew:
    """Starts every role: `fleet` has the actors, `learners` the ranks.

    Args:
        lineage: where incarnations come from.
        resume: where the run goes on; None is its start.
    """

    cluster: Cluster
    fleet: Fleet
    learners: Learners
    relays: Relays
    buffer: BufferSlot

    def __init__(
        self, desk: Desk, placement: Placement, model_path: str, scratch: str,
        interrupt: Interrupt, lineage: Lineage, resume: ResumePoint | None,
    ) -> None:  # fmt: skip
        self.desk, self.config, self.folder = desk, desk.config, desk.folder
        self._placement, self._model_path, self._scratch = placement, model_path, scratch
        self._interrupt, self._lineage, self._resume = interrupt, lineage, resume
        self.client: BufferClient | None = None

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
            self.config, self.cluster,
            spec_of=partial(self.spec_of, "buffer-0", resume=self._resume),
            log=self.folder.log_of("buffer-0"), tell=self.desk.event,
        )  # fmt: skip
        self.desk.board.fleet.update("buffer-0", state="starting")
        self.buffer.start()
        self.learners = Learners(
            self.config, self.cluster, resume=self._resume,
            spec_of=lambda name, resume: self.spec_of(name, resume=resume),
            log_of=self.folder.log_of, tell=self.desk.event, go_back=self.go_back,
        )  # fmt: skip
        for name in self.learners.names:
            self.desk.board.fleet.update(name, state="starting")
        self.learners.start()
        self.placed(["buffer-0", *self.learners.names, *(f"actor-{r}" for r in range(c.actors))])
        self.fleet = Fleet(
            self.config, self.cluster, spec_of=lambda rank: self.spec_of(f"actor-{rank}"),
            log_of=self.folder.log_of, tell=self.desk.event, gone=self.actor_gone,
        )  # fmt: skip
        self.desk.hub.listen(self.fleet.write)
        for slot in self.fleet.slots:  # who goes on has been evaluated before
            slot.introduced = self._resume is not None and self._resume.step > 0
        self.fleet.start()

    def placed(self, names: Iterable[str]) -> None:
        """Tell in the events where these roles run."""
        for name in names:
            seat = self.cluster.seat(name)
            self.desk.event(
                "placed", name=name, node=seat.node, on=seat.label, gpus=seat.gpus,
                threads=seat.threads,
            )  # fmt: skip

    def _start_buffer(self) -> None:
        """The buffer and the learners' rendezvous, which the set-up of the learners needs."""
        began = time.monotonic()
        self.wait_one(self.buffer.host.pid.remote(), "buffer-0")
        self.desk.startup("imports", began)
        began = time.monotonic()
        self.buffer.bind()
        self.buffer.serve(self.wait_one(self.buffer.ref, "buffer-0"))
        self.client = BufferClient(
            self.buffer.endpoint, self.desk.run_id, "launcher", 0, timeout_s=LAUNCHER_PATIENCE_S,
            keys=self.desk.keys,
        )  # fmt: skip
        self.client.hello()
        self.desk.event("bound", name="buffer-0", endpoint=self.buffer.endpoint)
        (bound,) = self.learners.calls
        self.learners.bound(self.wait_one(bound, "learner-0"))
        self.relays = Relays(
            self.config, self.cluster, spec_of=lambda rank: self.spec_of(f"relay-{rank}"),
            log_of=self.folder.log_of, fleet=self.learners.announce_to, tell=self.desk.event,
            placed=self.placed,
        )  # fmt: skip
        self.desk.hub.listen(self.relays.write)
        self.desk.startup("buffer", began)

    def spec_of(self, name: str, port: int = 0, *, resume: ResumePoint | None = None) -> RoleSpec:
        """What the role of this name is made from; the buffer has a port to bind."""
        p, cluster = self._placement, self.config.cluster
        role, _, rank = name.partition("-")
        seat = self.cluster.seat(name)
        worlds = {"actor": cluster.actors, "learner": cluster.learners}
        settings = RoleSettings(
            role=role, rank=int(rank), world=worlds.get(role, 1),  # type: ignore[arg-type]
            model_path=self._model_path,
            device="cpu" if role in ("buffer", "relay") else p.device,
            threads=1 if role == "buffer" else seat.threads,
            weight_backend=p.weight_backend, run_id=self.desk.run_id,
            hub_endpoint=self.desk.hub.endpoint, run_dir=self.folder.path,
            visible_gpus=seat.visible_gpus, forked=p.device == "cpu",
            keys=self.desk.keys, relay=self.cluster.relay_of(name),
            port=port, resume=resume,
        )  # fmt: skip
        return RoleSpec(p.resolved(self.config), settings)

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
        if not self.learners.restarts:
            self.desk.training()
        self.learners.train(self.buffer.endpoint)

    def go_back(self) -> ResumePoint:
        """Where the learner's next incarnation begins; the buffer goes back there at once.

        Raises:
            CheckpointError: the checkpoint is damaged.
            LedgerError: the buffer has not kept what came after it.
        """
        checkpoint = self._lineage.newest(list_checkpoints(self.folder.path))
        point = self._lineage.goes_on(checkpoint)
        if self.client is not None and self.buffer.state == "serving":
            with suppress(DeadlineError):  # it is down: the learner will say it
                self.client.rewind(point.step, point.incarnation)
        self.desk.went_back(point)
        return point

    def actor_gone(self, name: str, why: str) -> None:
        """Give the leases of an actor whose process has ended to others."""
        # A buffer that is down hears of it from the actor's silence, or its successor's hello.
        if self.client is not None and self.buffer.state == "serving":
            with suppress(AsyncRLError):
                self.client.gone(name, why)

    def show_roles(self) -> None:
        """What the console and status.json say of each role."""
        view, buffer = self.desk.board.fleet, self.buffer
        if buffer.restarts or buffer.state == "backoff":
            state: RoleState = "alive" if buffer.state == "serving" else "restarting"
            view.update("buffer-0", state=state, restarts=buffer.restarts)
        for slot in self.fleet.slots:
            view.update(slot.name, state=slot.shown, restarts=slot.restarts)
        for relay in self.relays.slots:
            state = "alive" if relay.state == "running" else "restarting"
            view.update(relay.name, state=state, restarts=relay.restarts)
        learners = self.learners
        for rank in learners.ranks:
            if rank.name in learners.done:
                view.update(rank.name, state="finished", restarts=learners.restarts)
            elif learners.restarts or learners.state == "backoff":
                state = "alive" if learners.state == "training" else "restarting"
                view.update(rank.name, state=state, restarts=learners.restarts)

    def saves(self) -> bool:
        """Whether a checkpoint is being written; its deadline is the learner's."""
        roles, now = self.desk.board.fleet.roles, time.monotonic()
        ranks = [roles[name] for name in self.learners.names if name in roles]
        return any(w.what.startswith(WRITING) for rank in ranks for w in rank.open_waits(now))

    def result_of(self, ref: Any, name: str) -> Any:
        """The result of a role's call, or what it failed with (`remote.result`)."""
        return result(ref, name, self.folder.log_of(name))

    def close(self) -> None:
        """End Ray and every socket."""
        if self.client is not None:
            self.client.close()
        if hasattr(self, "cluster"):
            self.cluster.close()
