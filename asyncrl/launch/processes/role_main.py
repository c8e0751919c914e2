"""What runs in a role's process: one class a role, and the loop that serves its host's calls.

    host ──(method, arguments)──► serve ──► BufferRole | ActorRole | LearnerRole | RelayRole
         ◄──(result or error)────

Each role is imported only after its process has its own log and environment. With `--debug` the
same classes live in one process, without hosts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.schema import Config
from asyncrl.config.sizes import buffer_limit, sample_bytes
from asyncrl.disk import log_stream
from asyncrl.errors import AsyncRLError
from asyncrl.logs import write_to
from asyncrl.roles import RoleSettings, end_with, name_process
from asyncrl.types import Version

if TYPE_CHECKING:
    from asyncrl.buffer.trajectories import TrajectoryWriter
    from asyncrl.launch.processes.start import Start


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What a role is made from."""

    config: Config
    settings: RoleSettings


class BufferRole:
    """The buffer."""

    def __init__(self, spec: RoleSpec) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._config, self._settings = spec.config, spec.settings

    def start(self) -> str:
        """Bind; the endpoint."""
        from asyncrl import tasks
        from asyncrl.buffer.durable import open_ledger
        from asyncrl.buffer.resuming import resume_ledger
        from asyncrl.buffer.server import BufferServer
        from asyncrl.hub import HubClient
        from asyncrl.metrics import TimeShares, process_began
        from asyncrl.pulse import Pulse
        from asyncrl.waits import Waits

        c, s = self._config, self._settings
        shares = TimeShares(since=process_began())
        limit = buffer_limit(c)
        record = c.record.trajectories
        opening = partial(open_ledger, prompts=tasks.make_prompts(c))
        if s.resume is not None:
            opening = partial(
                resume_ledger, resume=s.resume, make_prompts=lambda: tasks.make_prompts(c)
            )
        ledger, keeper = opening(
            Path(s.run_dir, "buffer"), durability=c.buffer.durability, run_id=s.run_id,
            memory_bytes=int(c.buffer.memory_gib * 2**30),
            store_bytes=int(c.buffer.store_gib * 2**30), recorded=record,
            goes_on=s.port != 0, retain=c.checkpoint.every is not None,
            group_size=c.rollout.group_size, groups_per_batch=c.groups_per_batch,
            batches_per_publication=c.learner.batches_per_publication,
            max_staleness=c.buffer.max_staleness, window=c.buffer.window,
            ranks=c.cluster.learners, lease_timeout_s=c.rollout.lease_timeout_s,
            max_attempts=c.rollout.max_attempts, quarantine_after=c.rollout.quarantine_after,
            failed_member=c.rollout.failed_member,
            prior_incarnation=c.buffer.prior_incarnation,
            filter_zero_variance=c.buffer.filter_zero_variance,
            max_filtered_in_a_row=c.buffer.max_filtered_in_a_row,
            prompts_end=tasks.prompts_end(c), max_bytes=limit.bytes, bytes_setting=limit.setting,
            sample_bytes=sample_bytes(c), replay_groups=c.replay_groups,
            replay_max_staleness=c.replay.max_staleness, replay_by=c.replay.by, seed=c.run.seed,
        )  # fmt: skip
        hub = HubClient(s.hub_endpoint, "buffer", keys=s.keys)
        self._server = BufferServer(
            ledger, run_id=s.run_id, host=s.host, port=s.port, keeper=keeper, keys=s.keys,
            emit=hub.emit, silent_after_s=c.cluster.silent_after_s, recording=self._recording(),
            copies_below=Path(s.run_dir), shares=shares,
        )  # fmt: skip
        endpoint = self._loop.run_until_complete(self._server.start())
        self._pulse = Pulse(
            hub, waits=Waits(s.name, c.log.wait_warn_s), children=False,
            position=lambda: (ledger.committed, ledger.version),
            metrics=[self._server.metrics, shares.metrics],
        )  # fmt: skip
        return endpoint

    def _recording(self) -> TrajectoryWriter | None:
        from asyncrl.buffer.trajectories import TrajectoryWriter

        record = self._config.record
        if not record.trajectories:
            return None
        folder = os.path.join(self._settings.run_dir, "trajectories")
        return TrajectoryWriter(
            folder, max_bytes=int(record.max_gib * 2**30),
            resume=self._settings.port != 0 or self._settings.resume is not None,
        )  # fmt: skip

    def run(self) -> None:
        """Serve until this process is ended."""
        self._loop.run_until_complete(self._server.run())


class ActorRole:
    """An actor (vLLM adds its own process below it)."""

    def __init__(self, spec: RoleSpec) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._spec = spec

    def setup(self) -> None:
        """Start the engine."""
        from asyncrl.actors.worker import ActorWorker

        asyncio.set_event_loop(self._loop)
        self._worker = ActorWorker(self._spec.config, self._spec.settings)
        self._loop.run_until_complete(self._worker.setup())

    def run(self, buffer: str, fleet: str, at_least: Version, first: bool) -> str:
        """Produce samples until the run is over (`ActorWorker.run`)."""
        self._loop.run_until_complete(self._worker.run(buffer, fleet, at_least, first))
        return "finished"


class LearnerRole:
    """A learner rank."""

    def __init__(self, spec: RoleSpec) -> None:
        from asyncrl.learner.worker import LearnerWorker

        self._host = spec.settings.host
        self._worker = LearnerWorker(spec.config, spec.settings)

    def bind(self, port: int = 0) -> tuple[str, int, str]:
        """Rank 0: address and port of the ranks' rendezvous, endpoint for announcements.

        `port`: of that endpoint; 0 is the system's choice.
        """
        return self._host, *self._worker.bind(port)

    def setup(self, store_host: str, store_port: int) -> None:
        """Join the ranks, load the model."""
        self._worker.setup(store_host, store_port)

    def run(self, buffer: str) -> str:
        """Train to the end. After a failure nothing is closed: the launcher ends the process,
        and closing could wait for peers that are gone before the failure is told."""
        ended = self._worker.run(buffer)
        self._worker.close()
        return ended


class RelayRole:
    """A machine's receiver of weights."""

    def __init__(self, spec: RoleSpec) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._spec = spec

    def run(self, fleet: str) -> None:
        """Serve until this process is ended; `fleet` is where it announces itself."""
        from asyncrl.actors.relay.worker import RelayWorker

        asyncio.set_event_loop(self._loop)
        worker = RelayWorker(self._spec.config, self._spec.settings)
        self._loop.run_until_complete(worker.run(fleet))


ROLES = {"buffer": BufferRole, "actor": ActorRole, "learner": LearnerRole, "relay": RelayRole}


def serve(connection: Connection, start: Start) -> None:
    """Be the role until the host closes the connection or ends."""
    _own_process(start)
    end_with(start.host_pid)
    # An engine core that is forked from here must not keep the connection open.
    os.register_at_fork(after_in_child=connection.close)
    role = ROLES[start.spec.settings.role](start.spec)
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply = (True, getattr(role, method)(*arguments))
        except BaseException as e:
            logging.getLogger(__name__).exception("%s: %s failed", start.name, method)
            known = isinstance(e, AsyncRLError)
            reply = (False, e if known else RuntimeError(f"{type(e).__name__}: {e}"))
        connection.send(reply)


def _own_process(start: Start) -> None:
    """Give this process its log, environment, folder and name."""
    fd = os.open(start.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(start.env)
    tempfile.tempdir = None  # a fork has what the server found in its own environment
    os.chdir(start.cwd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher speaks for Ctrl-C
    write_to(sys.stderr, start.name, start.spec.settings.run_id)
    name_process(start.name)


def main() -> None:
    """A role in a fresh interpreter (argument: the connection's descriptor)."""
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    start = connection.recv()
    connection.send(os.getpid())
    serve(connection, replace(start, env=dict(os.environ)))


if __name__ == "__main__":
    main()
