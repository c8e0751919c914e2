"""Actors and learner ranks that may be killed at any time, each a process with a log of its own.

    python -m tests.helpers.chaos_roles actor|learner '{"rank": 0, "endpoint": ..., "folder": ...}'

They work with the product's clients and remember only what their logs say. A log is a line a fact
and is fsynced before its writer goes on; its torn end is cut off by whoever takes it up again.
What becomes of a sample follows from its id alone (`reward_of`, `fails`), so that a test can say
which groups must be trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import wire
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.roles import end_with
from asyncrl.types import BatchPart, Envelope, FailureKind, Lease, Prompt, Version
from tests.buffer.samples import trajectory
from tests.helpers.eventually import eventually

RUN_ID = "r"
GROUP, GROUPS, RANKS, STALENESS = 4, 4, 2, 2
KEPT_BATCHES = 3
"""Batches that the learner's last checkpoint does not cover."""
LONGEST_S = 0.5
"""Time that a sample takes to make: who is killed has most likely not finished."""
WAIT_S = 0.3
"""Time that requests ask to wait, and after which they are sent again: a restart costs twice it."""
TIMEOUT_S = 120.0
"""Time for a reply: the buffer may be dead for a while."""


def reward_of(index: int, k: int) -> float:
    """0 and 1 in turns; in one group of eight all are equal, and it is filtered out."""
    return float((index + k) % 2) if index % 8 else 1.0


def fails(index: int, k: int) -> bool:
    """One sample of every tenth group never comes: its group goes on without it."""
    return index % 10 == 3 and k == index // 10 % GROUP


class Log:
    """Lines that are on disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        self.lines = whole_lines(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._fd, sum(len(line.encode()) + 1 for line in self.lines))

    def add(self, facts: Sequence[Any], sync: bool = True) -> None:
        """Append one line of JSON for each fact, all in one write."""
        if facts:
            os.write(self._fd, "".join(json.dumps(fact) + "\n" for fact in facts).encode())
            if sync:
                os.fsync(self._fd)


def whole_lines(path: Path) -> list[str]:
    """The lines of a log that somebody may be writing, without a torn last one."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class Spec:
    """A role's command line."""

    rank: int
    endpoint: str
    folder: str

    def log(self, role: str, rank: int) -> Path:
        return Path(self.folder) / f"{role}-{rank}.log"

    @property
    def version_file(self) -> Path:
        return Path(self.folder) / "version"


# --- an actor ---------------------------------------------------------------------------------


async def act(spec: Spec) -> None:
    """Make samples until the run is over."""
    log = Log(spec.log("actor", spec.rank))
    client = AsyncBufferClient(
        spec.endpoint, RUN_ID, "actor", spec.rank, timeout_s=TIMEOUT_S, resend_s=WAIT_S
    )
    try:
        await client.hello()
        while True:
            applied = Version(0, int(spec.version_file.read_text()))
            reply = await client.lease(client.name, applied, 4, wait_s=WAIT_S)
            if reply.state != "running":
                return
            work = [(lease, k) for lease in reply.leases for k in lease.samples]
            log.add([("made", x.group.index, k) for x, k in work], sync=False)
            statuses = await asyncio.gather(*(produce(client, x, k) for x, k in work))
            log.add([(s, x.group.index, k) for s, (x, k) in zip(statuses, work, strict=True)])
    finally:
        client.close()


async def produce(client: AsyncBufferClient, lease: Lease, k: int) -> str:
    """Make a sample and push it, or report that it failed; what the buffer said."""
    index = lease.group.index
    await asyncio.sleep(random.uniform(0.0, LONGEST_S))
    if fails(index, k):
        kind, sample = FailureKind.DATA, lease.group.sample(k)
        return f"failed: {await client.fail(client.name, lease.lease, sample, kind, 'as planned')}"
    sample = trajectory(lease, k, client.name, reward_of(index, k))
    return await client.push(wire.pack_trajectory(sample))


# --- a learner rank -----------------------------------------------------------------------------


def learn(spec: Spec) -> None:
    """Train batch after batch, from where the log ends.

    The log is the step counter: a batch is in it before it is committed, with what was trained.
    """
    log = Log(spec.log("learner", spec.rank))
    done = len(log.lines)
    client = BufferClient(
        spec.endpoint, RUN_ID, "learner", spec.rank, timeout_s=TIMEOUT_S, resend_s=WAIT_S
    )
    try:
        client.hello()
        if done and spec.rank == 0:
            finish(spec, client, done)  # it may have died before, or between
        while True:
            part = client.pull(done + 1, wait_s=WAIT_S)
            if isinstance(part, wire.Stopped):
                return
            if isinstance(part, BatchPart):
                log.add([trained(part)])
                done = part.batch
                if spec.rank == 0:
                    finish(spec, client, done)
    finally:
        client.close()


def trained(part: BatchPart) -> dict[str, Any]:
    """What is written about a batch; every payload must be what its actor made."""
    for e in part.envelopes:
        assert e.payload == payload_of(e), f"batch {part.batch}: {e.header}"
    ids = [(part.manifest[i].id.index, part.manifest[i].id.sample) for i in part.mine]
    return {
        "batch": part.batch,
        "mine": ids,
        "manifest": [(h.id.index, h.id.sample) for h in part.manifest],
        "staleness": max(part.batch - 1 - h.version_min.version for h in part.manifest),
    }


def payload_of(e: Envelope) -> bytes | memoryview:
    h = e.header
    lease = Lease(h.lease, h.id.group, (h.id.sample,), h.version_min, 0.0, Prompt())
    return wire.pack_trajectory(trajectory(lease, h.id.sample, h.actor)).payload


def finish(spec: Spec, client: BufferClient, batch: int) -> None:
    """All ranks have trained it: commit, publish; a checkpoint covers what is older."""
    for rank in range(1, RANKS):
        path = spec.log("learner", rank)
        eventually(lambda p=path: len(whole_lines(p)) >= batch, f"rank {rank}", TIMEOUT_S)
    client.commit(batch)
    client.published(Version(0, batch))
    write_version(spec.version_file, batch)
    client.covered(max(0, batch - KEPT_BATCHES))


def write_version(path: Path, version: int) -> None:
    """Where actors find the learner's version; whole at any time."""
    new = path.with_suffix(".new")
    new.write_text(str(version))
    new.replace(path)


if __name__ == "__main__":
    end_with(os.getppid())
    given = Spec(**json.loads(sys.argv[2]))
    if sys.argv[1] == "actor":
        asyncio.run(act(given))
    else:
        learn(given)
