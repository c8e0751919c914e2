"""Publication of weights by a collective: snapshot in step, send beside training.

    train ──► publish(v): wait for v-1 to leave ──► source() into the snapshot ──► train
                                                              │ (rank 0)
    announcements ──► Members ──► who is ready, who is behind ▼
                                  the sending thread ──► round.Courier ──► these actors' engines

All ranks call `publish`, since the source gathers; only rank 0 keeps the copy and speaks. Its
sending thread waits for a publication, or for a member that is behind the last one (a joiner,
one that was cut out): that member gets the snapshot while the others generate. Whoever waits for
the thread is released by the deadline of the phase it is in, and gives up STUCK_MARGIN_S later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication.members import Member, Members
from asyncrl.learner.publication.round import Courier, Outcome
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.security import Keys
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, ParamSpec, TransferPlan, publication_deadline_s

STUCK_MARGIN_S = 10.0
"""Seconds beyond its deadline after which the sending thread counts as stuck: NCCL's collectives
have no deadline of their own."""

FAILED_S = 15.0
"""How long the end of a run waits for a member that was cut out to come back."""

_LOOK_S = 1.0
"""How often (seconds) who waits looks again, unless woken."""

Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class _Job(NamedTuple):
    """What the sending thread does next."""

    version: Version
    members: list[Member]
    cut_at: float | None
    """When the snapshot was cut (time.monotonic); None when members only catch up."""
    blocked_s: float


class BroadcastPublisher:
    """`WeightPublisher` that sends to all ready actors at once, by vLLM's weight-transfer API.

    `source` yields (name, full tensor) in the order of `metadata` and may be a collective of
    all ranks. `members` (rank 0 only) may be empty: actors come and go, and hold the initial
    model, which is version 0 and is not sent. What an actor does wrong cuts it out and shows
    in `take_events`; it raises nowhere.
    """

    def __init__(
        self,
        members: Members | None,
        *,
        rank: int,
        source: Source,
        metadata: Sequence[ParamSpec],
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        timeout_s: float,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        keys: Keys | None = None,
    ) -> None:
        self._rank = rank
        self._source = source
        if rank != 0:
            return
        assert members is not None, "rank 0 speaks to the members"
        plan = TransferPlan(tuple(metadata))
        self._members = members
        self._nbytes = plan.nbytes
        self._deadline_s = publication_deadline_s(timeout_s, plan.nbytes)
        self._snapshot = Snapshot(plan, pinned=device.type == "cuda", bucket_bytes=bucket_bytes)
        self._courier = Courier(
            self._snapshot, backend=backend, address=address, device=device, timeout_s=timeout_s,
            keys=keys,
        )  # fmt: skip
        self._timings: deque[dict[str, float]] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._retries = 0
        # All below is guarded by `_state`, which is notified of every change.
        self._state = threading.Condition()
        self._version: Version | None = None  # of the snapshot
        self._next: _Job | None = None  # a publication that the thread has not begun
        self._busy = self._filling = self._closing = False
        self._error: WeightSyncError | None = None
        members.on_change = self._wake
        self._thread = threading.Thread(target=self._run, name="weights-send", daemon=True)
        self._thread.start()

    def publish(self, version: Version) -> None:
        """Cut a snapshot as `version` and send it beside training; see `WeightPublisher`.

        Raises:
            WeightSyncError: the sending thread is stuck, or ended by a bug.
        """
        if self._rank != 0:
            for _ in self._source():
                pass
            return
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
        self._members.published(version)
        self._filled(version, _Job(version, [], now, now - started))

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
        if self._rank == 0:
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
        if self._rank != 0:
            return []
        began = time.monotonic()
        with self._state:
            self._wait_until_idle()
            version = self._version
            if version is None:
                return []
            while True:
                lacking = self._members.lacking(version)
                if not lacking:
                    self._wait_until_idle()  # it may still take note of who took the version
                    return []
                hopeful = self._members.lacking(version, failed=False)
                limit = timeout_s if hopeful else min(timeout_s, FAILED_S)
                left = began + limit - time.monotonic()
                if left <= 0:
                    return lacking
                self._check()
                self._state.wait(min(left, _LOOK_S))

    def take_timings(self) -> dict[str, float]:
        """What the publication that left since the last call took; each is handed out once.

        sync/blocked_s: the `publish` call (training stood still). sync/total_s: snapshot cut to
        committed by all. sync/pause_s: first request to pause to last commit, as seen from here;
        each engine's own pause lies within. sync/transfer_s: the receive phase. sync/bytes.
        Without a member that applied it, a publication has blocked_s and total_s alone. At each
        call: sync/retries (rounds repeated because a member failed, so far), and, when there are
        members, sync/version_lag (versions by which the last of them is behind).
        """
        if self._rank != 0:
            return {}
        timings: dict[str, float] = {"sync/retries": float(self._retries)}
        while self._timings:
            timings |= self._timings.popleft()
        if self._version and (lag := self._members.lag(self._version)) is not None:
            timings["sync/version_lag"] = float(lag)
        return timings

    def take_events(self) -> list[dict[str, Any]]:
        """What happened to members since the last call, for events.jsonl.

        weights_cut_out: actor, phase, reason, version. weights_joined: actor, version, seconds (of
        the delivery, which was apart from a publication).
        """
        events = []
        while self._rank == 0 and self._events:
            events.append(self._events.popleft())
        return events

    def waiting_for(self) -> str:
        """Phase, members that have not answered and the seconds left; "" when idle."""
        return self._courier.waiting_for() if self._rank == 0 else ""

    def close(self) -> None:
        """Wait for the last publication and leave the group; at once if the thread is stuck.

        Raises:
            WeightSyncError: as `wait`, if none has said so before.
        """
        if self._rank != 0:
            return
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
        began = time.monotonic()
        while self._busy or self._next is not None:
            self._check()
            give_up = max(self._courier.deadline, began) + STUCK_MARGIN_S
            if time.monotonic() > give_up:
                self._error = WeightSyncError(
                    f"weights {self._version}: the sending thread is stuck, "
                    f"{STUCK_MARGIN_S:.0f} s past its deadline: an engine or the link to it is "
                    "gone in the middle of the collective; see the actors' logs"
                )
            self._state.wait(min(_LOOK_S, max(0.01, give_up - time.monotonic())))
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
            error = WeightSyncError(f"weights {self._version}: {type(e).__name__}: {e}")
            error.__cause__ = e
            with self._state:
                self._error, self._busy = error, False
                self._state.notify_all()

    def _next_job(self) -> _Job | None:
        with self._state:
            while not self._closing:
                if self._version is not None and (self._next is not None or not self._filling):
                    behind = self._members.behind(self._version)
                    job, self._next = self._next, None
                    if job is not None or behind:
                        self._busy = True
                        job = job or _Job(self._version, [], None, 0.0)
                        return job._replace(members=behind)
                self._state.wait(_LOOK_S)
        return None

    def _do(self, job: _Job) -> None:
        began = time.monotonic()
        outcome = self._courier.deliver(job.version, job.members, began + self._deadline_s)
        now = time.monotonic()
        self._retries += max(0, outcome.rounds - 1)
        for member in outcome.applied:
            self._members.took(member, job.version)
            if job.cut_at is None:
                self._event("weights_joined", member, job, seconds=round(now - began, 3))
        for cut in outcome.cuts:
            self._members.failed(cut.member, gone=cut.gone)
            self._event("weights_cut_out", cut.member, job, phase=cut.phase, reason=cut.reason)
        if job.cut_at is not None:
            self._timings.append(self._timings_of(job, outcome, now - job.cut_at))
        with self._state:
            self._busy = False
            self._state.notify_all()

    def _event(self, what: str, member: Member, job: _Job, **fields: Any) -> None:
        version = str(job.version)
        self._events.append({"event": what, "actor": member.name, "version": version, **fields})

    def _timings_of(self, job: _Job, outcome: Outcome, total_s: float) -> dict[str, float]:
        timings = {"sync/blocked_s": job.blocked_s, "sync/total_s": total_s}
        if {"begin", "receive", "commit"} <= outcome.timings.keys():
            timings |= {
                "sync/pause_s": outcome.timings["commit"][1] - outcome.timings["begin"][0],
                "sync/transfer_s": outcome.took("receive"),
                "sync/bytes": float(self._nbytes),
            }
        return timings

    def _wake(self) -> None:
        with self._state:
            self._state.notify_all()
