"""The learner's voice to all actors' weight services: vLLM's four-method sync client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl import wire
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.types import Version

_GONE: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "its connection closed",
    zmq.EVENT_CONNECT_RETRIED: "nothing listens there",
}
_GONE_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class Receiver(NamedTuple):
    """An actor that takes weights.

    >>> Receiver("actor-1", "tcp://127.0.0.1:41873", workers=1).name
    'actor-1'
    """

    name: str
    endpoint: str
    """Of its weight service."""
    workers: int
    """Engine workers, each a rank of the transfer group."""


class FleetClient:
    """Fans each call out to every actor and gathers every reply by a deadline.

    Structurally a `VLLMWeightSyncClient`, so vLLM's trainer engines can drive it, from any thread:
    each call has sockets of its own. Set `version` and `deadline` (time.monotonic) before a
    round; each phase's start and end (time.monotonic) are left in `timings`.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = tuple(receivers)
        self._context = zmq.Context()
        self._calling = threading.Lock()
        self.version = Version(0, 0)
        self.deadline = 0.0
        self.timings: dict[str, tuple[float, float]] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """All engines' workers join; ranks follow the sender's, actor by actor."""
        workers = [r.workers for r in self._receivers]
        offsets = [1 + sum(workers[:i]) for i in range(len(workers))]
        self._call("join", lambda i: wire.WeightsInit(info=init_info, rank_offset=offsets[i]))

    def start_weight_update(self) -> None:
        """All engines pause at a token boundary."""
        self._call("begin", lambda _: wire.WeightsBegin(version=self.version))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All engines receive; runs while the sender broadcasts."""
        self._call("receive", lambda _: wire.WeightsReceive(info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines load, stamp `version` and go on."""
        self._call("commit", lambda _: wire.WeightsCommit(version=self.version))

    def close(self) -> None:
        """Drop the connections, unless another thread's call, left to its deadline, uses them."""
        if self._calling.acquire(blocking=False):
            self._context.destroy(linger=0)
            self._calling.release()

    def _call(self, phase: str, message: Callable[[int], wire.Message]) -> None:
        """One request to each actor; returns when all have answered Ok.

        Raises:
            WeightSyncError: naming the phase and every actor that refused, died or was silent.
        """
        started = time.monotonic()
        with self._calling:
            failures = self._exchange(message)
        self.timings[phase] = (started, time.monotonic())
        if failures:
            raise WeightSyncError(
                f"weights {self.version}, {phase}: "
                + "; ".join(f"{self._name(i)} {why}" for i, why in sorted(failures.items()))
            )

    def _exchange(self, message: Callable[[int], wire.Message]) -> dict[int, str]:
        """Send to each actor and gather the replies; why each failed one did."""
        poller = zmq.Poller()
        sockets: list[zmq.Socket[bytes]] = []
        monitors: list[zmq.Socket[bytes]] = []
        try:
            for i, receiver in enumerate(self._receivers):
                socket = self._context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                monitor = socket.get_monitor_socket(_GONE_EVENTS)
                socket.connect(receiver.endpoint)
                sockets.append(socket)
                monitors.append(monitor)
                poller.register(socket, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
                socket.send_multipart(wire.encode(message(i)))
            return self._gather(poller, sockets, monitors)
        finally:
            for socket in sockets:
                socket.disable_monitor()
                socket.close()
            for monitor in monitors:
                monitor.close()

    def _gather(
        self,
        poller: zmq.Poller,
        sockets: list[zmq.Socket[bytes]],
        monitors: list[zmq.Socket[bytes]],
    ) -> dict[int, str]:
        """Wait for each actor's reply, death or the deadline; why each failed one did."""
        started = time.monotonic()
        waiting, failures = set(range(len(sockets))), {}
        while waiting and (left := self.deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(left * 1000))))
            for i in sorted(waiting):
                # A reply that came before its connection closed counts.
                if sockets[i] in ready:
                    why = _refusal(sockets[i].recv_multipart())
                elif monitors[i] in ready:
                    why = _GONE.get(recv_monitor_message(monitors[i])["event"], "")
                    if not why:
                        continue
                else:
                    continue
                waiting.discard(i)
                poller.unregister(monitors[i])
                poller.unregister(sockets[i])
                if why:
                    failures[i] = why
        waited = time.monotonic() - started
        return failures | {i: f"did not answer within {waited:.1f} s" for i in waiting}

    def _name(self, i: int) -> str:
        return f"{self._receivers[i].name} ({self._receivers[i].endpoint})"


def _refusal(frames: list[bytes]) -> str:
    """Why a reply is not Ok; "" when it is."""
    try:
        reply, _ = wire.decode(frames)
    except WireError as e:
        return f"answered nonsense: {e}"
    if isinstance(reply, wire.Error):
        return f"refused with {reply.error}: {reply.message}"
    return "" if isinstance(reply, wire.Ok) else f"answered {type(reply).__name__}"
