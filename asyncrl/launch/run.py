"""The launcher: every role started, watched and ended.

    buffer ► (actors ‖ learners) set up ► learners.run(ready actors) ‖ actors.run ► summary
                     │                              │
      waits: all ready, or ready_timeout_s          waits: all roles end; Ctrl-C; a death
      released by: each role's setup                released by: the learner's last step

A role's death ends the run with one message. Ctrl-C asks the buffer to stop: no more leases, no
more batches; what does not end within DRAIN_S is killed. A second Ctrl-C kills at once (130).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Literal, TextIO

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, DeadlineError, RoleDiedError
from asyncrl.launch.board import Board
from asyncrl.launch.cluster import Cluster, Placement, launcher_address
from asyncrl.launch.console import ConsoleView
from asyncrl.launch.folder import RunFolder, last_words
from asyncrl.launch.hosts import ActorHost, BufferHost, LearnerHost
from asyncrl.launch.interrupt import Interrupt
from asyncrl.launch.summary import evaluation_line, last_lines, summary_of
from asyncrl.metrics import Hub, JsonlSink
from asyncrl.protocols import MetricSink
from asyncrl.roles import RoleSettings

DRAIN_S = 20.0
"""How long a stopping run may take before what is left is killed."""
TICK_S = 0.25
LAUNCHER_PATIENCE_S = 5.0
"""Deadline of the launcher's own questions to the buffer."""


class Run:
    """One run's parts and its loop."""

    def __init__(
        self, config: Config, folder: RunFolder, placement: Placement, run_id: str,
        model_path: str, scratch: str, interrupt: Interrupt, view_file: TextIO,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.placement = config, folder, placement
        self.run_id, self.model_path, self.scratch = run_id, model_path, scratch
        self.interrupt = interrupt
        self.board = Board(config)
        sinks: list[MetricSink] = [JsonlSink(folder.metrics, folder.events), self.board]
        if config.log.wandb != "off":
            from asyncrl.launch.wandb_sink import WandbSink

            sinks.append(WandbSink(config, folder))
        self.hub = Hub(sinks, run_id=run_id, host=launcher_address(config.cluster.address))
        self.view = ConsoleView(
            self.board, title=f"asyncrl · {folder.name}", mode=config.log.console, file=view_file
        )
        self.cluster: Cluster | None = None
        self.client: BufferClient | None = None
        self.names: dict[Any, str] = {}
        self.ended = "failed"
        self.buffer_gone = False
        self._stopping_since: float | None = None

    # --- start ---------------------------------------------------------------------------

    def go(self) -> int:
        """Set up, train, summarise; the exit code."""
        self.view.say(f"run {self.folder.name}, files in {self.folder.path}")
        self.event("launch", device=self.placement.device)
        try:
            actors, learners = self.set_up()
            if actors:
                self.train(actors, learners)
            else:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.ended = "killed" if self.interrupt.count > 1 else "interrupted"
            self.view.say(f"{self.ended} while {self.board.phase}")
        except Exception as e:
            self.event("failed", error=type(e).__name__, message=str(e)[:2000])
            raise
        finally:
            self.interrupt.mute()
            self.summarise()
        return 130 if self.ended == "killed" else 0

    def set_up(self) -> tuple[list[tuple[Any, dict[str, Any]]], list[Any]]:
        """Start every role; the ready actors with what they announced, and the learners."""
        c, p, log_of = self.config, self.placement, self.folder.log_of
        self.phase("starting Ray")
        self.cluster = cluster = Cluster(c, p, self.run_id, self.scratch)
        self.interrupt.install()
        self.phase("starting the buffer")
        buffer = cluster.start(BufferHost, c, log_of("buffer-0"), self.run_id, self.hub.endpoint)
        endpoint = self.wait_one(buffer.start.remote(), "buffer-0", 60.0)
        self.names[buffer.run.remote()] = "buffer-0"
        self.client = BufferClient(
            endpoint, self.run_id, "launcher", 0, timeout_s=LAUNCHER_PATIENCE_S
        )
        self.client.hello()
        learners = [
            cluster.start(
                LearnerHost, c, log_of(f"learner-{r}"), self.settings("learner", r, endpoint),
                gpus=p.learner_gpus,
            )
            for r in range(c.cluster.learners)
        ]  # fmt: skip
        actors = [
            cluster.start(
                ActorHost, c, log_of(f"actor-{r}"), self.settings("actor", r, endpoint),
                gpus=p.actor_gpus,
            )
            for r in range(c.cluster.actors)
        ]  # fmt: skip
        self.phase(
            f"starting {c.cluster.actors} engine(s) and {c.cluster.learners} learner rank(s)"
        )
        store = self.wait_one(learners[0].bind_store.remote(), "learner-0", 120.0)
        waiting = {h.setup.remote(*store): (f"learner-{r}", h) for r, h in enumerate(learners)}
        waiting |= {h.setup.remote(): (f"actor-{r}", h) for r, h in enumerate(actors)}
        return self.wait_ready(waiting), learners

    def settings(self, role: Literal["actor", "learner"], rank: int, buffer: str) -> RoleSettings:
        """What the process of `role` and `rank` is told."""
        p, cluster = self.placement, self.config.cluster
        actor = role == "actor"
        return RoleSettings(
            role=role, rank=rank, world=cluster.actors if actor else cluster.learners,
            model_path=self.model_path, device=p.device,
            threads=p.actor_threads if actor else p.learner_threads,
            weight_backend=p.weight_backend, run_id=self.run_id, buffer_endpoint=buffer,
            hub_endpoint=self.hub.endpoint, run_dir=self.folder.path,
        )  # fmt: skip

    def wait_one(self, ref: Any, name: str, timeout_s: float) -> Any:
        """The result of one call, with a deadline."""
        import ray

        deadline = time.monotonic() + timeout_s
        while not ray.wait([ref], timeout=TICK_S)[0]:
            if self.interrupt.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"launcher waited {timeout_s:.0f} s for {name} to start; "
                    f"see {self.folder.log_of(name)}"
                )
        return self.result(ref, name)

    def wait_ready(self, waiting: dict[Any, tuple[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
        """Wait until all roles are set up, or the deadline has passed with one actor at least."""
        import ray

        deadline = time.monotonic() + self.config.cluster.ready_timeout_s
        evaluate = self.config.eval.at_start and self.config.eval.samples
        first = f" (actors evaluate {evaluate} held-out prompts first)" if evaluate else ""
        total, ready = len(waiting), []
        while waiting:
            done, _ = ray.wait([*waiting, *self.names], num_returns=1, timeout=TICK_S)
            for ref in done:
                if ref in self.names:
                    self.result(ref, self.names[ref])  # the buffer ended: raises
                    raise RoleDiedError(f"{self.names[ref]} ended before training began")
                name, handle = waiting.pop(ref)
                announced = self.result(ref, name)
                if name.startswith("actor"):
                    ready.append((name, handle, announced))
            if waiting:
                names = ", ".join(n for n, _ in waiting.values())
                self.phase(
                    f"{total - len(waiting)} of {total} roles ready; waiting for {names}{first}"
                )
                self.tell_evals()
            if self.interrupt.count:
                return []
            if waiting and time.monotonic() > deadline:
                late = [n for n, _ in waiting.values()]
                if not ready or any(n.startswith("learner") for n in late):
                    raise DeadlineError(
                        f"cluster.ready_timeout_s={self.config.cluster.ready_timeout_s:.0f}: "
                        f"{', '.join(late)} not ready; see {self.folder.log_of(late[0])}"
                    )
                self.view.say(f"left out, not ready in time: {', '.join(late)}")
                for _, handle in waiting.values():
                    ray.kill(handle)
                break
        ready.sort(key=lambda item: int(item[0].split("-")[1]))
        return [(handle, announced | {"name": name}) for name, handle, announced in ready]

    # --- training ------------------------------------------------------------------------

    def train(self, actors: list[tuple[Any, dict[str, Any]]], learners: list[Any]) -> None:
        """Run until every role has ended.

        Raises:
            RoleDiedError: a role died although the run had not ended.
        """
        import ray

        self.phase("training")
        self.board.training_began = time.monotonic()
        self.event("training", actors=len(actors), learners=len(learners))
        announced = [a for _, a in actors]
        running = {h.run.remote(): str(a["name"]) for h, a in actors}
        running |= {h.run.remote(announced): f"learner-{r}" for r, h in enumerate(learners)}
        buffer = dict(self.names)
        while running:
            done, _ = ray.wait([*running, *buffer], num_returns=1, timeout=TICK_S)
            for ref in done:
                name = running.pop(ref, None) or buffer.pop(ref)
                outcome = self.result(ref, name)
                if name == "buffer-0":
                    raise RoleDiedError(f"buffer-0 ended early; see {self.folder.log_of(name)}")
                if name == "learner-0":
                    self.ended = "finished" if outcome == "finished" else "interrupted"
                    last = self.ended == "finished" and self.config.eval.at_end
                    self.phase("last evaluation" if last and self.config.eval.samples else "ending")
            self.look_at_buffer()
            self.tell_evals()
            self.view.refresh()
            if self.interrupt.count and self.drained(running):
                return

    def drained(self, running: dict[Any, str]) -> bool:
        """Ask for the end once; True when the rest must be killed."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self.phase("stopping: Ctrl-C again kills at once")
            self.ended = "interrupted"
            assert self.client is not None
            self.client.stop("interrupted")
        if time.monotonic() - self._stopping_since > DRAIN_S:
            self.view.say(f"killed: {', '.join(sorted(running.values()))}")
            return True
        return False

    def look_at_buffer(self) -> None:
        """Refresh the board's view of the ledger, at most once a second."""
        now = time.monotonic()
        if now - getattr(self, "_looked", 0.0) > 1.0 and self.client is not None:
            self._looked = now
            with suppress(DeadlineError):  # a buffer that died is told by the next ray.wait
                self.board.stats = self.client.stats()

    def tell_evals(self, at_end: bool = False) -> None:
        """Write `eval/<task>/score` once all actors' shares of a version are in."""
        task, n = self.config.task.kind, self.config.learner.batches_per_publication
        for version, evaluation in self.board.finished_evals(at_end):
            evaluation.told = True
            self.view.say(evaluation_line(version, evaluation))
            self.hub.write(
                wire.Record(
                    role="launcher", rank=0, version=version, incarnation=0,
                    step=min(version * n, self.config.run.steps),
                    metrics={
                        f"eval/{task}/score": evaluation.score,
                        f"eval/{task}/prompts": evaluation.prompts,
                    },
                )
            )  # fmt: skip

    def result(self, ref: Any, name: str) -> Any:
        """The result of a role's call.

        Raises:
            AsyncRLError: what the role raised, or RoleDiedError with its last words.
        """
        import ray

        self.buffer_gone = self.buffer_gone or (name == "buffer-0" and ref in self.names)
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as e:
            cause = e.cause if isinstance(e.cause, BaseException) else e
            log = self.folder.log_of(name)
            if isinstance(cause, AsyncRLError):
                raise type(cause)(f"{name}: {cause} (log: {log})") from None
            raise RoleDiedError(
                f"{name} failed: {type(cause).__name__}: {str(cause).strip()} (log: {log})"
            ) from None
        except ray.exceptions.RayActorError:
            log = self.folder.log_of(name)
            words = last_words(log) or "its log says nothing of why: killed, or out of memory?"
            raise RoleDiedError(f"{name} died: {words} (log: {log})") from None

    # --- end -----------------------------------------------------------------------------

    def summarise(self) -> None:
        """Write summary.json and say the last lines."""
        stats = None
        if self.client is not None and not self.buffer_gone:
            try:
                stats = self.client.stats()
            except AsyncRLError as e:
                self.view.say(f"the ledger's last counts are not to be had: {e}")
        self.board.stats = stats or self.board.stats
        self.hub.drain()
        self.tell_evals(at_end=True)
        self.hub.close()
        self.folder.write_summary(summary_of(self.board, stats, self.ended, self.run_id))
        self.view.close()
        for line in last_lines(self.board, stats, self.ended):
            self.view.say(line)
        self.view.say(f"files: {self.folder.path}")

    def close(self) -> None:
        """End Ray and every socket."""
        if self.client is not None:
            self.client.close()
        if self.cluster is not None:
            self.cluster.close()

    def phase(self, text: str) -> None:
        """What the run is doing now, for the console."""
        if text != self.board.phase:
            self.board.phase = text
            if self.view.mode == "plain":
                self.view.say(text)
        self.view.refresh()

    def event(self, what: str, **fields: object) -> None:
        """A line of events.jsonl."""
        self.hub.write(wire.Record(
            role="launcher", rank=0, step=self.board.step, version=self.board.version,
            incarnation=0, event={"event": what, **fields},
        ))  # fmt: skip
