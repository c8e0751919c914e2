"""Clients of a running buffer, for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import zmq

from asyncrl import wire
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.buffer.connection import RESEND_S
from asyncrl.types import SampleId, Trajectory, Version
from tests.buffer.conftest import Running
from tests.buffer.samples import trajectory

V0 = Version(0, 0)
Serve = Callable[..., Running]


class Served(Protocol):
    """Something that has a running buffer."""

    @property
    def endpoint(self) -> str: ...


@contextmanager
def learner(
    server: Served, rank: int = 0, run_id: str = "r", resend_s: float = RESEND_S
) -> Iterator[BufferClient]:
    client = BufferClient(server.endpoint, run_id, "learner", rank, resend_s=resend_s)
    try:
        client.hello()
        yield client
    finally:
        client.close()


@asynccontextmanager
async def actor(
    server: Served, rank: int = 0, resend_s: float = RESEND_S
) -> AsyncIterator[AsyncBufferClient]:
    client = AsyncBufferClient(server.endpoint, "r", "actor", rank, resend_s=resend_s)
    try:
        await client.hello()
        yield client
    finally:
        client.close()


@contextmanager
def launcher(server: Running) -> Iterator[BufferClient]:
    client = BufferClient(server.endpoint, "r", "launcher", 0)
    try:
        client.hello()
        yield client
    finally:
        client.close()


@contextmanager
def raw(
    server: Running, hello: bool = True, role: str = "raw"
) -> Iterator[Callable[[list[Any]], wire.Message]]:
    """A bare DEALER: sends frames as they are, returns the decoded reply."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 30_000
    socket.connect(server.endpoint)

    def exchange(frames: list[Any]) -> wire.Message:
        socket.send_multipart(frames)
        return wire.decode(socket.recv_multipart())[0]

    try:
        if hello:
            greeting = wire.Hello(run_id="r", role=role, rank=0, pid=0)
            assert isinstance(exchange(wire.encode(greeting)), wire.Ok)
        yield exchange
    finally:
        socket.close()
        context.term()


async def produce(
    client: AsyncBufferClient, capacity: int, sent: dict[SampleId, Trajectory]
) -> list[str]:
    """Lease once and push every sample; the statuses."""
    reply = await client.lease(client.name, V0, capacity, wait_s=0)
    samples = [trajectory(x, k, client.name) for x in reply.leases for k in x.samples]
    sent |= {t.header.id: t for t in samples}
    return list(await asyncio.gather(*(client.push(wire.pack_trajectory(t)) for t in samples)))
