"""The launcher: every role started, watched and ended.

    buffer ‖ learners ‖ actors start ► each actor produces as soon as it is set up
                                     ► learners train once all are, or a little later ► summary
       │                                   │
       waits: a role's set-up,             waits: a role ends or dies; Ctrl-C; stop.wall_s
       by cluster.ready_timeout_s          released by: the learner's last step

An actor that dies is restarted (`fleet`), the buffer too if it has a store (`buffer_slot`); the
death of a learner ends the run with one message.
Ctrl-C asks the buffer to stop: no more leases, no more batches; what does not end within DRAIN_S
is killed. A second Ctrl-C kills at once (130).
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from asyncrl.errors import AsyncRLError, DeadlineError
from asyncrl.launch.crew import TICK_S, Crew
from asyncrl.launch.desk import Desk, last_stats
from asyncrl.launch.fleet import Slot
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.placement import Placement
from asyncrl.launch.scaling import Scaling
from asyncrl.monitor.fleet_view import RoleState
from asyncrl.roles import INTERRUPTED
from asyncrl.types import Version

DRAIN_S = 20.0
"""How long a stopping run may take before what is left is killed."""
SILENT_S = 30.0
"""At the end of a run, an actor that sent no record for so long is not waited for."""
STUCK_S = 120.0
"""Before, it is ended and restarted after so long; its leases go to others much earlier."""


class Run:
    """One run's parts and its loop."""

    def __init__(
        self, desk: Desk, placement: Placement, model_path: str, scratch: str, interrupt: Interrupt
    ) -> None:
        self.desk, self.config, self.folder = desk, desk.config, desk.folder
        self.placement, self.interrupt = placement, interrupt
        self.crew = Crew(desk, placement, model_path, scratch, interrupt)
        self.to_set_up = set(self.crew.learners)
        self.ended, self.reason = "failed", ""
        self._done: set[str] = set()
        self._training = False
        self._stopping_since: float | None = None
        self._told_to_stop = False
        self._looked = 0.0
        self._scaling: Scaling | None = None

    def go(self) -> int:
        """Set up, train, summarise; the exit code."""
        self.desk.view.say(f"run {self.folder.name}, files in {self.folder.path}")
        self.desk.event("launch", device=self.placement.device)
        try:
            self.crew.start()
            self._scaling = Scaling(self.crew, self.desk)
            self.watch()
        except KeyboardInterrupt:
            self.ended = "killed" if self.interrupt.count > 1 else "interrupted"
            self.desk.view.say(f"{self.ended} while {self.desk.board.phase}")
        except Exception as e:
            self.desk.event("failed", error=type(e).__name__, message=str(e)[:2000])
            self.ended, self.reason = "failed", str(e).partition("\n")[0][:500]
            raise
        finally:
            self.interrupt.mute()
            self.summarise()
        return 130 if self.ended == "killed" else 0

    # --- the loop ------------------------------------------------------------------------

    def watch(self) -> None:
        """Run until every role has ended.

        Raises:
            RoleDiedError: a learner or a buffer without a store died, or no actor is left.
            DeadlineError: no actor or a learner was not set up in time.
        """
        timeout = self.config.cluster.ready_timeout_s
        ready_by = time.monotonic() + timeout
        with self.desk.waits.on("roles to be set up", lambda: ", ".join(self.late()), timeout):
            while self.late() and not self.ending():
                self.turn()
                if self.late() and time.monotonic() > ready_by:
                    raise DeadlineError(
                        f"cluster.ready_timeout_s={timeout:.0f}: {', '.join(self.late())} not "
                        f"ready; see {self.folder.log_of(self.late()[0])}"
                    )
        while not self.over() and not self.ending():
            self.turn()

    def turn(self) -> None:
        """One look at everything; waits for a role at most TICK_S."""
        import ray

        crew = self.crew
        if self._scaling is not None:
            self._scaling.look(ending=self.is_ending)
        actors = crew.fleet.refs()
        # The buffer first: all others wait for it.
        calls = [*filter(None, [crew.buffer.ref]), *actors, *crew.calls]
        done, _ = ray.wait(calls, num_returns=1, timeout=TICK_S)
        for ref in done:
            if ref in actors:
                self.actor_ended(actors[ref], ref)
            elif ref == crew.buffer.ref:
                self.buffer_ended(ref)
            else:
                self.role_ended(ref)
        if not self._training and not self.to_set_up and crew.fleet.gathered:
            self._training = True
            crew.train()
        if told := crew.buffer.tick(self.desk.board.step):
            self.desk.view.say(told)
        crew.fleet.tick(partial(self.silent, limit_s=STUCK_S))
        if "learner-0" in self._done:
            for slot in crew.fleet.end(partial(self.silent, limit_s=SILENT_S)):
                self.desk.view.say(f"not waited for, silent for {SILENT_S:.0f} s: {slot.name}")
        else:
            version = Version(0, self.desk.board.version)
            crew.fleet.run_ready(crew.buffer.endpoint, crew.announce_to, version)
        self.show_roles()
        self.look_at_buffer()
        self.look_at_clock()
        self.desk.tell_evals()
        self.desk.view.refresh()

    @property
    def is_ending(self) -> bool:
        """Whether the end has been asked for, by anybody, or has come."""
        stats = self.desk.board.stats
        stopped = stats is not None and stats.state != "running"
        asked = self.interrupt.count or self.reason or "learner-0" in self._done
        return bool(stopped or asked)

    def late(self) -> list[str]:
        """Who must be set up before anything can be trained, and is not."""
        fleet = self.crew.fleet
        needed = not fleet.ever_ready and "learner-0" not in self._done
        actors = fleet.slots[: fleet.wanted]
        return sorted(self.to_set_up) + [s.name for s in actors if needed]

    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        done = self._done.issuperset(self.crew.learners) and self.crew.fleet.over
        return done and self.crew.buffer.state == "serving"  # it has the last counts

    def actor_ended(self, slot: Slot, ref: Any) -> None:
        """A call of an actor has ended, well or not."""
        was = slot.state
        self.crew.fleet.ended(slot, partial(self.crew.result_of, ref, slot.name))
        if slot.state == "ready" and slot.restarts:
            self.desk.view.say(f"{slot.name} is back")
        if slot.why and slot.state in ("backoff", "gone"):
            left = len(self.crew.fleet.in_state("starting", "ready", "running", "backoff"))
            then = "restarting" if slot.state == "backoff" else f"given up, {left} actors go on"
            self.desk.view.say(f"{slot.name}, {was}: {slot.why}; {then}")

    def buffer_ended(self, ref: Any) -> None:
        """A call of the buffer has ended, well or not."""
        result = partial(self.crew.result_of, ref, "buffer-0")
        self.desk.view.say(self.crew.buffer.ended(result, self.desk.board.step))
        if self._scaling is not None:
            self._scaling.buffer_is_new()

    def role_ended(self, ref: Any) -> None:
        """A call of a learner has ended."""
        name = self.crew.calls.pop(ref)
        outcome = self.crew.result_of(ref, name)
        if name in self.to_set_up:
            self.to_set_up.discard(name)
            return
        self._done.add(name)
        if name == "learner-0":
            self.reason = outcome
            if self.ended != INTERRUPTED:
                self.ended = "stopped" if outcome else "finished"
            last = self.ended != INTERRUPTED and self.config.eval.at_end
            self.desk.phase("last evaluation" if last and self.config.eval.samples else "ending")

    def show_roles(self) -> None:
        """What the console and status.json say of each role."""
        view, buffer = self.desk.board.fleet, self.crew.buffer
        if buffer.restarts or buffer.state == "backoff":
            state: RoleState = "alive" if buffer.state == "serving" else "restarting"
            view.update("buffer-0", state=state, restarts=buffer.restarts)
        for slot in self.crew.fleet.slots:
            view.update(slot.name, state=slot.shown, restarts=slot.restarts)
        for name in self._done:
            view.update(name, state="finished")

    def silent(self, slot: Slot, limit_s: float) -> bool:
        """Whether an actor that runs has sent no record for so long."""
        view = self.desk.board.fleet.roles.get(slot.name)
        heard = slot.since if view is None or view.heard is None else max(view.heard, slot.since)
        return time.monotonic() - heard > limit_s

    def look_at_clock(self) -> None:
        """stop.wall_s: ask for the end once the time is up."""
        limit = self.config.stop.wall_s
        over = self.reason or "learner-0" in self._done
        if limit is None or over or time.monotonic() - self.desk.board.started < limit:
            return
        if self.crew.client is not None:
            reason = f"stop.wall_s={limit:g} reached"
            with suppress(DeadlineError):  # the next look asks again
                self.crew.client.stop(reason, evaluate=True)
                self.reason = reason

    def ending(self) -> bool:
        """After Ctrl-C: ask for the end, once; True when what is left must be killed."""
        if not self.interrupt.count:
            return False
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self.desk.phase("stopping: Ctrl-C again kills at once")
            self.ended = INTERRUPTED
        serving = self.crew.buffer.state == "serving"
        if serving and not self._told_to_stop and self.crew.client is not None:
            with suppress(AsyncRLError):  # it may be down: the next look asks again
                self.crew.client.stop(INTERRUPTED)
                self._told_to_stop = True
        if time.monotonic() - self._stopping_since > DRAIN_S:
            self.desk.view.say("killed: what had not ended in time")
            return True
        return not self._training  # there is nothing to drain

    def look_at_buffer(self) -> None:
        """Refresh the board's view of the ledger, at most once a second."""
        now = time.monotonic()
        serving = self.crew.buffer.state == "serving"
        if serving and now - self._looked > 1.0 and self.crew.client is not None:
            self._looked = now
            self.crew.cluster.check()
            with suppress(DeadlineError):  # a buffer that died is told by the next ray.wait
                self.desk.board.stats = self.crew.client.stats()
                self.crew.buffer.heard = time.monotonic()

    # --- end -----------------------------------------------------------------------------

    def summarise(self) -> None:
        """Write summary.json and say the last lines."""
        stats = None
        if self.crew.client is not None:
            try:
                version = Version(0, self.desk.board.version)
                stats = last_stats(self.crew.client, version, self.desk.waits)
            except AsyncRLError as e:
                self.desk.view.say(f"the ledger's last counts are not to be had: {e}")
        self.desk.summarise(stats, self.ended, self.reason)

    def close(self) -> None:
        """End Ray and every socket."""
        if self._scaling is not None:
            self._scaling.close()
        self.crew.close()
