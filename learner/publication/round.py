"""One delivery: a version to some members, whoever of them fails.

    members ──► group formed anew if it is another one ──► begin ─ receive ─ commit ──► applied
                  ▲                                               │ somebody failed
                  └── those who are not to blame, same version ◄──┴──► cut out, by name

Each failed round cuts at least one member out, or repeats the version for members whose copy
arrived damaged, DAMAGED_TRIES times at most. Every phase has its deadline (`weight_fleet.Limits`);
no round begins after the delivery's own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.learner.publication.weight_fleet import Failure, FleetClient, Limits
from asyncrl.security import Keys
from asyncrl.types import Version

DAMAGED_TRIES = 3
"""Copies of one version that a member may refuse as damaged before it is cut out."""


class Cut(NamedTuple):
    """A member that did not get the version."""

    member: Member
    phase: str
    reason: str
    gone: bool
    """Its process has ended."""


@dataclass
class Outcome:
    """What became of a delivery: each member is in one of the two lists."""

    applied: list[Member] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    damaged: list[tuple[Member, str]] = field(default_factory=list)
    """Who refused a copy, and which tensors were wrong: once for each copy."""
    rounds: int = 0
    timings: dict[str, tuple[float, float]] = field(default_factory=dict)
    """First start and last end (time.monotonic) of each phase over all rounds."""

    def took(self, phase: str) -> float:
        """Seconds of a phase, rounds in between included."""
        start, end = self.timings[phase]
        return end - start

    def _note_damage(self, failures: Mapping[Member, Failure]) -> dict[Member, Failure]:
        """Count the damaged copies; those who are not worth another try."""
        damaged = {m: f for m, f in failures.items() if f.kind == "damaged"}
        self.damaged += [(m, f.reason) for m, f in damaged.items()]
        refused = [m for m, _ in self.damaged]
        return {m: f for m, f in damaged.items() if refused.count(m) >= DAMAGED_TRIES}

    def _note(self, timings: Mapping[str, tuple[float, float]]) -> None:
        for phase, (start, end) in timings.items():
            self.timings[phase] = (self.timings.get(phase, (start, end))[0], end)


class Courier:
    """Holds the transfer group and delivers through it, in one thread."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        backend: Literal["gloo", "nccl"],
        address: str,
        device: torch.device,
        timeout_s: float,
        drain_s: float = 0.0,
        keys: Keys | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._backend = backend
        self._address = address
        self._device = device
        self._limits = Limits.of(timeout_s, snapshot.load_bytes, drain_s)
        self._keys = keys
        self._client: FleetClient | None = None
        self._sender: Any = None

    @property
    def deadline(self) -> float:
        """When what is under way ends at the latest, unless it is stuck (time.monotonic)."""
        client = self._client
        return client.deadline if client is not None else 0.0

    def waiting_for(self) -> str:
        """Phase, members that have not answered and the seconds left; "" when idle."""
        client = self._client
        return client.waiting_for() if client is not None else ""

    def deliver(self, version: Version, members: Sequence[Member], deadline: float) -> Outcome:
        """Bring the snapshot to `members` as `version`; rounds begin until `deadline`."""
        if self._device.type != "cuda":
            return self._deliver(version, members, deadline)
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return self._deliver(version, members, deadline)  # beside training's stream

    def _deliver(self, version: Version, members: Sequence[Member], deadline: float) -> Outcome:
        outcome, todo = Outcome(), list(members)
        while todo:
            if outcome.rounds and time.monotonic() >= deadline:
                reason = "the publication's deadline passed before another try"
                outcome.cuts += [Cut(m, "join", reason, False) for m in todo]
                break
            outcome.rounds += 1
            client, error = self._round(version, todo)
            outcome._note(client.timings)
            blamed = _blame(client, todo, error) | outcome._note_damage(client.failures)
            outcome.applied += client.applied
            for member, failure in blamed.items():
                if failure.kind == "applied":
                    outcome.applied.append(member)
                else:
                    gone = failure.kind == "gone"
                    outcome.cuts.append(Cut(member, failure.phase, failure.reason, gone))
            todo = [m for m in todo if m not in client.applied and m not in blamed]
        return outcome

    def leave(self) -> None:
        """Leave the group, if there is one; its members notice at once."""
        sender, self._sender = self._sender, None
        client, self._client = self._client, None
        if sender is not None:
            with contextlib.suppress(RuntimeError):  # it may be broken already
                sender.shutdown()
        if client is not None:
            client.close()

    def _round(self, version: Version, members: Sequence[Member]) -> tuple[FleetClient, str]:
        """One try with all of `members`: what each answered, and why it failed ("": it did not)."""
        client = self._client
        if client is None or client.members != tuple(members):
            self.leave()
            client = self._client = FleetClient(members, self._limits, self._keys)
            # The sender may need long for its part of the joining, before it asks anybody.
            client.deadline = time.monotonic() + self._limits.step_s + self._limits.margin_s
        client.start_round(version)
        try:
            if self._sender is None:
                self._sender = self._join(client)
            self._sender.send_weights()
        except (WeightSyncError, RuntimeError, OSError) as e:
            if client.received and "commit" not in client.timings:
                # They hold the whole version, whatever became of the others.
                with contextlib.suppress(WeightSyncError):
                    client.finish_weight_update()
            self.leave()
            return client, f"{type(e).__name__}: {e}"
        return client, ""

    def _join(self, client: FleetClient) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from asyncrl.learner.publication.gloo_sender import GlooTrainerInitInfo, SnapshotSource

        world_size = 1 + sum(m.workers for m in client.members)
        init: Any
        if self._backend == "gloo":
            init = GlooTrainerInitInfo(self._address, world_size, self._limits.step_s, rank=0)
        else:
            init = nccl_init_info(self._address, world_size)
        return WeightTransferTrainerFactory.trainer_init(
            init, client=client, source=SnapshotSource(self._snapshot, self._device)
        )


def _blame(client: FleetClient, members: Sequence[Member], error: str) -> dict[Member, Failure]:
    """Who is not asked again after a failed round.

    An engine that refuses to join or to receive may do so because another one broke the group.
    Where nobody is seen to have done that, it was the one who refused first: the others notice
    by its leaving. Where nobody refused either, the sender is to blame, and all wait for a while.
    """
    failures = client.failures
    maybe_hit = [
        m for m, f in failures.items() if f.kind == "refused" and f.phase in ("join", "receive")
    ]
    blamed = {m: f for m, f in failures.items() if m not in maybe_hit and f.kind != "damaged"}
    if not blamed and maybe_hit:
        blamed = {maybe_hit[0]: failures[maybe_hit[0]]}
    elif not failures and error:
        blamed = {m: Failure("send", "refused", error) for m in members if m not in client.applied}
    return blamed


def nccl_init_info(address: str, world_size: int) -> Any:
    """vLLM's own NCCL engine; its rendezvous wants a port number, so a free one is looked up.

    Between the probe and vLLM's bind another process could take the port (a small race, since
    vLLM takes no bound socket); its bind then fails, and the members are tried again later.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=world_size, rank=0
    )
