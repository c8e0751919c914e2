"""What a reader needs of status.json (status_file.py writes it), and of what type.

A later asyncrl may add fields under the same schema: what is not named here is passed on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Wait(msgspec.Struct, frozen=True):
    what: str
    on: str
    age_s: float
    deadline_s: float | None = None


class _Role(msgspec.Struct, frozen=True):
    name: str
    state: str
    pid: Pid | None
    restarts: int
    version: int | None
    phase: str | None
    record_age_s: float | None
    open_waits: int
    waits: list[_Wait]
    phase_s: float | None = None

    def __post_init__(self) -> None:
        if self.phase and self.phase_s is None:
            raise ValueError("a phase without its phase_s")


class _Ledger(msgspec.Struct, frozen=True):
    counts: dict[str, int]
    conserved: bool
    waiting_for: str


class _Stalled(msgspec.Struct, frozen=True):
    for_s: float
    why: str


class _Deadline(msgspec.Struct, frozen=True):
    role: str
    what: str
    on: str
    waited_s: float
    ago_s: float


class _Control(msgspec.Struct, frozen=True):
    endpoint: str
    curve: bool
    keys: str | None = None


class _Status(msgspec.Struct, frozen=True):
    run: str
    run_id: str
    pid: Pid
    process_started: float
    host: str
    state: str
    phase: str
    step: int
    steps: int
    version: int
    reward: float | None
    elapsed_s: float
    left_s: float | None
    updated_at: float
    roles: list[_Role]
    ledger: _Ledger | None
    # Older files lack these.
    process_ticks: int | None = None
    actors: int | None = None
    control: _Control | None = None
    stalled: _Stalled | None = None
    deadlines: list[_Deadline] = []


def check(content: Any) -> None:
    """Refuse what is no status.

    Raises:
        msgspec.ValidationError: names the field.
    """
    msgspec.convert(content, _Status)
