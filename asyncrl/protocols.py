"""The interfaces through which the roles meet. Replacing one part never touches another.

Engine            what an actor generates with            actors/vllm_engine.py
Reward            the function that scores a response     actors/rewards/functions.py
Scorer            what the actor asks for a reward        actors/rewards/worker.py
WeightSubscriber  how an engine or relay takes weights    actors/weights.py, relay/receiver.py
WeightPublisher   how the learner sends them              learner/publication/publish.py
MetricSink        where records go                        asyncrl/sinks.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from asyncrl.types import FinishReason, Prompt, Version


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to produce.

    >>> GenerationRequest("r1", (5, 6), max_new_tokens=8, temperature=1.0).prompt_ids
    (5, 6)
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    """[P] token ids."""
    max_new_tokens: int
    temperature: float
    """0 is greedy."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One response, stamped. Arrays have shape [T]."""

    response_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """log mu of each token, in nats, after temperature (what was sampled from)."""
    versions: npt.NDArray[np.int32]
    incarnations: npt.NDArray[np.int32]
    version_dispatch: Version
    """Applied when the request was issued."""
    version_finish: Version
    """The last token's own stamp."""
    finish_reason: FinishReason
    text: str
    kv_mixed: bool = False
    """Whether a token may rest on keys and values of an older version."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine that generates while its weights change."""

    @property
    def applied(self) -> Version:
        """The version that new forward passes run with."""

    @property
    def held_up(self) -> bool:
        """Whether a weight update keeps requests from going on; it has deadlines of its own."""

    async def generate(
        self, request: GenerationRequest, on_tokens: Callable[[int], None] | None = None
    ) -> Generation:
        """Generate one response; `on_tokens` hears the number of new tokens now and then.

        Cancelling the call aborts the request in the engine.

        Raises:
            EngineError: the engine died or refused the request.
        """

    async def shutdown(self) -> None:
        """End the engine and its processes."""


class WeightSubscriber(Protocol):
    """The actor's side of a publication: join when the group is new; begin, receive, commit."""

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join the transfer group described by the publisher."""

    async def begin(self, version: Version) -> None:
        """Pause at a token boundary, empty the prefix cache, get ready to receive."""

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Take part in the collective and load what it brings."""

    async def commit(self, version: Version) -> None:
        """Finish, stamp the version, go on generating."""


class WeightPublisher(Protocol):
    """The learner's side of a publication, called on every rank: each copies its own shards."""

    def publish(self, version: Version) -> None:
        """Snapshot the weights as `version` and send them beside training.

        Waits only if the previous publication has not left.

        Raises:
            WeightSyncError: the previous publication is stuck. That an actor did not take a
                version is no error here: it gets it, or a newer one, later.
        """

    def finish(self, timeout_s: float) -> list[str]:
        """Wait until all have applied the last version; names of those that have not in time."""

    def take_timings(self) -> dict[str, float]:
        """Metrics of the publication that left since the last call (docs/metrics.md, sync/*)."""

    def take_events(self) -> list[dict[str, Any]]:
        """What happened to actors since the last call, for events.jsonl."""

    def waiting_for(self) -> str:
        """Phase and names of whom a publication waits for; "" when idle."""

    def close(self) -> None:
        """Wait for the last publication and leave the group."""


class Reward(Protocol):
    """Scores a response. Runs in a worker process that is killed past its deadline."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /) -> float:
        """The reward, a finite number."""


class Scorer(Protocol):
    """Has responses scored, many at once, wherever the `Reward` runs."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """The reward, a finite number.

        Raises:
            RewardError: there is none; it was too late, failed, or was no finite number.
        """


class MetricSink(Protocol):
    """A consumer of records (metrics.jsonl, wandb)."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record (the fields of docs/metrics.md)."""

    def close(self) -> None:
        """Flush and end."""
