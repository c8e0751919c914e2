"""The launcher: every role started, watched and ended.

    buffer ► (actors ‖ learners) set up ► learners.run(ready actors) ‖ actors.run ► summary
                     │                              │
      waits: all ready, or ready_timeout_s          waits: all roles end; Ctrl-C; a death
      released by: each role's setup                released by: the learner's last step

A role's death ends the run with one message. Ctrl-C asks the buffer to stop: no more leases, no
more batches; what does not end within DRAIN_S is killed. A second Ctrl-C kills at once.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
import uuid
from contextlib import redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, TextIO

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, DeadlineError, RoleDiedError
from asyncrl.launch.board import Board
from asyncrl.launch.cluster import Cluster, Placement, place
from asyncrl.launch.console import ConsoleView, ledger_line
from asyncrl.launch.folder import RunFolder, last_words
from asyncrl.launch.hosts import ActorHost, BufferHost, LearnerHost
from asyncrl.launch.reaper import MARK, Guard, sweep
from asyncrl.metrics import Hub, JsonlSink
from asyncrl.protocols import MetricSink

DRAIN_S = 20.0
"""How long a stopping run may take before what is left is killed."""
TICK_S = 0.25


class Interrupt:
    """Counts SIGINT and SIGTERM; the launcher's loop looks at it every tick."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[int, Any] = {}
        self.install()

    def install(self) -> None:
        """Take the signals; once more after Ray has started, which takes SIGTERM for itself."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                old = signal.signal(number, self._handle)
                self._old.setdefault(number, old)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            signal.signal(number, old)


def launch(config: Config, *, config_text: str, preset: str, model_path: str) -> int:
    """Run to the end; the exit code (0 also after an orderly Ctrl-C).

    Args:
        config: checked by preflight.
        config_text: the resolved configuration, written to config.yaml.
        preset: name of the configuration, the start of the folder's default name.
        model_path: folder of the model.

    Raises:
        AsyncRLError: a role died, or nothing became ready in time.
    """
    placement = place(config)
    folder = RunFolder(config, preset)
    folder.create(config_text)
    run_id = f"{folder.name}-{uuid.uuid4().hex[:8]}"
    os.environ[MARK] = run_id
    guard, interrupt = Guard(run_id), Interrupt()
    run: Run | None = None
    view_file = sys.stdout
    # Ray writes its own remarks to both streams; they belong to a log, not between our lines.
    with (
        open(folder.log_of("launcher"), "a", encoding="utf-8") as log,
        redirect_stdout(log), redirect_stderr(log),
    ):  # fmt: skip
        try:
            run = Run(config, folder, placement, run_id, model_path, interrupt, view_file)
            return run.go()
        finally:
            if run is not None:
                run.close()
            sweep(run_id)
            guard.dismiss()
            os.environ.pop(MARK, None)
            interrupt.restore()


class Run:
    """One run's parts and its loop."""

    def __init__(
        self, config: Config, folder: RunFolder, placement: Placement, run_id: str,
        model_path: str, interrupt: Interrupt, view_file: TextIO,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.placement = config, folder, placement
        self.run_id, self.model_path, self.interrupt = run_id, model_path, interrupt
        self.board = Board(config)
        sinks: list[MetricSink] = [JsonlSink(folder.metrics, folder.events), self.board]
        if config.log.wandb != "off":
            from asyncrl.launch.wandb_sink import WandbSink

            sinks.append(WandbSink(config, folder))
        self.hub = Hub(sinks, run_id=run_id)
        self.view = ConsoleView(
            self.board, title=f"asyncrl · {folder.name}", mode=config.log.console, file=view_file
        )
        self.cluster: Cluster | None = None
        self.client: BufferClient | None = None
        self.names: dict[Any, str] = {}
        self.ended = "failed"
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
                self.ended = "interrupted"
        except BaseException as e:
            self.event("failed", error=type(e).__name__, message=str(e)[:2000])
            raise
        finally:
            self.summarise()
        return 0

    def set_up(self) -> tuple[list[tuple[Any, dict[str, Any]]], list[Any]]:
        """Start every role; the ready actors with what they announced, and the learners."""
        c, p, log_of = self.config, self.placement, self.folder.log_of
        self.phase("starting Ray")
        self.cluster = cluster = Cluster(c, p, self.run_id)
        self.interrupt.install()
        self.phase("starting the buffer")
        buffer = cluster.start(BufferHost, c, log_of("buffer-0"), self.run_id, self.hub.endpoint)
        endpoint = self.wait_one(buffer.start.remote(), "buffer-0", 60.0)
        self.names[buffer.run.remote()] = "buffer-0"
        self.client = BufferClient(endpoint, self.run_id, "launcher", 0)
        self.client.hello()
        learners = [
            cluster.start(
                LearnerHost, c, log_of(f"learner-{r}"), self.learner_settings(r, endpoint),
                gpus=p.learner_gpus,
            )
            for r in range(c.cluster.learners)
        ]  # fmt: skip
        actors = [
            cluster.start(
                ActorHost, c, log_of(f"actor-{r}"), self.actor_settings(r, endpoint),
                gpus=p.actor_gpus,
            )
            for r in range(c.cluster.actors)
        ]  # fmt: skip
        self.phase(
            f"starting {c.cluster.actors} engine(s) and {c.cluster.learners} learner rank(s)"
        )
        port = self.wait_one(learners[0].bind_store.remote(), "learner-0", 120.0)
        waiting = {h.setup.remote(port): (f"learner-{r}", h) for r, h in enumerate(learners)}
        waiting |= {h.setup.remote(): (f"actor-{r}", h) for r, h in enumerate(actors)}
        return self.wait_ready(waiting), learners

    def actor_settings(self, rank: int, endpoint: str) -> Any:
        """What actor `rank` is told."""
        from asyncrl.actors.worker import ActorSettings

        return ActorSettings(
            rank=rank, model_path=self.model_path, device=self.placement.device,
            threads=self.placement.actor_threads,
            weight_backend=self.placement.weight_backend,
            run_id=self.run_id, buffer_endpoint=endpoint, hub_endpoint=self.hub.endpoint,
            log_dir=self.folder.logs,
        )  # fmt: skip

    def learner_settings(self, rank: int, endpoint: str) -> Any:
        """What learner rank `rank` is told."""
        from asyncrl.learner.worker import LearnerSettings

        return LearnerSettings(
            rank=rank, world=self.config.cluster.learners, model_path=self.model_path,
            device=self.placement.device, threads=self.placement.learner_threads,
            weight_backend=self.placement.weight_backend,
            run_id=self.run_id, buffer_endpoint=endpoint, hub_endpoint=self.hub.endpoint,
            log_dir=self.folder.logs, run_dir=self.folder.path,
        )  # fmt: skip

    def wait_one(self, ref: Any, name: str, timeout_s: float) -> Any:
        """The result of one call, with a deadline."""
        import ray

        done, _ = ray.wait([ref], timeout=timeout_s)
        if not done:
            raise DeadlineError(
                f"launcher waited {timeout_s:.0f} s for {name} to start; "
                f"see {self.folder.log_of(name)}"
            )
        return self.result(ref, name)

    def wait_ready(self, waiting: dict[Any, tuple[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
        """Wait until all roles are set up, or the deadline has passed with one actor at least."""
        import ray

        deadline = time.monotonic() + self.config.cluster.ready_timeout_s
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
                self.phase(f"{total - len(waiting)} of {total} roles ready; waiting for {names}")
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
                if name == "learner-0" and outcome == "finished":
                    self.ended = "finished"
                    self.phase("last evaluation" if self.config.eval.samples else "ending")
            self.look_at_buffer()
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
        late = time.monotonic() - self._stopping_since > DRAIN_S
        if late or self.interrupt.count > 1:
            self.view.say(f"killed: {', '.join(sorted(running.values()))}")
            return True
        return False

    def look_at_buffer(self) -> None:
        """Refresh the board's view of the ledger, at most once a second."""
        now = time.monotonic()
        if now - getattr(self, "_looked", 0.0) > 1.0 and self.client is not None:
            self._looked = now
            self.board.stats = self.client.stats()

    def result(self, ref: Any, name: str) -> Any:
        """The result of a role's call.

        Raises:
            AsyncRLError: what the role raised, or RoleDiedError with its last words.
        """
        import ray

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
        if self.client is not None:
            try:
                stats = self.client.stats()
            except AsyncRLError as e:
                self.view.say(f"the ledger's last counts are not to be had: {e}")
        self.board.stats = stats or self.board.stats
        self.hub.close()
        self.view.close()
        self.folder.write_summary(summary_of(self.board, stats, self.ended, self.run_id))
        board = self.board
        for version, entry in sorted(board.evals.items()):
            self.view.say(
                f"eval of version {version}: {entry.score:.3f} on {entry.prompts} held out"
            )
        if board.rewards:
            self.view.say(
                f"{self.ended}: {board.step} steps, version {board.version}, "
                f"last reward {board.rewards[-1]:.3f}"
            )
        if stats is not None:
            self.view.say(ledger_line(stats.counts, stats.conserved))
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


def summary_of(board: Board, stats: wire.Stats | None, ended: str, run_id: str) -> dict[str, Any]:
    """The content of summary.json (DESIGN section 11)."""

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    trained_s = None
    if board.training_began is not None and board.last_step_at:
        trained_s = board.last_step_at - board.training_began
    return {
        "run_id": run_id,
        "ended": ended,
        "steps": board.step,
        "version": board.version,
        "ledger": stats.counts if stats else None,
        "conserved": stats.conserved if stats else None,
        "reward": {
            "first": board.rewards[0] if board.rewards else None,
            "final": board.rewards[-1] if board.rewards else None,
        },
        "eval": {str(v): {"score": e.score, "prompts": e.prompts}
                 for v, e in sorted(board.evals.items())},
        "staleness": {
            "limit": board.config.buffer.max_staleness,
            "head_mean": median(board.staleness_mean),
            "head_max": board.staleness_max if board.staleness_mean else None,
        },
        "samples_s": median(board.samples_s),
        "busy": board.busy_shares(),
        "first_step_s": board.first_step_s,
        "training_s": trained_s,
        "total_s": time.monotonic() - board.started,
    }  # fmt: skip
