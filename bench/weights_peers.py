"""The other processes of the weights bench as the bench holds them, and what it times."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import BenchError
from weights_receiver import main as receiver
from weights_receiver import raw_group, raw_options

REPLY_S = 120.0


class Timing(NamedTuple):
    """One publication, in seconds."""

    blocked: float
    total: float
    transfer: float
    pause: float
    """As the learner sees it."""
    wall: float
    """From the call to publish until all run it."""


class Relayed(NamedTuple):
    """One publication to the relay, in seconds."""

    wall: float
    """From the call to publish until the engine runs it."""
    total: float
    """From the copy of the shards until the relay offers it."""
    transfer: float


class Receivers:
    """The processes of one count, told what to do over pipes; `offer` is the relay's file."""

    def __init__(self, kinds: list[str], endpoint: str, model: str, offer: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number, kind in enumerate(kinds):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=receiver, args=(theirs, kind, endpoint, f"actor-{number}", model, offer)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait(self, seconds: float = REPLY_S) -> list[Any]:
        """The reply of each.

        Raises:
            BenchError: one failed, or said nothing.
        """
        replies = []
        for pipe in self._pipes:
            try:
                reply = pipe.recv() if pipe.poll(seconds) else TimeoutError(f"{seconds:.0f} s")
            except EOFError as e:
                reply = e
            if isinstance(reply, Exception):
                raise BenchError(f"a receiver: {type(reply).__name__}: {reply}")
            replies.append(reply)
        return replies

    def ask(
        self, *command: Any, each: Callable[[int], tuple[Any, ...]] = lambda _: ()
    ) -> list[Any]:
        """Have all do something."""
        for number, pipe in enumerate(self._pipes):
            pipe.send((*command, *each(number)))
        return self.wait()

    def end(self) -> None:
        """End them, by force if need be."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.terminate()
                process.join()


class Raw:
    """A bare gloo broadcast of so many bytes to the receivers."""

    def __init__(self, receivers: Receivers, count: int, nbytes: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port, world = listener.getsockname()[1], count + 1
        for number, pipe in enumerate(receivers._pipes):
            pipe.send(("raw_join", "127.0.0.1", port, number + 1, world, nbytes))
        self._group = raw_group("127.0.0.1", port, 0, world, listener)
        receivers.wait()
        self._receivers = receivers
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def __call__(self) -> float:
        """Seconds until all have it."""
        self._receivers.ask("raw_receive")
        began = time.monotonic()
        self._group.broadcast([self._buffer], raw_options()).wait()
        self._group.barrier().wait()
        return time.monotonic() - began

    def close(self) -> None:
        """Leave the group."""
        self._receivers.ask("raw_leave")
        self._group = None
