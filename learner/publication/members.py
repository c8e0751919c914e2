"""Who takes weights now: the actors' announcements, kept by learner rank 0. No torch here.

    actor-0 ──Announce, each second──► PULL ──(a thread)──► the newest of each name ──► wakes
    actor-1 ──Announce───────────────►                                             the publisher

The thread waits for announcements, released by the next one or by `close`. Nobody is ever removed
by hand: an actor that says nothing for FRESH_S is no member, and a new pid under a name replaces
the old one with all that was held against it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.security import MAX_CONTROL_BYTES, Keys, secure_server
from asyncrl.types import Version

FRESH_S = 5.0
"""An announcement older than this (seconds) no longer counts: actors send one each second."""

BACKOFF_S, BACKOFF_MAX_S = 2.0, 60.0
"""How long (seconds) a member that failed is left alone: doubled at each failure in a row."""


class Member(NamedTuple):
    """An actor that takes weights; a restarted one is another member.

    >>> Member("actor-1", 4711, "tcp://127.0.0.1:41873", workers=1).name
    'actor-1'
    """

    name: str
    pid: int
    """Of the process that holds the engine."""
    endpoint: str
    """Of its weight service."""
    workers: int
    """Ranks of the transfer group that it needs: its engine workers. 0: it is never sent anything,
    but loads from its machine's relay, which is a member too."""


@dataclass(slots=True)
class _Standing:
    """What is known of a member; times are of time.monotonic."""

    member: Member
    heard: float
    """Its last announcement."""
    applied: Version
    ready: bool
    left_alone_until: float = 0.0
    failures: int = 0
    """In a row."""
    gone: bool = False
    """Its process was found dead; until it announces itself again."""


class Members:
    """The newest announcement of each actor. Safe to ask from any thread.

    `on_change`, when set, is called by the receiving thread after each announcement.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, port: int = 0, fresh_s: float = FRESH_S,
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        self._fresh_s = fresh_s
        self._standings: dict[str, _Standing] = {}
        self._changed = threading.Condition()
        self.on_change: Callable[[], None] | None = None
        self.malformed = 0
        """Messages that were no announcement."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self.gate = secure_server(self._socket, keys)
        if port:  # where a former learner was found
            self._socket.bind(f"tcp://{host}:{port}")
        else:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        """Where actors announce themselves."""
        self._thread = threading.Thread(target=self._receive, name="members", daemon=True)
        self._thread.start()

    # --- questions --------------------------------------------------------------------------

    def fresh(self) -> list[Member]:
        """All that announced themselves lately, ready or not, by name."""
        with self._changed:
            return [s.member for s in self._fresh()]

    def behind(self, version: Version) -> list[Member]:
        """Those to send `version` now: fresh, ready, below it, and not left alone, by name."""
        now = time.monotonic()
        with self._changed:
            return [
                s.member
                for s in self._fresh()
                if s.ready
                and s.member.workers
                and s.applied < version
                and s.left_alone_until <= now
            ]

    def lacking(self, version: Version, failed: bool = True) -> list[str]:
        """Names of the fresh members that have not applied `version`.

        `failed`: whether to name those that were cut out and have taken nothing since, too.
        """
        with self._changed:
            late = [s for s in self._fresh() if s.applied < version]
            return [s.member.name for s in late if failed or not s.failures]

    def lag(self, version: Version) -> int | None:
        """Versions by which the last of the fresh members is behind; None when there is none.

        By number; one of an earlier incarnation is behind by at least one.
        """
        with self._changed:
            lags = [
                max(version.version - s.applied.version, int(s.applied < version))
                for s in self._fresh()
            ]
        return max(0, *lags) if lags else None

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` fresh members are ready; whether they were by the deadline."""

        def enough() -> bool:
            return sum(s.ready for s in self._fresh()) >= count

        with self._changed:
            return self._changed.wait_for(enough, timeout_s)

    # --- what the publisher learns -----------------------------------------------------------

    def took(self, member: Member, version: Version) -> None:
        """`member` has applied `version`; its announcement may come later."""
        with self._changed:
            if (s := self._standing(member)) is None:
                return
            s.applied = max(s.applied, version)
            s.ready, s.failures, s.left_alone_until = True, 0, 0.0

    def failed(self, member: Member, *, gone: bool) -> None:
        """`member` did not take a version: leave it alone for a while, longer each time.

        A member that is `gone` counts no more until it announces itself again.
        """
        with self._changed:
            if (s := self._standing(member)) is None:
                return
            pause = min(BACKOFF_MAX_S, BACKOFF_S * 2**s.failures)
            s.failures = min(s.failures + 1, 30)
            s.left_alone_until = time.monotonic() + pause
            s.gone = gone

    def close(self) -> None:
        """Stop receiving; the questions still work."""
        self._context.term()  # ends the thread's wait; it closes the socket
        self._thread.join()

    # --- the thread --------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _take(self, frames: list[bytes]) -> None:
        try:
            message, _ = wire.decode(frames)
        except WireError:
            message = None
        if not isinstance(message, wire.Announce) or not message.name or message.workers < 0:
            self.malformed += 1
            return
        member = Member(message.name, message.pid, message.endpoint, message.workers)
        now = time.monotonic()
        with self._changed:
            if (s := self._standing(member)) is None:
                s = _Standing(member, now, message.applied, message.ready)
                self._standings[member.name] = s
            s.heard, s.ready, s.gone = now, message.ready, False
            s.applied = max(s.applied, message.applied)  # `took` may have known it before
            self._changed.notify_all()
        if (tell := self.on_change) is not None:  # read once: the publisher may be closing
            tell()

    def _fresh(self) -> list[_Standing]:
        oldest = time.monotonic() - self._fresh_s
        return [s for _, s in sorted(self._standings.items()) if s.heard >= oldest and not s.gone]

    def _standing(self, member: Member) -> _Standing | None:
        s = self._standings.get(member.name)
        return s if s is not None and s.member == member else None
