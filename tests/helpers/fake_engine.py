"""An engine without a model, for speed: it keeps the rules that the real one keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from asyncrl.errors import EngineError
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import FinishReason, Version


class FakeEngine:
    """Produces `length` tokens a request, a few at a time, stamped with the version of each step.

    Rejects what vLLM rejects: empty prompts, a request id in use, prompts that leave no room in
    the context, and any request after its death.
    """

    def __init__(self, *, length: int = 6, context: int = 64) -> None:
        self.length, self.context = length, context
        self.version = Version(0, 0)
        self.failed: str | None = None
        self.held_up = False
        self.in_use: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def applied(self) -> Version:
        return self.version

    async def generate(
        self, request: GenerationRequest, on_tokens: Callable[[int], None] | None = None
    ) -> Generation:
        if not request.prompt_ids:
            raise EngineError("empty prompt")
        if request.request_id in self.in_use:
            raise EngineError(f"request id {request.request_id} is in use")
        if len(request.prompt_ids) + request.max_new_tokens > self.context:
            raise EngineError(f"{len(request.prompt_ids)} tokens do not fit")
        self.in_use.add(request.request_id)
        dispatch, stamps = self.version, []
        try:
            for _ in range(min(self.length, request.max_new_tokens)):
                await self.gate.wait()
                await asyncio.sleep(0)
                if self.failed is not None:
                    raise EngineError(self.failed)
                stamps.append(self.version)
                if on_tokens is not None:
                    on_tokens(1)
        finally:
            self.in_use.discard(request.request_id)
        n = len(stamps)
        return Generation(
            response_ids=np.arange(n, dtype=np.int32),
            logprobs=np.full(n, -0.5, np.float32),
            versions=np.array([s.version for s in stamps], np.int32),
            incarnations=np.array([s.incarnation for s in stamps], np.int32),
            version_dispatch=dispatch, version_finish=stamps[-1],
            finish_reason=FinishReason.STOP, text="x" * n,
        )  # fmt: skip

    async def shutdown(self) -> None:
        self.failed = "the engine was shut down"
