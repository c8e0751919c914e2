"""Messages of the data plane: clients to the buffer, and its replies."""

from __future__ import annotations

from typing import Literal

from asyncrl.messages.base import Message, State
from asyncrl.types import FailureKind, Lease, SampleHeader, SampleId, Version

# --- requests to the buffer -------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client. Reply: Ok, or Error when the run id is another one."""

    run_id: str
    role: str
    rank: int
    pid: int
    resumed: bool = False
    """The same process says hello again, because the buffer was restarted."""
    leases: tuple[int, ...] = ()
    """With `resumed`, the leases that the actor works on; others that it had are freed."""


class LeaseRequest(Message, frozen=True, kw_only=True, tag="lease_request"):
    """An actor asks for work. Reply: Leases, at the latest after `wait_s` seconds."""

    actor: str
    applied: Version
    """What its engine runs now: admission counts on it."""
    capacity: int
    """Samples it has room for."""
    wait_s: float


class Push(Message, frozen=True, kw_only=True, tag="push"):
    """A finished sample; its payload is the one frame that follows. Reply: Ack."""

    header: SampleHeader


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """Tokens produced so far by each lease; a growing number renews the lease. Reply: Ok."""

    actor: str
    tokens: dict[int, int]


class Fail(Message, frozen=True, kw_only=True, tag="fail"):
    """A sample could not be produced. Reply: Ack."""

    actor: str
    lease: int
    id: SampleId
    kind: FailureKind
    reason: str


class Pull(Message, frozen=True, kw_only=True, tag="pull"):
    """A learner rank asks for its part of batch k. Reply: Part, NotYet or Stopped."""

    rank: int
    batch: int
    wait_s: float


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """Batch k is trained, less the samples dropped by the staleness check. Reply: Ok."""

    batch: int
    dropped: tuple[SampleId, ...] = ()
    incarnation: int = 0
    """Of the learner that trained it: an earlier one's word, late, would count for the next."""


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """The learner cut the snapshot of this version. Reply: Ok."""

    version: Version


class Covered(Message, frozen=True, kw_only=True, tag="covered"):
    """A checkpoint of the learner covers all batches up to this one. Reply: Ok."""

    batch: int


class Rewind(Message, frozen=True, kw_only=True, tag="rewind"):
    """The learner restarted from the checkpoint that covers batch k. Reply: Ok."""

    batch: int
    """0: from the initial model."""
    incarnation: int
    """Of the restarted learner: above the last one."""


class SaveLedger(Message, frozen=True, kw_only=True, tag="save_ledger"):
    """The learner makes the checkpoint of batch k: write a copy of the ledger. Reply: Saved."""

    path: str
    """Folder to write it into, below the run's; its parent is there."""
    batch: int
    """Committed, and not covered by more: the copy has what was committed after it as well."""


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End the run: no more leases, no more batches. Reply: Ok."""

    reason: str
    final: Version | None = None
    """The last version, when the learner finished; actors wait for it before a last eval."""
    evaluate: bool = False
    """Whether the final version is to be evaluated: it is, unless somebody interrupted the run."""


class Gone(Message, frozen=True, kw_only=True, tag="gone"):
    """The launcher says that an actor's process has ended: its leases are free. Reply: Ok."""

    actor: str
    reason: str


class Scale(Message, frozen=True, kw_only=True, tag="scale"):
    """The run is to have so many actors.

    To the launcher, from `asyncrl scale`; reply: Scaled or Error. And from it to the buffer, again
    whenever `leaving` changes; reply: Ok.
    """

    run_id: str
    actors: int
    leaving: tuple[str, ...] = ()
    """To the buffer: names of the actors that get no more leases (`Leases.leave`)."""


class StatsRequest(Message, frozen=True, kw_only=True, tag="stats_request"):
    """Ask for the ledger's counts. Reply: Stats."""


# --- replies of the buffer ----------------------------------------------------------------


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Done."""

    checkpoint: bool = False
    """To a Commit: bytes hold actors back until a checkpoint covers what is kept (Covered)."""


class Error(Message, frozen=True, kw_only=True, tag="error"):
    """Refused. `error` is the class of asyncrl.errors, `message` says why."""

    error: str
    message: str


class Leases(Message, frozen=True, kw_only=True, tag="leases"):
    """Leases granted, possibly none."""

    leases: tuple[Lease, ...] = ()
    state: State = "running"
    final: Version | None = None
    """With state "done": the version to wait for."""
    evaluate: bool = False
    """With state "done": whether to evaluate it."""
    held_back: bool = False
    """True when admission or bytes, not a lack of prompts, are why there are none."""
    leave: bool = False
    """The actor is to finish what it has, and end: it gets no more."""
    actors: int = 0
    """How many actors the run is to have since it was scaled; 0: as many as at its launch."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """What became of a pushed or failed sample."""

    status: Literal["accepted", "duplicate", "unknown"]


class Part(Message, frozen=True, kw_only=True, tag="part"):
    """A rank's part of a batch; the payloads of its samples follow, in the order of `mine`."""

    batch: int
    rank: int
    manifest: tuple[SampleHeader, ...]
    fresh: int
    """`manifest[:fresh]` are fresh samples, `manifest[fresh:]` are replayed ones."""
    mine: tuple[int, ...]


class NotYet(Message, frozen=True, kw_only=True, tag="not_yet"):
    """The batch is not complete; `waiting_for` names what is missing and who holds it."""

    waiting_for: str


class Stopped(Message, frozen=True, kw_only=True, tag="stopped"):
    """The run is ending; there will be no such batch."""

    reason: str


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """The ledger's counts and gauges."""

    counts: dict[str, int]
    gauges: dict[str, float]
    conserved: bool
    state: State
    final: Version | None = None
    """As in Leases."""
    evaluate: bool = False
    """As in Leases."""
    reason: str = ""
    """Why the run is stopping or done."""
    waiting_for: str = ""
    """What the next batch lacks and who holds it; empty when it is complete."""


class Saved(Message, frozen=True, kw_only=True, tag="saved"):
    """The copy that a SaveLedger asked for is complete, and on the disk."""

    samples: int
    """Whose payloads are in it."""
    nbytes: int
    """Of its file."""


class Scaled(Message, frozen=True, kw_only=True, tag="scaled"):
    """The launcher's answer to a Scale: what happens now."""

    before: int
    actors: int
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


DataMessage = (
    Hello | LeaseRequest | Push | Progress | Fail | Pull | Commit | Published | Covered
    | Rewind | SaveLedger | Stop | Gone | Scale | StatsRequest | Ok | Error | Leases | Ack
    | Part | NotYet | Stopped | Stats | Saved | Scaled
)  # fmt: skip
"""Requests to the buffer or the launcher, and replies."""
