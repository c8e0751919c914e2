"""From the command to the first step: which phase of which role ended when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.monitor import words


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a role's start.

    >>> Phase("actor-0", "engine", seconds=3.6, ended_s=14.2).name
    'engine'
    """

    role: str
    name: str
    seconds: float
    """How long it took."""
    ended_s: float
    """Seconds from the command to its end."""


@dataclass
class Startup:
    """Gathered from the events of kind "startup", up to the first step."""

    phases: list[Phase] = field(default_factory=list)
    first_token_s: float | None = None

    def write(self, record: Mapping[str, Any], since_start: float) -> None:
        """Take note of a record that came `since_start` seconds after the command."""
        event = record["event"]
        if event is None or event["event"] != "startup":
            return
        role = words.named(record["role"], record["rank"])
        self.phases.append(Phase(role, event["phase"], event["seconds"], round(since_start, 2)))
        if event["phase"] == "first_token" and self.first_token_s is None:
            self.first_token_s = round(since_start, 2)

    def longest(self) -> dict[str, float]:
        """Seconds of each phase, the slowest role's where several went through it."""
        spans: dict[str, float] = {}
        for phase in self.phases:
            spans[phase.name] = max(spans.get(phase.name, 0.0), phase.seconds)
        return spans
