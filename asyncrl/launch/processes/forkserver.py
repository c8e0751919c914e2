"""One process a machine imports torch, vLLM and transformers, once; every role is forked from it.

    RoleHost ──connect, request──► fork server ──fork──► the role's process
        ▲                                                    │
        └──────── calls and results, on that connection ◄────┘

    consumes  one request (a `Start`) per connection
    waits     for a connection, at most IDLE_S while no role of its own is alive; then it ends
    releases  nothing: a role ends with its host, not with the server

It stays single-threaded and never computes, touches a GPU or opens a ZeroMQ socket: that is what
makes forking it safe. Requests are pickled on a Unix socket in a folder of this user alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.errors import DeadlineError, RoleDiedError

MODULES = (
    "numpy", "torch", "torch.distributed", "transformers", "uvloop", "zmq.asyncio", "psutil",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "asyncrl.actors.worker", "asyncrl.actors.vllm_engine",
    "asyncrl.actors.weights", "asyncrl.actors.gloo_transfer", "asyncrl.buffer.server",
    "asyncrl.learner.worker", "asyncrl.learner.step", "asyncrl.learner.publish",
    "asyncrl.learner.gloo_sender", "vllm.model_executor.models.llama",
)  # fmt: skip
"""What roles need and is slow to import; not there (a CUDA build, say) is no error."""

IDLE_S = float(os.environ.get("ASYNCRL_FORKSERVER_IDLE_S", "120"))
"""Seconds without a role after which the server ends."""
CONNECT_S = 180.0
"""Deadline for the server's imports and a fork, on a busy machine."""
POLL_S = 1.0

_started: list[subprocess.Popen[bytes]] = []  # not waited for: they end by themselves


@dataclass(frozen=True, slots=True)
class Start:
    """A role to fork: its environment, its log, and what `role_main.serve` makes it from."""

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


def socket_path(scratch: str) -> str:
    """Where the machine's server of a run listens."""
    return os.path.join(scratch, "fork.sock")


def ensure(
    scratch: str, env: Mapping[str, str], log_path: str, modules: Sequence[str] = MODULES
) -> None:
    """Start this machine's server unless it is there.

    Args:
        scratch: the run's folder for sockets; only this user may enter it.
        env: what the imports must find in the environment, thread counts above all: a fork keeps
            what OpenMP read at its start.
        log_path: where the server's output goes.
        modules: what it imports.
    """
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        try:
            listener.bind(socket_path(scratch))  # atomic: of several that try, one gets it
        except OSError:
            return
        listener.listen(128)
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()], env=os.environ | env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        _started.append(process)


def start_role(scratch: str, start: Start, *, fork: bool) -> tuple[Connection, int]:
    """Have a role's process started; the connection to it and its pid.

    Args:
        fork: from the machine's server, which is started anew when it is gone; else as a fresh
            interpreter (where a GPU is used: CUDA does not survive a fork).

    Raises:
        RoleDiedError: it ended at once.
        DeadlineError: no answer within CONNECT_S.
    """
    if not fork:
        return _spawn(start)
    for attempt in range(3):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(socket_path(scratch))
        except OSError as e:
            sock.close()
            if attempt == 2:
                raise RoleDiedError(f"{start.name}: no fork server on this machine: {e}") from e
            with contextlib.suppress(OSError):
                os.unlink(socket_path(scratch))  # what a killed server left
            ensure(scratch, start.env, start.log_path)
        else:
            return _greet(Connection(sock.detach()), start)
    raise AssertionError("unreachable")


def _spawn(start: Start) -> tuple[Connection, int]:
    ours, its = socket.socketpair()
    with its, open(start.log_path, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.processes.role_main", str(its.fileno())],
            pass_fds=[its.fileno()], env=start.env, cwd=start.cwd, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    return _greet(Connection(ours.detach()), start)


def _greet(connection: Connection, start: Start) -> tuple[Connection, int]:
    try:
        connection.send(start)
        if not connection.poll(CONNECT_S):
            raise DeadlineError(f"{start.name} waited {CONNECT_S:.0f} s for its process to start")
        return connection, int(connection.recv())
    except (EOFError, OSError) as e:
        connection.close()
        raise RoleDiedError(f"{start.name}: its process ended before it began ({e!r})") from e


def _import_all(modules: Sequence[str]) -> None:
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as e:
                print(f"not imported ahead: {name}: {e}", flush=True)
    gc.collect()
    gc.freeze()  # else the first collection in each role would copy all these pages
    print(f"imports took {time.monotonic() - began:.1f} s", flush=True)


def _serve(listener: socket.socket) -> None:
    """Fork for each connection; wake for the death of a role, to say how it ended."""
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(awake, select.POLLIN)
    children: dict[int, Start] = {}
    used = time.monotonic()
    while children or time.monotonic() - used < IDLE_S:
        ready = {fd for fd, _ in poller.poll(POLL_S * 1000)}
        with contextlib.suppress(BlockingIOError):
            awake.recv(4096)
        _reap(children)
        if listener.fileno() not in ready:
            continue
        used = time.monotonic()
        connection = Connection(listener.accept()[0].detach())
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(POLL_S):
                start = connection.recv()
                children[_fork(listener, connection, start)] = start
        connection.close()


def _fork(listener: socket.socket, connection: Connection, start: Start) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        listener.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        from asyncrl.launch.processes.role_main import serve

        connection.send(os.getpid())
        serve(connection, start)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, Start]) -> None:
    """Forget who has ended; a signal's victim cannot say so itself."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        start = children.pop(pid)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            with contextlib.suppress(OSError), open(start.log_path, "a", encoding="utf-8") as log:
                log.write(f"{start.name}: process {pid} was killed by {name}\n")


def main() -> None:
    """Import, then fork on request (arguments: the listening socket's descriptor, modules)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    path = listener.getsockname()
    try:
        _import_all(sys.argv[2:])
        _serve(listener)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))  # on another machine than the launcher's


if __name__ == "__main__":
    main()
