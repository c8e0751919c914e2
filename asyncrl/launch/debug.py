"""`asyncrl launch --debug`: all roles in this process, without Ray; a debugger stops anywhere.

    main thread      learner rank 0 (the only one)
    thread "buffer"  its event loop
    thread "actor-R" its event loop; below it vLLM's own engine process
    thread "console" one line a step

Same roles, sockets, messages and configuration; the reward runs inline. While a breakpoint holds
one thread the others wait for it: every deadline is as good as off.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from asyncrl.buffer.client import BufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.desk import Desk, last_stats
from asyncrl.launch.placement import Placement
from asyncrl.launch.processes.role_main import ActorRole, BufferRole, LearnerRole, RoleSpec
from asyncrl.roles import INTERRUPTED, RoleSettings
from asyncrl.types import Version

PATIENCE_S = 86_400.0
"""What every deadline of a role becomes."""
END_S = 60.0
"""How long the actors may take to end after the learner."""


def for_debugging(config: Config, sources: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """The configuration as `--debug` runs it: one learner rank, and no deadline that matters.

    Args:
        sources: where each value comes from; returned with those that are changed here.

    Raises:
        ConfigError: it needs GPUs, which one process cannot share out.
    """
    if config.cluster.device == "cuda" or config.cluster.address is not None:
        raise ConfigError(
            "--debug runs all roles in one process on the CPU of this machine: "
            "set cluster.device=cpu and leave cluster.address out"
        )

    changes: dict[str, dict[str, Any]] = {
        "rollout": {"lease_timeout_s": PATIENCE_S},
        "weights": {"timeout_s": PATIENCE_S, "strategy": "broadcast"},
        "cluster": {
            "device": "cpu", "learners": 1, "silent_after_s": PATIENCE_S,
            "ready_timeout_s": PATIENCE_S,
        },
        "log": {"console": "plain"},
    }  # fmt: skip
    parts = {name: getattr(config, name).model_copy(update=c) for name, c in changes.items()}
    changed = {f"{part}.{name}": "--debug" for part, c in changes.items() for name in c}
    return config.model_copy(update=parts), {**sources, **changed}


class DebugRun:
    """One run in this process."""

    def __init__(self, desk: Desk, placement: Placement, model_path: str) -> None:
        self.desk, self.config = desk, desk.config
        self._placement, self._model_path = placement, model_path
        self.ended, self.reason = "failed", ""
        self._errors: list[BaseException] = []
        self._over = threading.Event()

    def go(self) -> int:
        """Set up, train in this thread, summarise; the exit code."""
        client = None
        threads: list[threading.Thread] = []
        try:
            # One after the other: libraries that import lazily do not bear several threads.
            actors = [self._set_up(rank) for rank in range(self.config.cluster.actors)]
            learner = LearnerRole(self._spec("learner", 0))
            buffer = BufferRole(self._spec("buffer", 0))
            endpoint = self._endpoint = buffer.start()
            self._thread("buffer", buffer.run)
            self._thread("console", self._refresh)
            client = BufferClient(
                endpoint, self.desk.run_id, "launcher", 0, timeout_s=PATIENCE_S,
                keys=self.desk.keys,
            )  # fmt: skip
            client.hello()
            host, port, fleet = learner.bind()
            learner.setup(host, port)
            for rank, actor in enumerate(actors):
                go = (endpoint, fleet, Version(0, 0), True)
                threads.append(self._thread(f"actor-{rank}", actor.run, *go))
            self.desk.training()
            self.reason = learner.run(endpoint)
            self.ended = "stopped" if self.reason else "finished"
        except KeyboardInterrupt:
            self.ended = "interrupted"
        finally:
            with contextlib.suppress(AsyncRLError):
                if client is not None and self.ended in ("interrupted", "failed"):
                    client.stop(INTERRUPTED, final=Version(0, self.desk.board.version))
            for thread in threads:
                thread.join(END_S)
            self._over.set()
            if self._errors:
                self.ended, self.reason = "failed", str(self._errors[0]).partition("\n")[0]
            stats = None
            with contextlib.suppress(AsyncRLError):
                if client is not None:
                    version = Version(0, self.desk.board.version)
                    stats = last_stats(client, version, self.desk.waits)
            code = self.desk.summarise(stats, self.ended, self.reason)
        if self._errors:
            raise self._errors[0]
        return code

    def _spec(self, role: Literal["buffer", "actor", "learner"], rank: int) -> RoleSpec:
        p, cluster = self._placement, self.config.cluster
        settings = RoleSettings(
            role=role, rank=rank, world=cluster.actors if role == "actor" else 1,
            model_path=self._model_path, device="cpu",
            threads=p.actor_threads if role == "actor" else p.learner_threads,
            weight_backend="gloo", run_id=self.desk.run_id,
            hub_endpoint=self.desk.hub.endpoint, run_dir=self.desk.folder.path,
            inline_reward=True, keys=self.desk.keys,
        )  # fmt: skip
        return RoleSpec(self.config, settings)

    def _set_up(self, rank: int) -> ActorRole:
        self.desk.phase(f"starting the engine of actor-{rank}")
        actor = ActorRole(self._spec("actor", rank))
        actor.setup()
        return actor

    def _refresh(self) -> None:
        while not self._over.wait(0.25):
            self.desk.view.refresh()
            self.desk.tell_evals()

    def _stop(self) -> None:
        """End the run, from any thread: a role is gone, and the learner would wait for it."""
        with contextlib.suppress(AsyncRLError):
            client = BufferClient(
                self._endpoint, self.desk.run_id, "launcher", 1, timeout_s=10.0,
                keys=self.desk.keys,
            )  # fmt: skip
            client.hello()
            client.stop(INTERRUPTED)
            client.close()

    def _thread(
        self, name: str, work: Callable[..., object], *arguments: object
    ) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as e:
                self._errors.append(e)
                self.desk.view.say(f"{name}: {type(e).__name__}: {e}")
                self._stop()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
