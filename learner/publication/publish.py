"""Publication of weights by rank 0: own shards copied in step, all else beside training.

    train ──► publish(v): wait for v-1 to leave ──► own shards into the snapshot ──► train
                                                              │
    the other ranks' sending threads (shard_publisher) ──►    ▼
    announcements ──► Members ──► who is ready, behind ──► the sending thread: gather, merge, hash
                                                              └─► round.Courier ──► these engines

All ranks call `publish`, each for its own shards: nothing is collective there. Rank 0's sending
thread waits for a publication, or for a member that is behind the last one (a joiner, one that was
cut out): that member gets the snapshot while the others generate. Whoever waits for the thread is
released by the deadline of the phase it is in, and gives up STUCK_MARGIN_S later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.journal import Journal
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.round import Courier
from asyncrl.learner.publication.shards import Source
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.security import Keys
from asyncrl.spans import SpanLog
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, publication_deadline_s

STUCK_MARGIN_S = 10.0
"""Seconds beyond its deadline after which the sending thread counts as stuck: NCCL's collectives
have no deadline of their own."""

FAILED_S = 15.0
"""How long the end of a run waits for a member that was cut out to come back."""

_LOOK_S = 1.0
"""How often (seconds) who waits looks again, unless woken."""


class _Job(NamedTuple):
    """What the sending thread does next."""

    version: Version
    cut_at: float | None
    """When the snapshot was cut (time.monotonic); None when members only catch up."""
    blocked_s: float


class BroadcastPublisher:
    """Rank 0's `WeightPublisher`: sends to all ready actors, by vLLM's weight-transfer API.

    `source` yields (name, this rank's rows) of each part of `layout`, in order; `gather` brings
    the other ranks', and is None without any. `members` may be empty: actors come and go, and
    hold the initial model, which is version 0 and is not sent. What an actor does wrong cuts it
    out and shows in `take_events`; it raises nowhere. `relayed`: the members are relays.
    """

    def __init__(
        self,
        members: Members,
        *,
        source: Callable[[], Source],
        layout: Layout,
        gather: Gather | None = None,
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        timeout_s: float,
        drain_s: float = 0.0,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        keys: Keys | None = None,
        relayed: bool = False,
    ) -> None:
        self._source = source
        self._members = members
        # vLLM's NCCL engine loads as it receives, and has no use for checksums.
        self._snapshot = Snapshot(
            layout, gather=gather, hashed=backend == "gloo", pinned=device.type == "cuda",
            bucket_bytes=bucket_bytes,
        )  # fmt: skip
        nbytes = self._snapshot.load_bytes
        self._deadline_s = publication_deadline_s(timeout_s, nbytes) + drain_s
        self._courier = Courier(
            self._snapshot, backend=backend, address=address, device=device, timeout_s=timeout_s,
            drain_s=drain_s, keys=keys,
        )  # fmt: skip
        self.spans = SpanLog()
        """Gets each delivery, and its phases."""
        self._journal = Journal(self._snapshot.plan.nbytes, pauses=not relayed)
        # All below is guarded by `_state`, which is notified of every change.
        self._state = threading.Condition()
        self._version: Version | None = None  # of the snapshot
        self._next: _Job | None = None  # a publication that the thread has not begun
        self._busy = self._filling = self._closing = False
        self._error: WeightSyncError | None = None
        self._lacking: list[str] = []  # whom `finish` waits for
        members.on_change = self._wake
        self._thread = threading.Thread(target=self._run, name="weights-send", daemon=True)
        self._thread.start()

    def publish(self, version: Version) -> None:
        """Cut a snapshot as `version` and send it beside training; see `WeightPublisher`.

        Raises:
            WeightSyncError: the sending thread is stuck, or ended by a bug.
        """
        started = time.monotonic()
        with self._state:
            self._filling = True  # nobody catches up before this publication
            self._wait_until_idle()
        try:
            self._snapshot.fill(self._source())
        except BaseException:
            self._filled(None, None)  # half a version: nobody may get it
            raise
        now = time.monotonic()
        self._filled(version, _Job(version, now, now - started))

    def _filled(self, version: Version | None, job: _Job | None) -> None:
        with self._state:
            self._version, self._next, self._filling = version, job, False
            self._state.notify_all()

    def wait(self) -> None:
        """Wait until the last publication has been applied, or not, by each of its members.

        Raises:
            WeightSyncError: the sending thread is stuck, or ended by a bug; the publisher is of no
                use afterwards.
        """
        with self._state:
            self._wait_until_idle()

    def finish(self, timeout_s: float) -> list[str]:
        """Wait until all fresh members have applied the last version; for those that were cut out
        and have not come back, at most FAILED_S.

        Returns:
            Names of those that have not by the deadline.

        Raises:
            WeightSyncError: as `wait`.
        """
        began = time.monotonic()
        with self._state:
            self._wait_until_idle()
            version = self._version
            if version is None:
                return []
            while True:
                self._lacking = lacking = self._members.lacking(version)
                if not lacking:
                    self._wait_until_idle()  # it may still take note of who took the version
                    return []
                hopeful = self._members.lacking(version, failed=False)
                limit = timeout_s if hopeful else min(timeout_s, FAILED_S)
                left = began + limit - time.monotonic()
                if left <= 0:
                    self._lacking = []
                    return lacking
                self._check()
                self._state.wait(min(left, _LOOK_S))

    def take_timings(self) -> dict[str, float]:
        """What the publication that left since the last call took; each is handed out once.

        sync/blocked_s: the `publish` call (training stood still). sync/gather_s, sync/hash_s: see
        `Snapshot.complete`. sync/total_s: snapshot cut to committed by all. All else: see
        `Journal`. And, when there are members, sync/version_lag (versions by which the last of
        them is behind).
        """
        timings = self._journal.take_timings()
        if self._version and (lag := self._members.lag(self._version)) is not None:
            timings["sync/version_lag"] = float(lag)
        return timings

    def take_events(self) -> list[dict[str, Any]]:
        """What happened to members since the last call, for events.jsonl: see `Journal.note`."""
        return self._journal.take_events()

    def waiting_for(self) -> str:
        """Phase, ranks or members that have not answered and the seconds left; at the end, who
        lacks the last version; "" when idle."""
        sending = self._snapshot.waiting_for() or self._courier.waiting_for()
        return sending or ", ".join(self._lacking)

    def close(self) -> None:
        """Wait for the last publication and leave the group; at once if the thread is stuck.

        Raises:
            WeightSyncError: as `wait`, if none has said so before.
        """
        said = self._error is not None
        try:
            with self._state:
                self._wait_until_idle()
                self._closing = True  # before anybody who is behind gets a last delivery
        except WeightSyncError:
            if not said:
                raise
        finally:
            with self._state:
                self._closing = True
                stuck = self._busy and self._error is not None
                self._state.notify_all()
            self._members.on_change = None
            if not stuck:  # to leave the group would wait for its collective
                self._thread.join()
                self._courier.leave()

    # --- with `_state` held ------------------------------------------------------------------

    def _wait_until_idle(self) -> None:
        began = looked = time.monotonic()
        late_s = 0.0
        while self._busy or self._next is not None:
            self._check()
            deadline = max(self._courier.deadline, self._snapshot.deadline, began)
            before, looked = looked, time.monotonic()
            # While this process was stopped, its thread could do nothing either.
            waited_s = min(looked - max(before, deadline), 2 * _LOOK_S)
            late_s = late_s + waited_s if looked > deadline else 0.0
            if late_s > STUCK_MARGIN_S:
                self._error = WeightSyncError(
                    f"weights {self._version}: the sending thread is stuck, {STUCK_MARGIN_S:.0f} s "
                    "past its deadline: an engine or the link to it is gone in the middle of the "
                    "collective; see the actors' logs"
                )
            self._state.wait(min(_LOOK_S, max(0.01, STUCK_MARGIN_S - late_s)))
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # --- the sending thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._do(job)
        except Exception as e:
            if isinstance(e, WeightSyncError):  # the gather's: it says who and when
                error = e
            else:
                error = WeightSyncError(f"weights {self._version}: {type(e).__name__}: {e}")
                error.__cause__ = e
            with self._state:
                self._error, self._busy = error, False
                self._state.notify_all()

    def _next_job(self) -> _Job | None:
        with self._state:
            while not self._closing:
                if self._version is not None and (self._next is not None or not self._filling):
                    job, self._next = self._next, None
                    if job is not None or self._members.behind(self._version):
                        self._busy = True
                        return job or _Job(self._version, None, 0.0)
                self._state.wait(_LOOK_S)
        return None

    def _do(self, job: _Job) -> None:
        took = {} if job.cut_at is None else self._snapshot.complete(job.version)
        began = time.monotonic()
        if job.cut_at is not None:
            self.spans.add("publication", "gather", job.cut_at, began)
        members = self._members.behind(job.version)
        outcome = self._courier.deliver(job.version, members, began + self._deadline_s)
        now = time.monotonic()
        for phase, (start, end) in outcome.timings.items():
            self.spans.add("publication", phase, start, end)
        self.spans.add(
            "publication", f"version {job.version}", job.cut_at or began, now,
            applied=len(outcome.applied), cut_out=len(outcome.cuts),
        )  # fmt: skip
        for member in outcome.applied:
            self._members.took(member, job.version)
        for cut in outcome.cuts:
            self._members.failed(cut.member, gone=cut.gone)
        self._journal.note(job.version, outcome, now - began if job.cut_at is None else None)
        if job.cut_at is not None:
            took |= {"sync/blocked_s": job.blocked_s, "sync/total_s": now - job.cut_at}
            if (travels := self._snapshot.plan.nbytes) < self._snapshot.load_bytes:
                took["sync/delta_frac"] = travels / self._snapshot.load_bytes
            self._journal.time(outcome, took)
        with self._state:
            self._busy = False
            self._state.notify_all()

    def _wake(self) -> None:
        with self._state:
            self._state.notify_all()
