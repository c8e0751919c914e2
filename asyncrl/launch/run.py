"""The launcher: every role started, watched and ended.

    buffer ‖ learners ‖ actors start ► each actor produces as soon as it is set up
                                     ► learners train as soon as they are ► summary
       │                                   │
       waits: a role's set-up,             waits: a role ends or dies; Ctrl-C; stop.wall_s
       by cluster.ready_timeout_s          released by: the learner's last step

An actor that dies is restarted (`fleet`); the death of another role ends the run with one message.
Ctrl-C asks the buffer to stop: no more leases, no more batches; what does not end within DRAIN_S
is killed. A second Ctrl-C kills at once (130).
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from asyncrl.buffer.client import BufferClient
from asyncrl.errors import AsyncRLError, DeadlineError, RoleDiedError
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.desk import Desk, last_stats
from asyncrl.launch.fleet import Fleet, Slot
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.placement import Placement
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.launch.remote import result
from asyncrl.roles import INTERRUPTED, RoleSettings
from asyncrl.types import Version

DRAIN_S = 20.0
"""How long a stopping run may take before what is left is killed."""
TICK_S = 0.25
LAUNCHER_PATIENCE_S = 5.0
"""Deadline of the launcher's own questions to the buffer."""
SILENT_S = 30.0
"""At the end of a run, an actor that sent no record for so long is not waited for."""


class Run:
    """One run's parts and its loop."""

    def __init__(
        self, desk: Desk, placement: Placement, model_path: str, scratch: str, interrupt: Interrupt
    ) -> None:
        self.desk, self.config, self.folder = desk, desk.config, desk.folder
        self.placement, self.model_path, self.scratch = placement, model_path, scratch
        self.interrupt = interrupt
        self.cluster: Cluster | None = None
        self.fleet: Fleet | None = None
        self.client: BufferClient | None = None
        self.hosts: dict[str, Any] = {}
        """Of the buffer and the learners."""
        self.calls: dict[Any, str] = {}
        """The calls to them that are under way."""
        self.ended, self.reason = "failed", ""
        self._done: set[str] = set()
        self._stopping_since: float | None = None
        self._looked = 0.0

    def go(self) -> int:
        """Set up, train, summarise; the exit code."""
        self.desk.view.say(f"run {self.folder.name}, files in {self.folder.path}")
        self.desk.event("launch", device=self.placement.device)
        try:
            self.start()
            self.watch()
        except KeyboardInterrupt:
            self.ended = "killed" if self.interrupt.count > 1 else "interrupted"
            self.desk.view.say(f"{self.ended} while {self.desk.board.phase}")
        except Exception as e:
            self.desk.event("failed", error=type(e).__name__, message=str(e)[:2000])
            raise
        finally:
            self.interrupt.mute()
            self.summarise()
        return 130 if self.ended == "killed" else 0

    # --- start ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start every role's process and set-up, beside each other; the buffer answers."""
        c = self.config
        self.desk.phase("starting Ray")
        began = time.monotonic()
        self.cluster = Cluster(c, self.placement, self.desk.run_id, self.scratch)
        self.interrupt.install()
        self.desk.startup("ray", began)
        began = time.monotonic()
        self.desk.phase(
            f"starting {c.cluster.actors} actor(s) and {c.cluster.learners} learner rank(s)"
        )
        names = ["buffer-0", *(f"learner-{r}" for r in range(c.cluster.learners))]
        for name in names:
            self.desk.board.fleet.update(name, state="starting")
            self.hosts[name] = self.cluster.start(self.spec_of(name), self.folder.log_of(name))
        for name in [*names, *(f"actor-{r}" for r in range(c.cluster.actors))]:
            seat = self.cluster.seat(name)
            self.desk.event("placed", name=name, node=seat.node, on=seat.label, gpus=seat.gpus)
        self.fleet = Fleet(
            c, self.cluster, spec_of=lambda rank: self.spec_of(f"actor-{rank}"),
            log_of=self.folder.log_of, tell=self.desk.event, gone=self.actor_gone,
        )  # fmt: skip
        self.desk.hub.add(self.fleet)
        self.fleet.start()
        self.wait_one(self.hosts["buffer-0"].pid.remote(), "buffer-0")
        self.desk.startup("imports", began)
        began = time.monotonic()
        bound = self.hosts["learner-0"].call.remote("bind")
        start = self.hosts["buffer-0"].call.remote("start")
        self.buffer = self.wait_one(start, "buffer-0")
        self.calls[self.hosts["buffer-0"].call.remote("run")] = "buffer-0"
        self.client = BufferClient(
            self.buffer, self.desk.run_id, "launcher", 0, timeout_s=LAUNCHER_PATIENCE_S
        )
        self.client.hello()
        host, port, self.announce_to = self.wait_one(bound, "learner-0")
        self.desk.startup("buffer", began)
        for name in names[1:]:
            self.calls[self.hosts[name].call.remote("setup", host, port)] = name

    def spec_of(self, name: str) -> RoleSpec:
        """What the role of this name is made from."""
        p, cluster = self.placement, self.config.cluster
        role, _, rank = name.partition("-")
        assert self.cluster is not None
        seat = self.cluster.seat(name)
        worlds = {"actor": cluster.actors, "learner": cluster.learners}
        settings = RoleSettings(
            role=role, rank=int(rank), world=worlds.get(role, 1),  # type: ignore[arg-type]
            model_path=self.model_path, device="cpu" if role == "buffer" else p.device,
            threads=1 if role == "buffer" else seat.threads,
            weight_backend=p.weight_backend, run_id=self.desk.run_id,
            hub_endpoint=self.desk.hub.endpoint, run_dir=self.folder.path,
            visible_gpus=seat.visible_gpus, forked=p.device == "cpu",
        )  # fmt: skip
        return RoleSpec(self.config, settings)

    def wait_one(self, ref: Any, name: str) -> Any:
        """The result of one call of the start, by cluster.ready_timeout_s."""
        import ray

        timeout = self.config.cluster.ready_timeout_s
        deadline = time.monotonic() + timeout
        with self.desk.waits.on(f"{name} to start", owner=name, deadline_s=timeout):
            while not ray.wait([ref], timeout=TICK_S)[0]:
                self.desk.view.refresh()
                if self.interrupt.count:
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"launcher waited cluster.ready_timeout_s={timeout:.0f} s for {name} to "
                        f"start; see {self.folder.log_of(name)}"
                    )
        return self.result_of(ref, name)

    # --- the loop ------------------------------------------------------------------------

    def watch(self) -> None:
        """Run until every role has ended.

        Raises:
            RoleDiedError: the buffer or a learner died, or no actor is left.
            DeadlineError: no actor or a learner was not set up in time.
        """
        import ray

        assert self.fleet is not None
        ready_by = time.monotonic() + self.config.cluster.ready_timeout_s
        self.to_set_up = {n for n in self.hosts if n != "buffer-0"}
        while not self.over():
            actors = self.fleet.refs()
            done, _ = ray.wait([*actors, *self.calls], num_returns=1, timeout=TICK_S)
            for ref in done:
                if ref in actors:
                    self.actor_ended(actors[ref], ref)
                else:
                    self.role_ended(ref)
            self.fleet.tick()
            self.show_roles()
            self.fleet.run_ready(self.buffer, self.announce_to, Version(0, self.desk.board.version))
            self.check_ready(ready_by)
            self.look_at_buffer()
            self.look_at_clock()
            self.desk.tell_evals()
            self.desk.view.refresh()
            if self.interrupt.count and self.drained():
                return

    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        assert self.fleet is not None
        learners = {n for n in self.hosts if n.startswith("learner")}
        return learners <= self._done and self.fleet.over

    def actor_ended(self, slot: Slot, ref: Any) -> None:
        """A call of an actor has ended, well or not."""
        assert self.fleet is not None
        was = slot.state
        self.fleet.ended(slot, partial(self.result_of, ref, slot.name))
        if slot.why and slot.state in ("backoff", "gone"):
            again = {"backoff": "restarting", "gone": "not restarted"}[slot.state]
            self.desk.view.say(f"{slot.name} ended while {was}: {slot.why}; {again}")

    def role_ended(self, ref: Any) -> None:
        """A call of the buffer or a learner has ended."""
        assert self.fleet is not None
        name = self.calls.pop(ref)
        outcome = self.result_of(ref, name)
        if name == "buffer-0":
            raise RoleDiedError(f"buffer-0 ended early; see {self.folder.log_of(name)}")
        if name in self.to_set_up:
            self.to_set_up.discard(name)
            if not self.to_set_up:
                self.train()
            return
        self._done.add(name)
        if name == "learner-0":
            self.reason = outcome
            if self.ended != "interrupted":
                self.ended = "stopped" if outcome else "finished"
            last = self.ended != "interrupted" and self.config.eval.at_end
            self.desk.phase("last evaluation" if last and self.config.eval.samples else "ending")

    def train(self) -> None:
        """All learner ranks are set up."""
        self.desk.training()
        for name, host in self.hosts.items():
            if name != "buffer-0":
                self.calls[host.call.remote("run", self.buffer)] = name

    def show_roles(self) -> None:
        """What the console and status.json say of each role."""
        assert self.fleet is not None
        view = self.desk.board.fleet
        for slot in self.fleet.slots:
            view.update(slot.name, state=slot.shown, restarts=slot.restarts)
        for name in self._done:
            view.update(name, state="finished")

    def check_ready(self, ready_by: float) -> None:
        """Say who is not set up yet; give up past the deadline."""
        assert self.fleet is not None
        late = sorted(self.to_set_up)
        late += [] if self.fleet.ever_ready else [s.name for s in self.fleet.slots]
        if not late:
            if "learner-0" in self._done:
                for slot in self.fleet.end(self.silent):
                    self.desk.view.say(f"not waited for, silent for {SILENT_S:.0f} s: {slot.name}")
            return
        if time.monotonic() > ready_by:
            raise DeadlineError(
                f"cluster.ready_timeout_s={self.config.cluster.ready_timeout_s:.0f}: "
                f"{', '.join(late)} not ready; see {self.folder.log_of(late[0])}"
            )

    def silent(self, slot: Slot) -> bool:
        """Whether an actor has sent no record for SILENT_S."""
        view = self.desk.board.fleet.roles.get(slot.name)
        return view is None or view.heard is None or time.monotonic() - view.heard > SILENT_S

    def look_at_clock(self) -> None:
        """stop.wall_s: ask for the end once the time is up."""
        limit = self.config.stop.wall_s
        if limit is None or self.reason or time.monotonic() - self.desk.board.started < limit:
            return
        if self.client is not None:
            reason = f"stop.wall_s={limit:g} reached"
            with suppress(DeadlineError):  # the next look asks again
                self.client.stop(reason, evaluate=True)
                self.reason = reason

    def drained(self) -> bool:
        """Ask for the end once; True when the rest must be killed."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self.desk.phase("stopping: Ctrl-C again kills at once")
            self.ended = "interrupted"
            assert self.client is not None
            self.client.stop(INTERRUPTED)
        if time.monotonic() - self._stopping_since > DRAIN_S:
            self.desk.view.say("killed: what had not ended in time")
            return True
        return self.to_set_up != set()  # nothing trains yet: there is nothing to drain

    def actor_gone(self, name: str, why: str) -> None:
        """Give the leases of an actor whose process has ended to others."""
        if self.client is not None:
            with suppress(DeadlineError):
                self.client.gone(name, why)

    def look_at_buffer(self) -> None:
        """Refresh the board's view of the ledger, at most once a second."""
        now = time.monotonic()
        if now - self._looked > 1.0 and self.client is not None:
            self._looked = now
            with suppress(DeadlineError):  # a buffer that died is told by the next ray.wait
                self.desk.board.stats = self.client.stats()

    def result_of(self, ref: Any, name: str) -> Any:
        """The result of a role's call, or what it failed with (`remote.result`)."""
        return result(ref, name, self.folder.log_of(name))

    # --- end -----------------------------------------------------------------------------

    def summarise(self) -> None:
        """Write summary.json and say the last lines."""
        stats = None
        if self.client is not None:
            try:
                stats = last_stats(self.client, Version(0, self.desk.board.version))
            except AsyncRLError as e:
                self.desk.view.say(f"the ledger's last counts are not to be had: {e}")
        self.desk.summarise(stats, self.ended, self.reason)

    def close(self) -> None:
        """End Ray and every socket."""
        if self.client is not None:
            self.client.close()
        if self.cluster is not None:
            self.cluster.close()
