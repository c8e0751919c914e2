"""A response of vLLM as its outputs come in: tokens, log-probabilities, version labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import EngineError
from asyncrl.types import Version


@dataclass(slots=True)
class Parts:
    """A response as its outputs come in."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    spans: Sequence[Any] | None = None

    def add(self, delta: Any) -> int:
        """Take one output; returns its number of new tokens."""
        self.ids.extend(delta.token_ids)
        if delta.token_ids:
            flat = delta.logprobs  # vLLM's FlatLogprobs: the sampled token comes first
            self.logprobs.extend(flat.logprobs[i] for i in flat.start_indices)
        self.finish_reason = delta.finish_reason
        self.spans = delta.weight_versions
        return len(delta.token_ids)

    def stamps(self) -> list[Version]:
        """The version of each token."""
        stamps = [
            version
            for span in self.spans or ()
            for version in [Version.parse(span.version)] * (span.end - span.start)
        ]
        if not len(stamps) == len(self.logprobs) == len(self.ids):
            raise EngineError(
                f"vLLM returned {len(self.ids)} tokens with {len(stamps)} version labels and "
                f"{len(self.logprobs)} log-probabilities"
            )
        return stamps
