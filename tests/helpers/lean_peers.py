"""Lean producers and a consumer of the buffer: processes that speak its wire and do nothing else.

    producer: leases in stock ─► push, push, ... (many outstanding) ─► acks
    consumer: pull k, k + 1 (ahead) ─► look at the frames ─► commit k, publish ─► ... ─► stop

    python -m tests.helpers.lean_peers producer|consumer '{...}'   prints one line of JSON

So the buffer is what a measurement measures. The learner's version reaches the producers through
a shared file: they claim no version that there is not.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from asyncrl import wire
from asyncrl.types import Version

RUN_ID = "r"
GROUP, GROUPS = 16, 8
"""Samples of a group, groups of a batch."""
COPY_BELOW = 65536
"""Shorter frames are sent faster copied."""
AHEAD = 2
"""Batches that the consumer asks for before it needs them."""
LOOK_MS = 2
"""A producer that cannot push looks for a newer version so often."""
END_S = 60.0
"""Longest time without a reply."""


@dataclass(frozen=True)
class Load:
    """What is sent, by how many, for how long."""

    payload_bytes: int
    seconds: float
    """Counted, after `warm_s`."""
    warm_s: float = 0.5
    producers: int = 2
    rate: float = 0.0
    """Samples/s of all producers, whether the buffer keeps up or not; 0: as fast as it goes."""
    window: int = 256
    """Pushes of a producer that may be outstanding (without `rate`)."""
    stock: int = 256
    """Leased samples that a producer wants to have before it needs them."""
    max_staleness: int = 15

    @property
    def ledger(self) -> dict[str, Any]:
        """Settings of the ledger that suit it."""
        return {
            "group_size": GROUP, "groups_per_batch": GROUPS,
            "max_staleness": self.max_staleness, "lease_timeout_s": 300.0,
        }  # fmt: skip


class Header(msgspec.Struct):
    """A SampleHeader that is quicker to make; the same on the wire."""

    id: tuple[str, int, int, int]
    lease: int
    actor: str
    prompt_tokens: int
    response_tokens: int
    policy_tokens: int
    version_min: tuple[int, int]
    version_max: tuple[int, int]
    version_dispatch: tuple[int, int]
    version_finish: tuple[int, int]
    reward: float
    finish_reason: str
    temperature: float
    kv_mixed: bool = False


class Push(msgspec.Struct, tag_field="type", tag="push"):
    """A `wire.Push` around it."""

    req: int
    header: Header
    schema: int = wire.SCHEMA


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(wire.Ack | wire.Leases | wire.Error).decode


def tokens_of(payload_bytes: int) -> tuple[int, int]:
    """P and T of a payload of at least this size, a fifth of the tokens prompt.

    >>> p, t = tokens_of(20_000)
    >>> 20_000 <= 4 * p + 17 * t < 20_020
    True
    """
    p = payload_bytes // 89
    return p, -(-(payload_bytes - 4 * p) // 17)


def payload_of(payload_bytes: int) -> bytes:
    """A payload for `tokens_of`."""
    p, t = tokens_of(payload_bytes)
    return (bytes(range(256)) * (payload_bytes // 256 + 2))[: 4 * p + 17 * t]


def header_of(
    sample: tuple[str, int, int, int], lease: int, actor: str, tokens: tuple[int, int],
    version: tuple[int, int],
) -> Header:  # fmt: skip
    """All of its policy tokens are of one version."""
    return Header(
        sample, lease, actor, *tokens, tokens[1], version, version, version, version, 1.0, "stop",
        1.0,
    )  # fmt: skip


def send_sample(socket: Any, header: bytes, payload: bytes) -> None:
    """Two frames, as fast as pyzmq can."""
    socket.send(header, zmq.SNDMORE)
    socket.send(payload, copy=len(payload) < COPY_BELOW)


def look_at(frames: list[Any]) -> int:
    """Read both ends of each frame: it is here, and whole."""
    return sum(f[0] + f[-1] for f in frames)


class Peer:
    """A DEALER that said hello."""

    def __init__(self, spec: dict[str, Any], role: str, rank: int) -> None:
        self.name = f"{role}-{rank}"
        self.req = 0
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.set_hwm(0)
        self.socket.identity = f"{self.name}/lean".encode()
        self.socket.rcvtimeo = int(END_S * 1000)
        self.socket.connect(spec["endpoint"])
        with open(spec["version"], "r+b") as f:
            self.version = mmap.mmap(f.fileno(), 8)
        self.send(wire.Hello(run_id=RUN_ID, role=role, rank=rank, pid=0))
        self.expect(self.socket.recv(), wire.Ok)

    def send(self, message: wire.Message) -> int:
        """Send a request without payload; its number."""
        self.req += 1
        self.socket.send(wire.encode(msgspec.structs.replace(message, req=self.req))[0])
        return self.req

    def expect(self, frame: bytes, *kinds: type) -> Any:
        """A reply of one of these kinds."""
        message = wire.decode([frame])[0]
        if not isinstance(message, kinds):
            raise RuntimeError(f"{self.name}: {message}")
        return message


# --- producer --------------------------------------------------------------------------------


class Producer(Peer):
    """See the module; with `rate` each push has a time at which it is due."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec, "actor", spec["rank"])
        self.load = Load(**{k: spec[k] for k in Load.__dataclass_fields__})
        self.tokens = tokens_of(spec["payload_bytes"])
        self.payload = payload_of(spec["payload_bytes"])
        self.work: deque[tuple[int, Any, Any, int]] = deque()
        self.due: dict[int, float] = {}  # outstanding pushes
        self.due_s, self.latencies_s = array("d"), array("d")  # since the first; to the ack
        self.asking = 0  # lease requests under way
        self.applied, self.over = Version(0, -1), False
        self.pushed = 0
        self.began = 0.0
        self.each_s = self.load.producers / self.load.rate if self.load.rate else 0.0

    def run(self) -> None:
        """Until the buffer says that the run is over and all is acknowledged."""
        while not self.over or self.due:
            self._ask()
            for _ in range(self._may_push()):
                self._push()
            self._receive()

    def _may_push(self) -> int:
        if self.over or not self.work:
            return 0
        if not self.each_s:
            return min(len(self.work), self.load.window - len(self.due))
        now = time.perf_counter()
        self.began = self.began or now
        return min(len(self.work), int((now - self.began) / self.each_s) + 1 - self.pushed)

    def _ask(self) -> None:
        """For more leases; again when there is a newer version, by which there may be some."""
        if self.over or len(self.work) >= self.load.stock or self.asking > 1:
            return
        version = Version(0, struct.unpack("<q", self.version[:8])[0])
        if self.asking and (self.work or version == self.applied):
            return
        capacity = 2 * self.load.stock - len(self.work)
        self.send(
            wire.LeaseRequest(actor=self.name, applied=version, capacity=capacity, wait_s=5.0)
        )
        self.asking, self.applied = self.asking + 1, version

    def _push(self) -> None:
        lease, group, version, k = self.work.popleft()
        self.req += 1
        h = header_of((*group, k), lease, self.name, self.tokens, version)
        send_sample(self.socket, encode(Push(self.req, h)), self.payload)
        self.due[self.req] = self.began + self.pushed * self.each_s
        self.pushed += 1

    def _receive(self) -> None:
        """All replies that are there; waits for one if nothing can be pushed now."""
        socket, due = self.socket, self.due
        full = not self.work or len(due) >= self.load.window
        if not socket.poll(1 if self.each_s else LOOK_MS * full):
            return
        now = time.perf_counter()
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = _decode(frame)
            if isinstance(reply, wire.Ack):
                if reply.status != "accepted":
                    raise RuntimeError(f"{self.name}: a push was {reply.status}")
                at = due.pop(reply.req)
                if self.each_s:
                    self.due_s.append(at - self.began)
                    self.latencies_s.append(now - at)
                continue
            if isinstance(reply, wire.Error):
                raise RuntimeError(f"{self.name}: {reply}")
            self.asking, self.over = self.asking - 1, reply.state != "running"
            for x in reply.leases:
                self.work.extend((x.lease, x.group, x.version, k) for k in x.samples)


def produce(spec: dict[str, Any]) -> dict[str, Any]:
    producer = Producer(spec)
    producer.run()
    path = f"{spec['scratch']}/latencies-{spec['rank']}.npy"
    due = np.array(producer.due_s)
    counted = (due >= spec["warm_s"]) & (due < spec["warm_s"] + spec["seconds"])
    np.save(path, np.array(producer.latencies_s)[counted])
    return {"pushed": producer.pushed, "latencies": path}


# --- consumer --------------------------------------------------------------------------------


def consume(spec: dict[str, Any]) -> dict[str, Any]:
    peer = Peer(spec, "learner", 0)
    for batch in range(1, AHEAD + 1):
        peer.send(wire.Pull(rank=0, batch=batch, wait_s=30.0))
    batch, samples, began = 0, 0, 0.0
    at_warm, at_end = (0.0, 0), (0.0, 0)
    while not at_end[1]:
        frames = [f.buffer for f in peer.socket.recv_multipart(copy=False)]
        message = wire.decode(frames)[0]
        if isinstance(message, wire.Ok):
            continue
        if not isinstance(message, wire.Part) or message.batch != batch + 1:
            raise RuntimeError(f"{peer.name}: {message}, after batch {batch}")
        look_at(frames[1:])
        batch, samples, now = message.batch, samples + len(message.mine), time.perf_counter()
        del frames
        peer.send(wire.Commit(batch=batch))
        peer.send(wire.Published(version=Version(0, batch)))
        peer.version[:8] = struct.pack("<q", batch)
        peer.send(wire.Pull(rank=0, batch=batch + AHEAD, wait_s=30.0))
        began = began or now
        if not at_warm[1] and now - began >= spec["warm_s"]:
            at_warm = now, samples
        elif at_warm[1] and now - at_warm[0] >= spec["seconds"]:
            at_end = now, samples
    peer.send(wire.Stop(reason="enough"))
    asked = peer.send(wire.StatsRequest())
    while True:  # the last acks and parts come before it
        message = wire.decode(peer.socket.recv_multipart())[0]
        if message.req == asked:
            break
    assert isinstance(message, wire.Stats)
    stats = {"counts": message.counts, "gauges": message.gauges, "conserved": message.conserved}
    return {
        "samples_s": (at_end[1] - at_warm[1]) / (at_end[0] - at_warm[0]),
        "batches": batch,
        "stats": stats,
    }


if __name__ == "__main__":
    from asyncrl.roles import end_with

    end_with(os.getppid())
    role = {"producer": produce, "consumer": consume}[sys.argv[1]]
    print(json.dumps(role(json.loads(sys.argv[2]))))
