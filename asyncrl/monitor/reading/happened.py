"""A run's events for people: versions as everywhere else, and what happens all the time folded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.monitor import words

ROUTINE = frozenset({"publication", "checkpoint", "eval"})
"""Kinds that are told as one until something else happens: "publication x 12"."""
MOST = 1_000
"""The newest that are kept, folded."""
USUAL = frozenset({"run_id", "role", "rank", "step", "version", "incarnation", "wall_s", "event"})


@dataclass(slots=True)
class _Told:
    last: Mapping[str, Any]
    first: Mapping[str, Any]
    count: int = 1


class Happened:
    """Takes events one by one; memory and time do not grow with their number."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}
        self._open: dict[tuple[str, str], int] = {}
        """Of each role and routine kind, where its events since the last other one are."""
        self._next = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        key = (_role(event), str(event.get("event", "")))
        if key[1] not in ROUTINE:
            self._open.clear()
        before = self._told.pop(self._open.get(key, -1), None)  # it goes to the end
        if before is None:
            self._told[self._next] = _Told(event, event)
        else:
            self._told[self._next] = _Told(event, before.first, before.count + 1)
        if key[1] in ROUTINE:
            self._open[key] = self._next
        self._next += 1
        if len(self._told) > MOST:
            del self._told[next(iter(self._told))]

    def newest(self, n: int) -> list[dict[str, Any]]:
        """The newest n, the last one last: `at`, `role`, `event`, `count`, `more`."""
        return [_words(told) for told in list(self._told.values())[-n:]]


def _role(event: Mapping[str, Any]) -> str:
    return words.named(str(event.get("role", "")), event.get("rank", 0))


def _words(told: _Told) -> dict[str, Any]:
    event, at = told.last, told.last.get("wall_s")
    known = isinstance(at, int | float) and abs(at) < math.inf
    more = {k: v for k, v in event.items() if k not in USUAL and v is not None}
    parts = []
    if (version := _version(more.pop("publication", None))) is not None:
        first = _version(told.first.get("publication"))
        parts.append(f"version {version}" if first in (version, None)
                     else f"versions {first} to {version}")  # fmt: skip
    return {
        "at": words.clock(at if known else None), "role": _role(event),
        "event": str(event.get("event", "")), "count": told.count,
        "more": ", ".join([*parts, *(f"{k} {_short(v)}" for k, v in more.items())]),
    }  # fmt: skip


def _version(publication: Any) -> str | None:
    """INCARNATION:VERSION as the version alone, which is what screens call it."""
    return None if publication is None else _short(publication).rpartition(":")[2]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:119] + "…"
