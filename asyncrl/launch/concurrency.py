"""An actor that ran out of memory goes on with fewer samples in flight."""

from __future__ import annotations

from dataclasses import replace

from asyncrl import out_of_memory
from asyncrl.errors import AsyncRLError, EngineMemoryError
from asyncrl.launch.processes.role_main import RoleSpec

SETTING = "rollout.max_in_flight"
KILLED = "was killed by SIGKILL"
"""How the fork server writes into a role's log that it was."""


def lacked_memory(error: AsyncRLError, kills: int | None) -> bool:
    """Whether that is why an actor failed.

    Args:
        kills: what `out_of_memory.kills` said when it was started.
    """
    if isinstance(error, EngineMemoryError):
        return True
    now = out_of_memory.kills()
    counted = kills is not None and now is not None and now > kills
    return counted and KILLED in str(error)


def with_in_flight(spec: RoleSpec, samples: int | None) -> RoleSpec:
    """An actor's spec with so many samples in flight at most; None is the setting."""
    if samples is None:
        return spec
    rollout = spec.config.rollout.model_copy(update={"max_in_flight": samples})
    return replace(spec, config=spec.config.model_copy(update={"rollout": rollout}))
