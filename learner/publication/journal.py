"""What became of deliveries, until the learner's records and events take it."""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.round import Outcome
from asyncrl.types import Version


class Journal:
    """Written by the sending thread, emptied by training's; each thing is handed out once."""

    def __init__(self, nbytes: int, pauses: bool = True) -> None:
        self._nbytes, self._pauses = nbytes, pauses
        self._timings: deque[dict[str, float]] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._retries = self._checksum_fails = 0

    def note(self, version: Version, outcome: Outcome, joined_s: float | None) -> None:
        """Take note of a delivery; `joined_s` is what it took, if it was apart from a publication.

        Events: weights_cut_out: actor, phase, reason, version. weights_damaged: actor, reason,
        version. weights_joined: actor, version, seconds.
        """
        self._retries += max(0, outcome.rounds - 1)
        self._checksum_fails += len(outcome.damaged)
        for member, reason in outcome.damaged:
            self._event("weights_damaged", member, version, reason=reason)
        if joined_s is not None:
            for member in outcome.applied:
                self._event("weights_joined", member, version, seconds=round(joined_s, 3))
        for cut in outcome.cuts:
            self._event("weights_cut_out", cut.member, version, phase=cut.phase, reason=cut.reason)

    def time(self, outcome: Outcome, seconds: dict[str, float]) -> None:
        """Take the times of a publication: `seconds`, and those of its phases.

        sync/pause_s: first request to pause to last commit, as seen from here; each engine's own
        pause lies within. Relays pause nobody. sync/transfer_s: the receive phase. sync/bytes.
        Only with a member that applied it.
        """
        if {"begin", "receive", "commit"} <= outcome.timings.keys():
            pause = outcome.timings["commit"][1] - outcome.timings["begin"][0]
            seconds = (
                seconds
                | ({"sync/pause_s": pause} if self._pauses else {})
                | {
                    "sync/transfer_s": outcome.took("receive"),
                    "sync/bytes": float(self._nbytes),
                }
            )
        self._timings.append(seconds)

    def take_timings(self) -> dict[str, float]:
        """What was timed since the last call; and, so far, sync/retries (rounds repeated because a
        member failed) and sync/checksum_fail (damaged copies that members refused).
        """
        timings: dict[str, float] = {
            "sync/retries": float(self._retries),
            "sync/checksum_fail": float(self._checksum_fails),
        }
        while self._timings:
            timings |= self._timings.popleft()
        return timings

    def take_events(self) -> list[dict[str, Any]]:
        """What happened to members since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _event(self, what: str, member: Member, version: Version, **fields: Any) -> None:
        self._events.append(
            {"event": what, "actor": member.name, "version": str(version), **fields}
        )
