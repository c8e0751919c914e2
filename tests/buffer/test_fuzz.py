"""Malformed messages of all kinds: each gets its one reply, nothing is kept, nobody is harmed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl import wire
from asyncrl.types import BatchPart, FailureKind, Lease, SampleId, Trajectory, Version
from tests.buffer.fuzz import Frames, Fuzzer, is_message
from tests.buffer.peers import actor, launcher, learner
from tests.buffer.samples import header, same_arrays, trajectory
from tests.helpers.buffer_process import BufferProcess, BufferSpec

LEDGER = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 3, "lease_timeout_s": 2.0}
HONEST = 42
"""Rank of the honest actor: no mutation of another's name is it."""
BURST = 40
PAYLOAD = bytes(21_000)
"""Of 1000 prompt and 1000 response tokens."""
KEPT_BYTES = 16 << 20
"""A buffer that grows by more keeps something: of 100,000 messages it is 168 bytes each, of 6,000
with a payload of 21 KB a quarter. What an allocator keeps for itself is a few MB."""


@pytest.fixture(params=["none", "process"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(
        BufferSpec(
            ledger=LEDGER, silent_after_s=1.0, durability=request.param, folder=str(tmp_path)
        )
    )
    yield process
    process.close()


class Honest:
    """An actor and a learner that work beside the noise, until the run is stopped at the end."""

    def __init__(self, buffer: BufferProcess) -> None:
        self._buffer = buffer
        self.batches = 0
        self.arrived = 0
        self._sent: dict[SampleId, Trajectory] = {}
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,))
            for work in (lambda: asyncio.run(self._produce()), self._train)
        ]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with launcher(self._buffer) as client:  # type: ignore[arg-type]
                client.stop("enough")
        finally:
            for thread in self._threads:
                thread.join(60)
        if self._errors and kind is None:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as e:
            self._errors.append(e)

    async def _produce(self) -> None:
        async with actor(self._buffer, HONEST) as client:  # type: ignore[arg-type]
            while True:
                reply = await client.lease(client.name, Version(0, self.batches), 4, wait_s=1)
                if reply.state != "running":
                    return
                made = [trajectory(x, k, client.name) for x in reply.leases for k in x.samples]
                self._sent |= {t.header.id: t for t in made}
                await asyncio.gather(*(client.push(wire.pack_trajectory(t)) for t in made))

    def _train(self) -> None:
        with learner(self._buffer) as client:  # type: ignore[arg-type]
            while True:
                part = client.pull(self.batches + 1, wait_s=20)
                if isinstance(part, wire.Stopped):
                    return
                if isinstance(part, BatchPart):
                    self._look(part)
                    client.commit(part.batch)
                    self.batches += 1
                    client.published(Version(0, self.batches))

    def _look(self, part: BatchPart) -> None:
        """What the honest actor made is what came, and the rest could be trained."""
        for e in part.envelopes:
            h, arrays = e.header, wire.unpack_trajectory(e)
            assert 0 <= h.policy_tokens <= len(arrays.loss_mask)
            assert 0 < h.temperature < np.inf
            assert np.isfinite(h.reward)
            if h.actor == f"actor-{HONEST}":
                self.arrived += 1
                assert same_arrays(e, self._sent[h.id])


class Noisy:
    """One that sends mutations, in bursts, and counts what comes back."""

    def __init__(self, context: zmq.Context, buffer: BufferProcess, seed: int, role: str) -> None:
        self.role = role
        self.sent = self.malformed = self.answered = self.refused = 0
        self._rng = random.Random(f"{seed}/{role}")
        self._fuzzer = Fuzzer(self._rng, PAYLOAD)
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(buffer.endpoint)
        self._req = 0
        self._asked: set[int] = set()  # numbers of lease requests: a resend gets no second answer
        self._leases: list[Lease] = []

    @property
    def name(self) -> str:
        return f"{self.role}-85"

    def burst(self) -> None:
        """Some mutations, then all replies to them."""
        hello = wire.Hello(req=self._number(), run_id="r", role=self.role, rank=85, pid=1)
        frames = [] if self.role == "stranger" else [wire.encode(hello)]
        if self.role == "actor":
            frames.append(self._lease_request())
        bases = self._bases()
        frames += [self._fuzzer.message(self._rng.choice(bases)()) for _ in range(BURST)]
        # What it got it does not make: somebody else may.
        for x in self._leases:
            frames += [self._fail(x, k) for k in x.samples]
        self._leases.clear()
        expected = sum(self._send([bytes(f) for f in message]) for message in frames)
        for _ in range(expected):
            assert self._socket.poll(30_000), f"{self.role}: a message got no reply"
            self._read(wire.decode(self._socket.recv_multipart())[0])

    def _number(self) -> int:
        self._req += 1
        return self._req

    def _send(self, frames: Frames) -> bool:
        message = is_message(frames)
        if message is not None and not self._may(message):
            return False
        self._socket.send_multipart(frames)
        self.sent += 1
        self.malformed += message is None
        return True

    def _may(self, message: wire.Message) -> bool:
        if isinstance(message, wire.LeaseRequest) and message.req in self._asked:
            return False
        if isinstance(message, wire.LeaseRequest):
            self._asked.add(message.req)
        knock = isinstance(message, wire.Hello) and message.run_id == "r"
        return not (knock and self.role == "stranger")

    def _read(self, reply: wire.Message) -> None:
        self.answered += 1
        if isinstance(reply, wire.Error):
            self.refused += 1
            assert not reply.message.startswith("internal error"), reply
            assert len(reply.message) <= 1000, reply.message[:300]
        if isinstance(reply, wire.Leases):
            self._leases += reply.leases

    def silence(self) -> None:
        """Nothing more comes, and no message got two replies."""
        assert not self._socket.poll(0)
        assert self.answered == self.sent
        self._socket.close()

    # --- what it mutates -----------------------------------------------------------------------

    def _bases(self) -> list[Any]:
        own = [self._hello, self._stats, self._any, self._any]
        if self.role != "actor":
            return [*own, self._commit, self._gone, self._stop, self._pull]
        held = [self._push] * 4 if self._leases else []
        return [*own, *held, self._lease_request, self._progress, self._commit, self._pull]

    def _any(self) -> Frames:
        return self._fuzzer.any_kind(self._number())

    def _encoded(self, message: wire.Message, *payload: bytes) -> Frames:
        return [bytes(f) for f in wire.encode(message, payload)]

    def _hello(self) -> Frames:
        hello = wire.Hello(req=self._number(), run_id="r", role=self.role, rank=85, pid=1)
        return self._encoded(hello)

    def _stats(self) -> Frames:
        return self._encoded(wire.StatsRequest(req=self._number()))

    def _commit(self) -> Frames:
        return self._encoded(wire.Commit(req=self._number(), batch=self._rng.randrange(9)))

    def _gone(self) -> Frames:
        return self._encoded(wire.Gone(req=self._number(), actor=f"actor-{HONEST}", reason="x"))

    def _stop(self) -> Frames:
        return self._encoded(wire.Stop(req=self._number(), reason="x", final=Version(0, 9)))

    def _pull(self) -> Frames:
        return self._encoded(wire.Pull(req=self._number(), rank=0, batch=1, wait_s=600.0))

    def _lease_request(self) -> Frames:
        far = Version(0, 1_000_000)  # counts as the next version
        ask = wire.LeaseRequest(
            req=self._number(), actor=self.name, applied=far, capacity=4, wait_s=0.0
        )
        return self._encoded(ask)

    def _progress(self) -> Frames:
        tokens = {self._rng.randrange(99): self._rng.randrange(99) for _ in range(3)}
        return self._encoded(wire.Progress(req=self._number(), actor=self.name, tokens=tokens))

    def _push(self) -> Frames:
        lease = self._rng.choice(self._leases)
        sample = lease.group.sample(self._rng.choice(lease.samples))
        h = header(sample, lease.lease, self.name, lease.version, 0.5, 1000, 1000)
        return self._encoded(wire.Push(req=self._number(), header=h), PAYLOAD)

    def _fail(self, lease: Lease, k: int) -> list[Any]:
        return wire.encode(
            wire.Fail(
                req=self._number(), actor=self.name, lease=lease.lease, id=lease.group.sample(k),
                kind=FailureKind.INFRASTRUCTURE, reason="noise",
            )
        )  # fmt: skip


def survives(buffer: BufferProcess, messages: int, seed: int) -> None:
    """Send so many mutations beside honest peers."""
    context = zmq.Context()
    noisy = [Noisy(context, buffer, seed, role) for role in ("stranger", "watcher", "actor")]
    warm_bytes = batches = 0
    try:
        with Honest(buffer) as honest:
            while (sent := sum(n.sent for n in noisy)) < messages:
                for n in noisy:
                    n.burst()
                if not warm_bytes and sent > messages / 4:
                    warm_bytes, batches = buffer.rss_bytes, honest.batches
            grown = buffer.rss_bytes - warm_bytes
            for n in noisy:
                n.silence()
            with launcher(buffer) as client:  # type: ignore[arg-type]
                stats = client.stats()
    finally:
        context.destroy(linger=0)
    malformed, refused = sum(n.malformed for n in noisy), sum(n.refused for n in noisy)
    print(
        f"\n{sent} messages, {malformed} malformed, {refused} refused, {honest.batches} batches "
        f"beside them; RSS grew {grown / 2**20:.1f} MiB"
    )
    assert stats.counts["malformed"] == malformed > sent / 2
    assert noisy[0].refused == noisy[0].sent, "a stranger got something"
    assert refused >= malformed
    assert stats.conserved
    assert grown < KEPT_BYTES
    assert honest.batches > batches > 0
    assert honest.arrived > 0


def test_mutations_harm_nobody(buffer: BufferProcess) -> None:
    survives(buffer, 6_000, seed=1)


@pytest.mark.soak
def test_a_hundred_thousand_mutations_harm_nobody(buffer: BufferProcess) -> None:
    survives(buffer, 100_000, seed=2)
