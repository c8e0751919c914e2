"""One process a machine imports torch, vLLM and transformers, once; every role is forked from it.

    RoleHost ──connect, request──► fork server ──fork──► the role's process
        ▲                                                    │
        └──────── calls and results, on that connection ◄────┘

    consumes  one request (a `Start`) per connection
    waits     for a connection, for a request at most REQUEST_S, at most `idle_s` while no role of
              its own is alive; then it ends
    releases  nothing: a role ends with its host, not with the server

It stays single-threaded and never computes, touches a GPU or opens a ZeroMQ socket: that is what
makes forking it safe. Requests are pickled on a Unix socket in a folder of this user alone.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection

from asyncrl.launch.processes.start import OFFERS, Start

REQUEST_S = 10.0
"""How long a client that has connected may take to send its request; others are served."""
POLL_S = 1.0


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


class _Server:
    """Forks for each request; wakes for the death of a role, to say how it ended."""

    def __init__(self, listener: socket.socket, lock: int) -> None:
        self._listener, self._lock = listener, lock
        self._children: dict[int, Start] = {}
        self._pending: dict[int, tuple[Connection, float]] = {}
        """Who has connected and not yet asked, and until when."""
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self._poller.register(self._awake, select.POLLIN)

    def serve(self, idle_s: float) -> None:
        """Until no role is alive and nobody has come for `idle_s`."""
        used = time.monotonic()
        while self._children or self._pending or time.monotonic() - used < idle_s:
            ready = {fd for fd, _ in self._poller.poll(POLL_S * 1000)}
            with contextlib.suppress(BlockingIOError):
                self._awake.recv(4096)
            self._reap()
            if self._listener.fileno() in ready:
                used = time.monotonic()
                self._accept()
            for fd in ready & self._pending.keys():
                self._answer(fd)
            self._forget_late()

    def _accept(self) -> None:
        try:
            connection = Connection(self._listener.accept()[0].detach())
        except OSError:
            traceback.print_exc()  # gone again, or no descriptor is left
            return
        self._pending[connection.fileno()] = connection, time.monotonic() + REQUEST_S
        self._poller.register(connection, select.POLLIN)

    def _answer(self, fd: int) -> None:
        """Fork what is asked for. Whatever goes wrong is told to the client; the server goes on."""
        connection = self._close_later(fd)
        try:
            start: Start = connection.recv()
            self._children[self._fork(connection, start)] = start
        except (EOFError, ConnectionError):
            pass  # the client is gone
        except Exception as e:
            traceback.print_exc()
            with contextlib.suppress(OSError):
                connection.send(f"{type(e).__name__}: {e}")
        finally:
            connection.close()

    def _close_later(self, fd: int) -> Connection:
        self._poller.unregister(fd)
        return self._pending.pop(fd)[0]

    def _forget_late(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, (_, until) in self._pending.items() if until < now]:
            print(f"a client sent no request within {REQUEST_S:.0f} s", flush=True)
            self._close_later(fd).close()

    def _fork(self, connection: Connection, start: Start) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._leave()
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

    def _leave(self) -> None:
        """In a fork: keep nothing that is the server's, its lock above all."""
        os.close(self._lock)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for part in (self._listener, self._awake, self._wake):
            part.close()
        for other, _ in self._pending.values():
            other.close()

    def _reap(self) -> None:
        """Forget who has ended; a signal's victim cannot say so itself."""
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            start = self._children.pop(pid)
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                with (
                    contextlib.suppress(OSError),
                    open(start.log_path, "a", encoding="utf-8") as log,
                ):
                    by = "ended with its host" if _over(start.host_pid) else f"was killed by {name}"
                    log.write(f"{start.name}: process {pid} {by}\n")


def _over(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has waited for it yet."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)


def main() -> None:
    """Import, then fork on request.

    Arguments: descriptors of the listening socket and of the locked folder, idle_s, modules.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener, lock = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    path = listener.getsockname()
    try:
        _import_all(sys.argv[4:])
        _Server(listener, lock).serve(idle_s=float(sys.argv[3]))
    finally:
        # The lock is ours until this process has ended, hence so is the socket.
        with contextlib.suppress(OSError):
            os.unlink(path)
            folder = os.path.dirname(path)
            for offer in glob.glob(os.path.join(folder, OFFERS)):
                os.unlink(offer)
            os.rmdir(folder)  # on another machine than the launcher's


if __name__ == "__main__":
    main()
