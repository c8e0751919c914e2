"""Messages of the weights plane: each actor to learner rank 0, and back.

Replies are those of the data plane (Ok, Error).
"""

from __future__ import annotations

from typing import Any

from asyncrl.messages.base import Message
from asyncrl.types import Version


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """An actor says, about once a second, that it takes weights. To learner rank 0; no reply."""

    name: str
    pid: int
    """Of the process that holds the engine: another pid is a restarted actor."""
    endpoint: str
    """Of its weight service."""
    workers: int
    """Ranks of the transfer group that it needs: an engine's workers, 1 for a relay; 0 for an actor
    that loads from its machine's relay and is never sent anything."""
    applied: Version
    """What its engine runs."""
    ready: bool
    """False while an earlier request of a publication is still being served."""


class WeightsInit(Message, frozen=True, kw_only=True, tag="weights_init"):
    """Join the transfer group; `info` is the engine's init info. Reply: Ok, Error."""

    info: dict[str, Any]
    rank_offset: int
    """Rank of this actor's first engine worker in the group."""


class WeightsBegin(Message, frozen=True, kw_only=True, tag="weights_begin"):
    """Pause at a token boundary, drop keys and values, get ready to receive. Reply: Ok."""

    version: Version


class WeightsReceive(Message, frozen=True, kw_only=True, tag="weights_receive"):
    """Join the collective and load what it brings. Reply: Ok when loaded."""

    info: dict[str, Any]


class WeightsCommit(Message, frozen=True, kw_only=True, tag="weights_commit"):
    """Finish, stamp the version, go on generating. Reply: Ok."""

    version: Version


WeightsMessage = (
    Announce | WeightsInit | WeightsBegin | WeightsReceive | WeightsCommit
)  # fmt: skip
"""Announcements, and the phases of a publication."""
