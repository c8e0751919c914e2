"""The learner's voice to some actors' weight services: vLLM's four-method sync client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl import wire
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.learner.publication.members import Member
from asyncrl.security import Keys, secure_client
from asyncrl.types import Version
from asyncrl.weights import BYTES_PER_S

STEP_S = 10.0
"""Longest wait for an engine to join a group or to pause: all others wait as long."""

_SLICE_MS = 200
"""How often a wait looks whether its deadline has been shortened."""

_GONE: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "its connection closed",
    zmq.EVENT_CONNECT_RETRIED: "nothing listens there",
}
_KINDS = {
    "AlreadyAppliedError": "applied",
    "DamagedWeightsError": "damaged",
    "WeightSyncError": "refused",
}
"""Kinds of failure after which an engine goes on, by the error that it answers."""

_GONE_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class Limits(NamedTuple):
    """Deadlines of the phases of a publication, in seconds.

    >>> Limits.of(60.0, 300_000_000)
    Limits(step_s=10.0, transfer_s=13.0, margin_s=5.0, drain_s=0.0)
    """

    step_s: float
    """join, begin."""
    transfer_s: float
    """receive, commit: grows by 1 s per 100 MB."""
    margin_s: float
    """What actors get to say that a collective failed, after its own deadline."""
    drain_s: float = 0.0
    """How much longer begin may take, where actors wait for their requests to end."""

    @classmethod
    def of(cls, timeout_s: float, nbytes: int, drain_s: float = 0.0) -> Limits:
        """Those of `weights.timeout_s`, far enough below it that a second try fits in."""
        step = min(STEP_S, timeout_s / 4)
        transfer = min(timeout_s, step + nbytes / BYTES_PER_S)
        return cls(step, transfer, step / 2, drain_s)

    @property
    def round_s(self) -> float:
        """The longest that one round can take: the sender's joining, then every phase."""
        join, begin = 2 * (self.step_s + self.margin_s), self.step_s + self.drain_s
        return join + begin + 2 * self.transfer_s + self.margin_s


class Failure(NamedTuple):
    """Why a member did not answer Ok.

    gone: its process has ended. silent: no answer by the deadline. dead: its engine cannot go on.
    refused: its engine goes on as before; another member's failure may be the reason. damaged:
    likewise, since bytes arrived that were not sent. applied: it has the version already.
    """

    phase: str
    kind: Literal["gone", "silent", "dead", "refused", "damaged", "applied"]
    reason: str


class FleetClient:
    """Fans each call out to every member and gathers every reply by the phase's deadline.

    Structurally a `VLLMWeightSyncClient`, so vLLM's trainer engines can drive it, from any thread:
    each call has sockets of its own. A call raises WeightSyncError unless all have answered Ok;
    `failures` then says why, in the order in which they showed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        limits: Limits | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.members = tuple(members)
        self.keys = keys
        self.limits = limits or Limits.of(60.0, 0)
        self._context = zmq.Context()
        self._calling = threading.Lock()
        self._waiting: tuple[str, tuple[Member, ...]] = ("", ())
        self.deadline = 0.0
        """Of the call under way or of the last one (time.monotonic)."""
        self.start_round(Version(0, 0))

    def start_round(self, version: Version) -> None:
        """Forget the last publication; the next calls are those of `version`."""
        self.version = version
        self.failures: dict[Member, Failure] = {}
        self.received: list[Member] = []
        """They hold the whole version."""
        self.applied: list[Member] = []
        """They run it."""
        self.timings: dict[str, tuple[float, float]] = {}
        """Start and end (time.monotonic) of each phase."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """All engines' workers join; ranks follow the sender's, member by member."""
        offsets, rank = {}, 1
        for member in self.members:
            offsets[member] = rank
            rank += member.workers
        self._call(
            "join", self.members, self.limits.step_s + self.limits.margin_s,
            lambda m: wire.WeightsInit(info=init_info, rank_offset=offsets[m]),
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """All engines pause at a token boundary."""
        message = wire.WeightsBegin(version=self.version)
        seconds = self.limits.step_s + self.limits.drain_s
        self._call("begin", self.members, seconds, lambda _: message)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All engines receive; runs while the sender broadcasts."""
        message = wire.WeightsReceive(info=update_info)
        seconds = self.limits.transfer_s + self.limits.margin_s
        self._call("receive", self.members, seconds, lambda _: message, self.received)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The engines that received load, stamp `version` and go on."""
        message = wire.WeightsCommit(version=self.version)
        self._call("commit", self.received, self.limits.transfer_s, lambda _: message, self.applied)

    def hurry(self) -> None:
        """The collective has failed: what has not been answered soon will not be."""
        self.deadline = min(self.deadline, time.monotonic() + self.limits.margin_s)

    def waiting_for(self) -> str:
        """Phase, members that have not answered, seconds left; "" when no call is under way."""
        phase, members = self._waiting
        if not members:
            return ""
        names = ", ".join(m.name for m in members)
        left = max(0.0, self.deadline - time.monotonic())
        return f"weights {self.version}, {phase}: no answer yet from {names} ({left:.0f} s left)"

    def close(self) -> None:
        """Drop the connections, unless another thread's call, left to its deadline, uses them."""
        if self._calling.acquire(blocking=False):
            self._context.destroy(linger=0)
            self._calling.release()

    def _call(
        self,
        phase: str,
        members: Sequence[Member],
        seconds: float,
        message: Callable[[Member], wire.Message],
        done: list[Member] | None = None,
    ) -> None:
        """One request to each of `members`; those that answer Ok are added to `done`.

        Raises:
            WeightSyncError: naming the phase and every one that refused, died or was silent.
        """
        started = time.monotonic()
        self.deadline = started + seconds
        with self._calling:
            failed = _Exchange(self, phase, tuple(members)).run(self._context, message)
        self.timings[phase] = (started, time.monotonic())
        if done is not None:
            done += [m for m in members if m not in failed]
        if failed:
            raise WeightSyncError(
                f"weights {self.version}, {phase}: "
                + "; ".join(f"{m.name} ({m.endpoint}) {f.reason}" for m, f in failed.items())
            )


class _Exchange:
    """One call: a request and a reply for each member."""

    def __init__(self, client: FleetClient, phase: str, members: tuple[Member, ...]) -> None:
        self._client, self._phase, self._members = client, phase, members
        self._failed: dict[Member, Failure] = {}
        self._poller = zmq.Poller()
        self._open: dict[Member, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}

    def run(
        self, context: zmq.Context[zmq.Socket[bytes]], message: Callable[[Member], wire.Message]
    ) -> dict[Member, Failure]:
        """Why each member failed that did; also added to the client's failures at once."""
        self._client._waiting = (self._phase, self._members)
        try:
            for member in self._members:
                self._send(context, member, wire.encode(message(member)))
            self._gather()
        finally:
            self._client._waiting = ("", ())
            for member in list(self._open):
                self._close(member)
        return self._failed

    def _send(
        self, context: zmq.Context[zmq.Socket[bytes]], member: Member, frames: list[wire.Frame]
    ) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, self._client.keys)
        monitor = socket.get_monitor_socket(_GONE_EVENTS)
        self._open[member] = (socket, monitor)
        try:
            socket.connect(member.endpoint)
        except zmq.ZMQError as e:
            self._fail(member, "gone", f"has no address that can be reached: {e}")
            return
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        socket.send_multipart(frames)

    def _gather(self) -> None:
        """Wait for each member's reply, death or the deadline."""
        started = time.monotonic()
        while self._open and (left := self._client.deadline - time.monotonic()) > 0:
            self._client._waiting = (self._phase, tuple(self._open))
            ready = dict(self._poller.poll(min(_SLICE_MS, 1 + int(left * 1000))))
            for member, (socket, monitor) in list(self._open.items()):
                # A reply that came before its connection closed counts.
                if socket in ready:
                    self._hear(member, socket.recv_multipart())
                elif monitor in ready:
                    event = int(recv_monitor_message(monitor)["event"])
                    if event in _GONE:
                        self._fail(member, "gone", _GONE[event])
        waited = time.monotonic() - started
        for member in list(self._open):
            self._fail(member, "silent", f"did not answer within {waited:.1f} s")

    def _hear(self, member: Member, frames: list[bytes]) -> None:
        try:
            reply, _ = wire.decode(frames)
        except WireError as e:
            self._fail(member, "dead", f"answered nonsense: {e}")
            return
        if isinstance(reply, wire.Ok):
            self._close(member)
        elif isinstance(reply, wire.Error):
            reason = f"refused with {reply.error}: {reply.message}"
            self._fail(member, _KINDS.get(reply.error, "dead"), reason)
        else:
            self._fail(member, "dead", f"answered {type(reply).__name__}")

    def _fail(self, member: Member, kind: Any, reason: str) -> None:
        failure = Failure(self._phase, kind, reason)
        self._failed[member] = self._client.failures[member] = failure
        self._close(member)

    def _close(self, member: Member) -> None:
        socket, monitor = self._open.pop(member)
        for one in (socket, monitor):
            if one in self._poller:
                self._poller.unregister(one)
        socket.disable_monitor()
        socket.close()
        monitor.close()
