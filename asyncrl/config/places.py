"""Entries of `cluster.actor_places` and `cluster.learner_places`: NODE or NODE:GPU,GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

Role = Literal["actor", "learner"]
_ENTRY = re.compile(r"(?P<node>[^\s:,]+)(?::(?P<gpus>[0-9]+(?:,[0-9]+)*))?")


@dataclass(frozen=True, slots=True)
class Wish:
    """Where a role member is to run.

    >>> Wish.read("10.0.0.7:2,3", "cluster.actor_places")
    Wish(node='10.0.0.7', gpus=('2', '3'))
    """

    node: str
    gpus: tuple[str, ...]
    """Ids of its GPUs; empty leaves the choice to Ray."""

    @classmethod
    def read(cls, entry: str, key: str) -> Wish:
        """Raises ConfigError for what is no entry; `key` opens the message."""
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"{key}: {entry!r} is no place: write NODE or NODE:GPU,GPU, e.g. local:0,1"
            )
        gpus = match["gpus"]
        return cls(match["node"], tuple(str(int(g)) for g in gpus.split(",")) if gpus else ())


def wishes(config: Config, role: Role) -> tuple[Wish, ...]:
    """What `cluster.ROLE_places` asks for, one per member; an only entry stands for all.

    Raises:
        ConfigError: it is not set, an entry is malformed, or there are too few or too many.
    """
    key, cluster = f"cluster.{role}_places", config.cluster
    entries, members = (
        (cluster.actor_places, cluster.actors)
        if role == "actor"
        else (cluster.learner_places, cluster.learners)
    )
    if not entries:
        raise ConfigError(
            f"{key} is not set: cluster.placement=explicit needs one NODE or NODE:GPU,GPU per "
            f"{role}, or one NODE for all"
        )
    found = tuple(Wish.read(entry, key) for entry in entries)
    if len(found) == 1 and not found[0].gpus:
        return found * members
    if len(found) != members:
        raise ConfigError(
            f"{key} has {len(found)} entries and cluster.{role}s={members}: give one per {role}, "
            "or one NODE without GPUs for all"
        )
    return found
