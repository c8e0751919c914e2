"""Long polls: requests that wait at the server until they can be answered or their time is up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrl import wire

M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[M]):
    """A request that waits."""

    identity: bytes
    message: M
    until_s: float
    """Clock time at which it is answered whatever the state."""


class Parked(Generic[M]):
    """Waiting requests by key, oldest first, one for each key."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Waiting[M]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Hashable, waiting: Waiting[M]) -> None:
        """Park a request; there must be none under this key."""
        if key in self._waiting:
            raise KeyError(f"a request is already parked under {key!r}")
        self._waiting[key] = waiting

    def take(self, key: Hashable) -> Waiting[M] | None:
        """Remove a request, if there is one; the caller answers it, or knows its client gone."""
        return self._waiting.pop(key, None)

    def serve(self, answer: Callable[[Waiting[M]], bool]) -> None:
        """Offer each to `answer`, oldest first; those it answered (True) leave."""
        for key, waiting in list(self._waiting.items()):
            if answer(waiting):
                del self._waiting[key]

    def due(self, now: float) -> bool:
        """Whether the time of any is up."""
        return any(w.until_s <= now for w in self._waiting.values())
