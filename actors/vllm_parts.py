"""A response of vLLM as its outputs come in: tokens, log-probabilities, version labels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.errors import EngineError
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import FinishReason, Version


@dataclass(slots=True)
class Parts:
    """A response as its outputs come in, from one request or from several in a row."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[Version] = field(default_factory=list)
    """Of the tokens of requests that have ended: vLLM tells them with the last output."""
    finish_reason: str | None = None
    requests: int = 0

    def next_request(self) -> GenerationRequest:
        """What to ask for: the response, or the rest of it after the tokens so far."""
        request, self.requests = self.request, self.requests + 1
        if self.requests == 1:
            return request
        return replace(
            request,
            request_id=f"{request.request_id}+{self.requests - 1}",
            prompt_ids=(*request.prompt_ids, *self.ids),
            max_new_tokens=request.max_new_tokens - len(self.ids),
        )

    def add(self, delta: Any) -> int:
        """Take one output; returns its number of new tokens."""
        self.ids.extend(delta.token_ids)
        if delta.token_ids:
            flat = delta.logprobs  # vLLM's FlatLogprobs: the sampled token comes first
            self.logprobs.extend(flat.logprobs[i] for i in flat.start_indices)
        self.finish_reason = delta.finish_reason
        for span in delta.weight_versions or ():
            self.labels += [Version.parse(span.version)] * (span.end - span.start)
        return len(delta.token_ids)

    def stamps(self) -> list[Version]:
        """The version of each token."""
        if not len(self.labels) == len(self.logprobs) == len(self.ids):
            raise EngineError(
                f"vLLM returned {len(self.ids)} tokens with {len(self.labels)} version labels and "
                f"{len(self.logprobs)} log-probabilities"
            )
        return self.labels

    def generation(self, dispatch: Version, *, kv_mixed: bool, text: str) -> Generation:
        """The whole response, issued when `dispatch` was applied."""
        try:
            reason = FinishReason(self.finish_reason or "none")
        except ValueError:
            raise EngineError(
                f"request {self.request.request_id} ended with {self.finish_reason!r}"
            ) from None
        stamps = self.stamps()
        return Generation(
            response_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array([v.version for v in stamps], np.int32),
            incarnations=np.array([v.incarnation for v in stamps], np.int32),
            version_dispatch=dispatch,
            version_finish=stamps[-1] if stamps else dispatch,
            finish_reason=reason,
            text=text,
            kv_mixed=kv_mixed,
        )
