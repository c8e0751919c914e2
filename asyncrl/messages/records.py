"""What any role tells the hub: metrics, events, open waits."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.messages.base import Message


class OpenWait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a process waits for now."""

    what: str
    """E.g. "batch 31"."""
    on: str
    """Who can end the wait, e.g. "buffer-0: 12 samples held by actor-3 (lease 812, 41 s)"."""
    age_s: float
    """Since when."""
    deadline_s: float | None = None
    """Seconds left until it is given up; None where the other side has the deadline."""


class Record(Message, frozen=True, kw_only=True, tag="record"):
    """One line of metrics.jsonl (docs/metrics.md), an event for events.jsonl, or open waits."""

    role: str
    rank: int
    step: int
    version: int
    incarnation: int
    metrics: dict[str, float] = {}
    hist: dict[str, dict[str, list[float]]] = {}
    event: dict[str, Any] | None = None
    waits: tuple[OpenWait, ...] | None = None
    """All open waits of the process; None where the record does not speak of them."""
    pid: int | None = None
    """Of the process that writes: another one than before is a restart."""
