"""What is kept for the timeline of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from asyncrl.config.section import Section


class TraceConfig(Section):
    """When each process did what, in the run's `trace/`: what `asyncrl trace` draws."""

    enabled: bool = True
    """Keep it; a line for each sample, batch and change of what a process does."""
    max_mib: Annotated[float, Field(gt=0)] = 64.0
    """Of each process; beyond it the oldest half is forgotten."""

    @property
    def kept_mib(self) -> float | None:
        """`max_mib`; None when nothing is kept."""
        return self.max_mib if self.enabled else None
