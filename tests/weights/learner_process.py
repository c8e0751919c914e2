"""A learner as a process of its own, which strikes itself at a point of a publication.

    cut ─ hash ─ arrived ─ rendezvous ─ begin ─ begun ─ receive ─ received ─ commit
    (snapshot)   (join)                 (one of them)   (midway)             (one of them)

At `begin` and `commit` the first member has answered, and no other has been asked. Of two ranks the
second strikes itself while its shards are gathered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout, Part
from asyncrl.learner.publication import gloo_sender, weight_fleet
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.publish import BroadcastPublisher
from asyncrl.learner.publication.shard_publisher import ShardPublisher
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.types import Version
from asyncrl.weights import ARRIVED, ParamSpec, TransferPlan
from tests.helpers.eventually import eventually
from tests.helpers.forks import Process
from tests.weights.fakes import N

POINTS = (
    "cut", "hash", "arrived", "rendezvous", "begin", "begun", "receive", "received", "commit"
)  # fmt: skip
TIMEOUT_S = 16.0
"""Of a publication: 4 s for each step, 6 s for an engine to join."""
GATHER_S = 5.0
"""Of the gathering of two ranks' shards."""


def value_of(version: Version) -> float:
    """What its parameters are filled with."""
    return 100.0 * version.incarnation + version.version


# --- the process -------------------------------------------------------------------------------


class _Blow:
    """Falls once, where `point` says."""

    point, how = "", signal.SIGKILL

    def at(self, point: str) -> None:
        if point == self.point:
            self.point = ""
            signal.pthread_kill(threading.get_ident(), self.how)  # not a step further


def _around(owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def struck(*given: Any, **named: Any) -> Any:
        before(*given, **named)
        return original(*given, **named)

    setattr(owner, name, struck)


def _lay(blow: _Blow, pipe: Connection) -> None:
    """Let it fall at each point; this process is the publisher's alone."""
    make_store, begin = gloo_sender.create_tcp_store, FleetClient.start_weight_update
    buckets = Snapshot.buckets

    def store_where_all_have_arrived(*given: Any, **named: Any) -> Any:
        store = make_store(*given, **named)
        if blow.point == "arrived":
            keys = [ARRIVED.format(rank=rank) for rank in range(1, named["world_size"])]
            eventually(lambda: store.check(keys), "all arrived")
            blow.at("arrived")
        return store

    def begin_all(client: FleetClient) -> None:
        begin(client)
        blow.at("begun")

    def midway(snapshot: Snapshot) -> Iterator[torch.Tensor]:
        for number, bucket in enumerate(buckets(snapshot)):
            if number == 2 and blow.point == "receive":
                pipe.send("midway")
                assert pipe.recv() == "all receive"
                blow.at("receive")
            yield bucket

    def before_the_second(exchange: Any, *_: Any) -> None:
        if exchange._phase == blow.point in ("begin", "commit") and exchange._open:
            assert len(exchange._open) == 1
            for socket, _monitor in exchange._open.values():
                assert socket.poll(30_000)
            blow.at(exchange._phase)

    gloo_sender.create_tcp_store = store_where_all_have_arrived
    FleetClient.start_weight_update = begin_all  # type: ignore[method-assign]
    Snapshot.buckets = midway  # type: ignore[method-assign]
    _around(TransferPlan, "checksums", lambda *_: blow.at("hash"))
    _around(gloo_sender, "init_gloo_process_group", lambda *_: blow.at("rendezvous"))
    _around(FleetClient, "finish_weight_update", lambda *_: blow.at("received"))
    _around(weight_fleet._Exchange, "_send", before_the_second)


SPECS = tuple(ParamSpec(name, "float32", (N // 2,)) for name in ("v", "w"))


def _gather(rank: int, store: Path) -> Gather:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2
    )  # fmt: skip
    return Gather(rank=rank, world=2, timeout_s=GATHER_S, patience_s=60.0, bucket_bytes=1 << 12)


def _layout(world: int) -> Layout:
    return Layout(SPECS, tuple(Part(s, sharded=world > 1) for s in SPECS), {})


def serve_rank_1(pipe: Connection, store: Path) -> None:
    """Answer what `LearnerProcess` asks of the second rank, until it is gone."""
    torch.set_num_threads(1)
    version, blow = Version(0, 0), _Blow()
    gather = _gather(1, store)
    publisher = ShardPublisher(
        source=lambda: [(s.name, torch.full((N // 4,), value_of(version))) for s in SPECS],
        layout=_layout(2), gather=gather, pinned=False,
    )  # fmt: skip
    buckets = gather._buckets

    def midway(pieces: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for number, bucket in enumerate(buckets(pieces)):
            if number == 8:
                blow.at("gather")
            yield bucket

    gather._buckets = midway  # type: ignore[method-assign]
    while True:
        _, version, blow.point, blow.how = pipe.recv()
        publisher.publish(version)


def serve(pipe: Connection, port: int, store: Path | None) -> None:
    """Answer what `LearnerProcess` asks, until it is gone; `store`: where two ranks meet."""
    torch.set_num_threads(1)
    blow = _Blow()
    _lay(blow, pipe)
    version, world = Version(0, 0), 1 if store is None else 2

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in SPECS:
            yield spec.name, torch.full((N // 2 // world,), value_of(version))
            blow.at("cut")

    members = Members(port=port)
    publisher = BroadcastPublisher(
        members, source=source, layout=_layout(world),
        gather=None if store is None else _gather(0, store), backend="gloo",
        device=torch.device("cpu"), timeout_s=TIMEOUT_S, bucket_bytes=1 << 14,
    )  # fmt: skip
    pipe.send(members.endpoint)
    while True:
        what, *given = pipe.recv()
        if what == "publish":
            version, blow.point, blow.how = given
            try:
                publisher.publish(version)
                publisher.wait()
            except WeightSyncError as e:
                pipe.send(str(e))
            else:
                pipe.send(None)
        elif what == "wait_for":
            pipe.send(members.wait_for(given[0], 30.0))
        elif what == "regroup":
            pipe.send(publisher._courier.leave())
        elif what == "finish":
            pipe.send(publisher.finish(60.0))
        else:
            pipe.send(publisher.take_events())


# --- who starts it -----------------------------------------------------------------------------


class LearnerProcess:
    """Answers wait for the process, which `publish` with a point leaves struck."""

    def __init__(self, port: int = 0, store: Path | None = None) -> None:
        """Rank 0 alone, or two ranks that meet at `store`."""
        self._pipe, theirs = Pipe()
        self.process = Process(target=serve, args=(theirs, port, store))
        self.process.start()
        theirs.close()
        self._started = [(self.process, self._pipe)]
        if store is not None:
            pipe, theirs = Pipe()
            process = Process(target=serve_rank_1, args=(theirs, store))
            process.start()
            theirs.close()
            self._started.append((process, pipe))
        self.endpoint: str = self._answer()
        self.port = int(self.endpoint.rpartition(":")[2])
        assert self.process.pid is not None
        self.pid = self.process.pid

    def publish(self, version: Version) -> None:
        """Publish, and wait until it has left."""
        assert self.gather(version, "", signal.SIGKILL) is None

    def gather(self, version: Version, point: str, how: signal.Signals) -> str | None:
        """Publish; rank 1 is struck while its shards are gathered. Why it failed, if it did."""
        self._pipe.send(("publish", version, "", how))
        for _, pipe in self._started[1:]:
            pipe.send(("publish", version, point, how))
        error: str | None = self._answer()
        return error

    def struck(
        self, version: Version, point: str, how: signal.Signals, receive: Callable[[], bool]
    ) -> None:
        """Publish, and wait until it has been struck at that point; midway when all `receive`."""
        self._pipe.send(("publish", version, point, how))
        if point == "receive":
            assert self._answer() == "midway"
            eventually(receive, "all receive", 30)
            self._pipe.send("all receive")
        if how == signal.SIGKILL:
            self.process.join(60)
            assert self.process.exitcode == -signal.SIGKILL
        else:
            process = psutil.Process(self.pid)
            eventually(lambda: process.status() == psutil.STATUS_STOPPED, "stopped", 60)

    def go_on(self) -> None:
        """Let a stopped one go on, and end the publication that it was in."""
        os.kill(self.pid, signal.SIGCONT)
        self._answer()

    def wait_for(self, count: int) -> None:
        """Until so many members are ready."""
        self._pipe.send(("wait_for", count))
        assert self._answer()

    def regroup(self) -> None:
        """Leave the group: the next publication forms one."""
        self._pipe.send(("regroup",))
        self._answer()

    def finish(self) -> list[str]:
        """Who lacks the last version at the end."""
        self._pipe.send(("finish",))
        lacking: list[str] = self._answer()
        return lacking

    def events(self) -> list[Mapping[str, Any]]:
        """What happened to members."""
        self._pipe.send(("events",))
        events: list[Mapping[str, Any]] = self._answer()
        return events

    def end(self) -> None:
        """Kill it; safe to call twice."""
        while self._started:
            process, pipe = self._started.pop()
            process.kill()
            process.join(30)
            process.close()
            pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(90), "the learner does not answer"
        return self._pipe.recv()
