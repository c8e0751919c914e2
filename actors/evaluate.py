"""Greedy evaluation of one version on prompts held out from training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.actors.rollout import Encode
from asyncrl.config.schema import Config
from asyncrl.errors import EngineError, RewardError
from asyncrl.protocols import Engine, GenerationRequest, Scorer
from asyncrl.types import GroupId, Prompt, Version


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What one actor's share of the held-out prompts scored.

    >>> EvalResult(Version(0, 0), prompts=4, errors=0, total=3.0).score
    0.75
    """

    version: Version
    """Version that produced every token."""
    prompts: int
    errors: int
    """Prompts whose reward failed; they score 0."""
    total: float
    """Sum of the rewards."""

    @property
    def score(self) -> float:
        """Mean reward."""
        return self.total / self.prompts


async def evaluate(
    config: Config, engine: Engine, reward: Scorer, encode: Encode,
    prompts: Sequence[tuple[GroupId, Prompt]], name: str,
) -> EvalResult:  # fmt: skip
    """Answer `prompts` greedily and score them.

    Raises:
        EngineError: a token came from another version than the first one.
    """
    version = engine.applied
    gate = asyncio.Semaphore(config.rollout.max_in_flight)

    async def one(i: int, prompt: Prompt) -> float | None:
        async with gate:
            generation = await engine.generate(
                GenerationRequest(
                    f"{name}-eval-{version}-{i}",
                    tuple(encode(prompt)),
                    max_new_tokens=config.rollout.max_new_tokens,
                    temperature=0.0,
                )  # fmt: skip
            )
        if generation.version_dispatch != version or generation.version_finish != version:
            raise EngineError(f"version {version} was replaced while it was evaluated")
        try:
            return await reward.score(prompt, generation.text, str(generation.finish_reason))
        except RewardError:
            return None

    scores = await asyncio.gather(*(one(i, p) for i, (_, p) in enumerate(prompts)))
    good = [s for s in scores if s is not None]
    return EvalResult(version, len(scores), len(scores) - len(good), sum(good))
