"""The launcher: every role started, watched and ended.

    buffer ‖ learners ‖ actors start ► each actor produces as soon as it is set up
                                     ► learners train once all are, or a little later ► summary
       │                                   │
       waits: a role's set-up,             waits: a role ends or dies; Ctrl-C; stop.wall_s
       by cluster.ready_timeout_s          released by: the learner's last step

An actor that dies is restarted (`fleet`), the buffer too if it has a store (`buffer_slot`), all
ranks of the learner if there are checkpoints (`learners`); else the run ends with one message.
Ctrl-C asks the buffer to stop: no more leases, no more batches; the learner makes a checkpoint.
What does not end within DRAIN_S or DRAIN_CHECKPOINT_S is killed; a second one kills at once (130).
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checkpoints import ResumePoint
from asyncrl.errors import AsyncRLError, DeadlineError, RoleDiedError
from asyncrl.launch.crew import TICK_S, Crew
from asyncrl.launch.desk import Desk, last_stats
from asyncrl.launch.fleet import Slot
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.learners import Rank
from asyncrl.launch.placement import Placement, weights_text
from asyncrl.launch.relays import Relay
from asyncrl.launch.resume.lineage import Lineage
from asyncrl.launch.scaling import Scaling
from asyncrl.monitor.status_reader import resume_command
from asyncrl.roles import INTERRUPTED

DRAIN_S = 20.0
"""How long a stopping run may take before what is left is killed."""
DRAIN_CHECKPOINT_S = 120.0
"""The same, where the learner makes a last checkpoint; one that is being written is waited for."""
SILENT_S = 30.0
"""At the end of a run, an actor that sent no record for so long is not waited for."""
STUCK_S = 120.0
"""Before, it is ended and restarted after so long; its leases go to others much earlier."""


class Run:
    """One run's parts and its loop."""

    def __init__(
        self, desk: Desk, placement: Placement, model_path: str, scratch: str,
        interrupt: Interrupt, lineage: Lineage, resume: ResumePoint | None = None,
    ) -> None:  # fmt: skip
        self.desk, self.config, self.folder = desk, desk.config, desk.folder
        self.placement, self.interrupt = placement, interrupt
        self.crew = Crew(desk, placement, model_path, scratch, interrupt, lineage, resume)
        self.ended, self.reason = "failed", ""
        self._training = False
        self._drain_until = math.inf
        """After Ctrl-C: when what is left is killed (time.monotonic)."""
        self._told_to_stop = False
        self._looked = 0.0
        self._scaling: Scaling | None = None

    def go(self) -> int:
        """Set up, train, summarise; the exit code."""
        self.desk.view.say(f"run {self.folder.name}, files in {self.folder.path}")
        self.desk.view.say(f"weights: {weights_text(self.config, self.placement)}")
        self.desk.event(
            "launch", device=self.placement.device, weights=self.placement.weight_strategy,
            backend=self.placement.weight_backend, began_s=self.desk.board.lived_s,
        )  # fmt: skip
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
            if isinstance(e, RoleDiedError | DeadlineError) and (hint := self.how_to_go_on()):
                raise type(e)(f"{e}; {hint}") from e
            raise
        finally:
            self.interrupt.mute()
            code = self.summarise()
        return 130 if self.ended == "killed" else code

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
        relays = crew.relays.refs()
        calls = [*filter(None, [crew.buffer.ref]), *actors, *relays, *crew.learners.calls]
        with self.desk.shares.away("serve"):
            done, _ = ray.wait(calls, num_returns=1, timeout=TICK_S)
        for ref in done:
            if ref in actors:
                self.actor_ended(actors[ref], ref)
            elif ref in relays:
                self.relay_ended(relays[ref], ref)
            elif ref == crew.buffer.ref:
                self.buffer_ended(ref)
            else:
                self.learner_ended(ref)
        if crew.learners.state == "ready" and (self._training or crew.fleet.gathered):
            self._training = True
            crew.train()
        if told := crew.buffer.tick(self.desk.board.step):
            self.desk.view.say(told)
        if told := crew.learners.tick(
            self.desk.board.step, partial(self.silent, limit_s=STUCK_S),
            ending=bool(self.interrupt.count),
        ):  # fmt: skip
            self.desk.view.say(told)
        crew.fleet.tick(partial(self.silent, limit_s=STUCK_S))
        if self.trained:
            for slot in crew.fleet.end(partial(self.silent, limit_s=SILENT_S)):
                self.desk.view.say(f"not waited for, silent for {SILENT_S:.0f} s: {slot.name}")
        else:
            _, version = self.desk.board.position()
            crew.fleet.run_ready(crew.buffer.endpoint, crew.learners.announce_to, version)
            for told in crew.relays.tick(self.silent):
                self.desk.view.say(told)
        crew.show_roles()
        self.look_at_buffer()
        self.look_at_clock()
        self.desk.tell_evals()
        self.desk.look_for_troubles()
        self.desk.view.refresh()

    @property
    def trained(self) -> bool:
        """Whether learner rank 0 has trained to the end."""
        return "learner-0" in self.crew.learners.done

    def how_to_go_on(self) -> str:
        """How the run can be resumed, if it can be."""
        if self.config.checkpoint.every is None or self.ended == "finished":
            return ""
        return f"{resume_command(Path(self.folder.path))} goes on with it"

    @property
    def is_ending(self) -> bool:
        """Whether the end has been asked for, by anybody, or has come."""
        stats = self.desk.board.stats
        stopped = stats is not None and stats.state != "running"
        asked = self.interrupt.count or self.reason or self.trained
        return bool(stopped or asked)

    def late(self) -> list[str]:
        """Who must be set up before anything can be trained, and is not."""
        fleet = self.crew.fleet
        needed = not fleet.ever_ready and not self.trained
        actors = fleet.slots[: fleet.wanted]
        return self.crew.learners.late + [s.name for s in actors if needed]

    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        done = self.crew.learners.state == "done" and self.crew.fleet.over
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

    def relay_ended(self, slot: Relay, ref: Any) -> None:
        """A receiver of weights has ended; after the learner nobody needs it."""
        if self.trained:
            slot.ref = None
            return
        result = partial(self.crew.result_of, ref, slot.name)
        self.desk.view.say(self.crew.relays.ended(slot, result))

    def buffer_ended(self, ref: Any) -> None:
        """A call of the buffer has ended, well or not."""
        result = partial(self.crew.result_of, ref, "buffer-0")
        self.desk.view.say(self.crew.buffer.ended(result, self.desk.board.step))
        if self._scaling is not None:
            self._scaling.buffer_is_new()

    def learner_ended(self, ref: Any) -> None:
        """A call of a learner rank has ended, well or not."""
        learners, was = self.crew.learners, self.trained
        learners.ended(ref, partial(self.crew.result_of, ref, learners.calls[ref]))
        if self.trained and not was:
            self.reason = learners.reason
            if self.ended == INTERRUPTED:
                self._drain_until = time.monotonic() + DRAIN_S
            else:
                self.ended = "stopped" if self.reason else "finished"
            last = self.ended != INTERRUPTED and self.config.eval.at_end
            self.desk.phase("last evaluation" if last and self.config.eval.samples else "ending")

    def silent(self, slot: Slot | Relay | Rank, limit_s: float) -> bool:
        """Whether an actor, a receiver or a rank that runs has sent no record for so long."""
        view = self.desk.board.fleet.roles.get(slot.name)
        heard = slot.since if view is None or view.heard is None else max(view.heard, slot.since)
        return time.monotonic() - heard > limit_s

    def look_at_clock(self) -> None:
        """stop.wall_s: ask for the end once the time is up."""
        limit = self.config.stop.wall_s
        over = self.reason or self.trained
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
        if self._drain_until == math.inf:
            saves = self.config.checkpoint.every is not None and not self.trained
            self._drain_until = time.monotonic() + (DRAIN_CHECKPOINT_S if saves else DRAIN_S)
            self.desk.phase("stopping: a second Ctrl-C or SIGTERM kills at once")
            self.ended = INTERRUPTED
        serving = self.crew.buffer.state == "serving"
        if serving and not self._told_to_stop and self.crew.client is not None:
            with suppress(AsyncRLError):  # it may be down: the next look asks again
                self.crew.client.stop(INTERRUPTED)
                self._told_to_stop = True
        if self.crew.saves():
            self._drain_until = max(self._drain_until, time.monotonic() + DRAIN_S)
        if time.monotonic() > self._drain_until:
            self.desk.view.say("killed: what had not ended in time")
            return True
        # Else there is nothing to drain.
        return self.crew.learners.state not in ("training", "failing", "done")

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

    def summarise(self) -> int:
        """Write summary.json and say the last lines; the exit code (`Desk.summarise`)."""
        stats = None
        if self.crew.client is not None:
            try:
                _, version = self.desk.board.position()
                stats = last_stats(self.crew.client, version, self.desk.waits)
            except AsyncRLError as e:
                self.desk.view.say(f"the ledger's last counts are not to be had: {e}")
        return self.desk.summarise(stats, self.ended, self.reason, self.how_to_go_on())

    def close(self) -> None:
        """End Ray and every socket."""
        if self._scaling is not None:
            self._scaling.close()
        self.crew.close()
