"""What becomes of requests under way when an engine takes new weights (`weights.in_flight`).

    keep     freeze ► swap ► compute their keys and values anew ► go on
    keep_kv  freeze ► swap ► go on with the old keys and values: the sample is marked kv_mixed
    abort    end them with the tokens so far ► swap ► resubmit prompt and tokens as a new prompt
    wait     let them end, start no other ► swap; past the deadline as keep

In each the swap lies between two forward passes, so that a token's label is that of the weights
that produced it, and no request issued after it finds older keys and values in the prefix cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from asyncrl.config.schema import InFlightMode
from asyncrl.types import Version

log = logging.getLogger(__name__)


class InFlight:
    """One engine's mode, and what it has cost so far. `llm` is vLLM's AsyncLLM.

    `drain_s` is how long (seconds) `wait` waits.
    """

    def __init__(self, mode: InFlightMode = "keep", drain_s: float = 0.0) -> None:
        self.mode = mode
        self.drain_s = drain_s
        self.held_up = False
        """Whether an update is under way."""
        self.updates = 0
        """Updates that are over."""
        self.resubmitted = 0
        """Requests issued again with their tokens so far."""
        self.drain_timeouts = 0
        """Updates that did not wait for the last requests any longer."""

    async def pause(self, llm: Any) -> None:
        """Bring generation to a stop at a token boundary and empty the prefix cache."""
        self.held_up = True
        if self.mode == "wait":
            await self._drain(llm)
        else:
            # Blocks in use cannot be dropped from the cache alone: keep_kv has `prompt` for that.
            mode = "abort" if self.mode == "abort" else "keep"
            await _stop(llm, mode, clear_cache=self.mode != "keep_kv")

    async def resume(self, llm: Any) -> None:
        """Go on generating, with whichever weights."""
        await llm.resume_generation()
        self.held_up = False
        self.updates += 1

    def prompt(self, ids: Sequence[int], applied: Version) -> dict[str, Any]:
        """What vLLM gets for a prompt that is issued while `applied` runs.

        With keep_kv the prefix cache cannot be emptied: each version has a part of its own.
        """
        salt = {"cache_salt": str(applied)} if self.mode == "keep_kv" else {}
        return {"prompt_token_ids": list(ids), **salt}

    def kv_mixed(self, stamps: Sequence[Version], dispatch: Version) -> bool:
        """Whether a token may rest on keys and values of an older version.

        So it is where a token is newer than its request, whose part of the prefix cache is old.
        """
        return self.mode == "keep_kv" and any(stamp != dispatch for stamp in stamps)

    def aborted(self, finish_reason: str | None, updates: int) -> bool:
        """Whether an update ended a request that was issued after `updates` of them."""
        since = self.held_up or self.updates != updates
        return self.mode == "abort" and finish_reason == "abort" and since

    async def _drain(self, llm: Any) -> None:
        # vLLM takes a request that it preempts meanwhile, for lack of cache, for one not begun:
        # that goes on with the new weights, rightly stamped.
        draining = asyncio.ensure_future(_stop(llm, "wait"))
        try:
            done, _ = await asyncio.wait({draining}, timeout=self.drain_s)
            if not done:
                self.drain_timeouts += 1
                log.warning(
                    "requests still ran %.0f s after a publication (weights.timeout_s): they go on "
                    "with the new weights, as with weights.in_flight=keep", self.drain_s,
                )  # fmt: skip
                await _stop(llm, "keep")
            await draining
        finally:
            draining.cancel()


async def _stop(llm: Any, mode: str, *, clear_cache: bool = True) -> None:
    """vLLM's `pause_generation`, without the 20 ms that it sleeps at its end, so that the last
    outputs are seen before it returns: here a late one is as good (`aborted`)."""
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
