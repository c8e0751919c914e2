"""What runs inside Ray's worker processes: one host class a role. Light to import.

Each host first makes the process its own (log file, environment) and only then imports what
its role needs, so that thread counts and vLLM's settings are in force.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from dataclasses import replace
from typing import Any

from asyncrl.config.schema import Config


def own_process(log_path: str, env: dict[str, str]) -> None:
    """Send this process's output to `log_path` and set its environment."""
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    os.environ.update(env)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip


def role_env(threads: int, device: str) -> dict[str, str]:
    """Environment of a role: its threads, and no network for what lies on disk."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return env


def own_address(config: Config) -> str:
    """Where this process's sockets bind: loopback, or the node's address in a cluster."""
    if config.cluster.address is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


class BufferHost:
    """The buffer's process."""

    def __init__(self, config: Config, log_path: str, run_id: str, hub_endpoint: str) -> None:
        own_process(log_path, role_env(1, "cpu"))
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._config, self._run_id, self._hub_endpoint = config, run_id, hub_endpoint

    def start(self) -> str:
        """Bind; the endpoint."""
        from asyncrl import tasks
        from asyncrl.buffer.ledger import Ledger
        from asyncrl.buffer.server import BufferServer
        from asyncrl.metrics import HubClient

        c = self._config
        ledger = Ledger(
            prompts=tasks.make_prompts(c), group_size=c.rollout.group_size,
            groups_per_batch=c.groups_per_batch,
            batches_per_publication=c.learner.batches_per_publication,
            max_staleness=c.buffer.max_staleness, window=c.buffer.window,
            ranks=c.cluster.learners, lease_timeout_s=c.rollout.lease_timeout_s,
            max_attempts=c.rollout.max_attempts,
            filter_zero_variance=c.buffer.filter_zero_variance,
        )  # fmt: skip
        hub = HubClient(self._hub_endpoint, "buffer")
        self._server = BufferServer(ledger, run_id=self._run_id, host=own_address(c), emit=hub.emit)
        endpoint: str = self._loop.run_until_complete(self._server.start())
        return endpoint

    def run(self) -> None:
        """Serve until this process is ended."""
        self._loop.run_until_complete(self._server.run())


class ActorHost:
    """An actor's process (vLLM adds its own below it)."""

    def __init__(self, config: Config, log_path: str, settings: Any) -> None:
        own_process(log_path, role_env(settings.threads, settings.device))
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._config = config
        self._settings = replace(settings, host=own_address(config))

    def setup(self) -> dict[str, object]:
        """Start the engine; what the learner must know."""
        import asyncio

        from asyncrl.actors.worker import ActorWorker

        asyncio.set_event_loop(self._loop)
        self._worker = ActorWorker(self._config, self._settings)
        return self._loop.run_until_complete(self._worker.setup())

    def run(self) -> str:
        """Produce samples until the run is over."""
        self._loop.run_until_complete(self._worker.run())
        return "finished"


class LearnerHost:
    """A learner rank's process."""

    def __init__(self, config: Config, log_path: str, settings: Any) -> None:
        own_process(log_path, role_env(settings.threads, settings.device))
        from asyncrl.learner.worker import LearnerWorker

        self._host = own_address(config)
        self._worker = LearnerWorker(config, replace(settings, host=self._host))

    def bind_store(self) -> tuple[str, int]:
        """Rank 0: address and port of the ranks' rendezvous."""
        return self._host, self._worker.bind_store()

    def setup(self, store_host: str, store_port: int) -> dict[str, object]:
        """Join the ranks, load the model."""
        return self._worker.setup(store_host, store_port)

    def run(self, actors: list[dict[str, Any]]) -> str:
        """Train to the end. After a failure nothing is closed: the launcher ends the process,
        and closing could wait for peers that are gone before the failure is told."""
        ended = self._worker.run(actors)
        self._worker.close()
        return ended
