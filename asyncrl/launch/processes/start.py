"""How a role's process is started: forked from the machine's fork server, or fresh.

    start_role ──► fork server's socket in the run's scratch folder ──► a fork
        │               └── nobody there: `ensure` starts one, whoever comes first
        └────────► a fresh interpreter (role_main), where a GPU is used

The server holds a lock (flock) on the scratch folder from before it binds until it has ended: of
several that find no server one starts it, and only its holder ever removes the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.errors import DeadlineError, RoleDiedError

MODULES = (
    "numpy", "torch", "torch.distributed", "transformers", "uvloop", "zmq.asyncio", "psutil",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "asyncrl.actors.worker", "asyncrl.actors.vllm_engine",
    "asyncrl.actors.weights", "asyncrl.actors.gloo_transfer", "asyncrl.actors.relay.worker",
    "asyncrl.actors.relay.watch", "asyncrl.buffer.server",
    "asyncrl.learner.worker", "asyncrl.learner.step", "asyncrl.learner.publication.publish",
    "asyncrl.learner.publication.gloo_sender", "vllm.model_executor.models.llama",
)  # fmt: skip
"""What roles need and is slow to import; not there (a CUDA build, say) is no error."""

IDLE_S = 120.0
"""Seconds without a role after which a server ends."""
CONNECT_S = 180.0
"""Deadline for the server's imports and a fork, on a busy machine."""
SERVER_S = 10.0
"""How long to look for a server that listens: one that is ending keeps its lock to the last."""
LOOK_EVERY_S = 0.05
OFFERS = "relay-*.json"
"""Files of the scratch folder: what the machine's receivers of weights offer."""
ATTEMPTS = 3
"""Servers that may end on us before a role is given up."""

_started: list[subprocess.Popen[bytes]] = []  # not waited for: they end by themselves


@dataclass(frozen=True, slots=True)
class Start:
    """A role to start: its environment, its log, and what `role_main.serve` makes it from."""

    name: str
    """E.g. "actor-0"."""
    env: dict[str, str]
    """The whole environment of its process."""
    cwd: str
    log_path: str
    host_pid: int
    """The process that the role must not outlive."""
    spec: Any
    """A `role_main.RoleSpec`."""


class _ServerGoneError(Exception):
    """The server ended before it answered."""


def socket_path(scratch: str) -> str:
    """Where the machine's server of a run listens."""
    return os.path.join(scratch, "fork.sock")


def ensure(
    scratch: str, env: Mapping[str, str], log_path: str, modules: Sequence[str] = MODULES,
    idle_s: float = IDLE_S,
) -> None:  # fmt: skip
    """Start this machine's server unless it is there.

    Args:
        scratch: the run's folder for sockets; only this user may enter it.
        env: what the imports must find in the environment, thread counts above all: a fork keeps
            what OpenMP read at its start.
        log_path: where the server's output goes.
        modules: what it imports.
        idle_s: seconds without a role after which it ends.
    """
    if (lock := _lock(scratch)) is None:
        return
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path(scratch))  # what a killed server left
        listener.bind(socket_path(scratch))
        listener.listen(128)
        fds = [listener.fileno(), lock]
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.launch.processes.forkserver",
                 *map(str, fds), str(idle_s), *modules],
                pass_fds=fds, env=os.environ | env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        _started.append(process)
    finally:
        listener.close()
        os.close(lock)  # the server's copy of the descriptor keeps it


def _lock(scratch: str) -> int | None:
    """The scratch folder, open and locked; None while another holds the lock."""
    while True:
        os.makedirs(scratch, mode=0o700, exist_ok=True)
        try:
            fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # a server that ended has just removed it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(scratch)):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)


def start_role(scratch: str, start: Start, *, fork: bool) -> tuple[Connection, int]:
    """Have a role's process started; the connection to it and its pid.

    Args:
        fork: from the machine's server, which is started anew when it is gone; else as a fresh
            interpreter (where a GPU is used: CUDA does not survive a fork).

    Raises:
        RoleDiedError: it ended at once, or could not be forked (the message says why).
        DeadlineError: no answer within CONNECT_S.
    """
    if not fork:
        return _spawn(start)
    for _ in range(ATTEMPTS):
        with contextlib.suppress(_ServerGoneError):
            return _greet(_connect(scratch, start), start)
    raise RoleDiedError(
        f"{start.name}: the fork server ended {ATTEMPTS} times before it answered; "
        f"see logs/forkserver.log and {start.log_path}"
    )


def _connect(scratch: str, start: Start) -> Connection:
    deadline = time.monotonic() + SERVER_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(socket_path(scratch))
        except OSError as e:
            sock.close()
            if time.monotonic() > deadline:
                raise RoleDiedError(f"{start.name}: no fork server on this machine: {e}") from e
            ensure(scratch, start.env, start.log_path)
            time.sleep(LOOK_EVERY_S)
        else:
            return Connection(sock.detach())


def _spawn(start: Start) -> tuple[Connection, int]:
    ours, its = socket.socketpair()
    with its, open(start.log_path, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.processes.role_main", str(its.fileno())],
            pass_fds=[its.fileno()], env=start.env, cwd=start.cwd, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    try:
        return _greet(Connection(ours.detach()), start)
    except _ServerGoneError as e:
        raise RoleDiedError(
            f"{start.name}: its process ended before it began ({e}); see {start.log_path}"
        ) from e


def _greet(connection: Connection, start: Start) -> tuple[Connection, int]:
    """Send the request; the answer is a pid, or why there is none."""
    try:
        connection.send(start)
        if not connection.poll(CONNECT_S):
            raise DeadlineError(f"{start.name} waited {CONNECT_S:.0f} s for its process to start")
        answer = connection.recv()
    except (EOFError, OSError) as e:
        connection.close()
        raise _ServerGoneError(repr(e)) from e
    if isinstance(answer, str):
        connection.close()
        raise RoleDiedError(f"{start.name}: the fork server could not start it: {answer}")
    return connection, int(answer)
