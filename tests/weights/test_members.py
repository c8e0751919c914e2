"""Who is a member: announcements as they come over the wire, freshness, back-off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from asyncrl import wire
from asyncrl.actors import announce
from asyncrl.actors.announce import Announcer
from asyncrl.actors.weight_service import WeightService
from asyncrl.learner.publication import members as members_module
from asyncrl.learner.publication.members import Member, Members
from asyncrl.types import Version
from tests.weights.fakes import FakeEngine, subscriber

V0, V1, V2, V3 = (Version(0, v) for v in range(4))


class Clock:
    """Stands for `time.monotonic` of the members."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(members_module, "time", made)
    return made


@pytest.fixture
def members(clock: Clock) -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def say(members: Members, name: str, **fields: Any) -> Member:
    values = {"pid": 1, "endpoint": "tcp://h:1", "workers": 1, "applied": V0, "ready": True}
    message = wire.Announce(name=name, **(values | fields))
    members._take([bytes(f) for f in wire.encode(message)])
    return Member(name, message.pid, message.endpoint, message.workers)


def names(found: list[Member]) -> list[str]:
    return [m.name for m in found]


def test_members_are_those_heard_of_lately(members: Members, clock: Clock) -> None:
    say(members, "b")
    clock.now += 3
    say(members, "a", ready=False)
    assert names(members.fresh()) == ["a", "b"]
    assert names(members.behind(V1)) == ["b"]
    assert members.lacking(V1) == ["a", "b"]
    clock.now += 3
    assert names(members.fresh()) == ["a"]
    assert members.lacking(V1) == ["a"]
    say(members, "b")
    assert names(members.fresh()) == ["a", "b"]


def test_who_loads_from_a_relay_is_waited_for_and_never_sent_to(members: Members) -> None:
    say(members, "relay-0")
    say(members, "actor-0", workers=0)
    assert names(members.behind(V1)) == ["relay-0"]
    assert members.lacking(V1) == ["actor-0", "relay-0"]
    say(members, "relay-0", applied=V1)
    assert members.lacking(V1) == ["actor-0"]
    assert members.lag(V1) == 1


def test_what_a_member_applied_counts_whoever_says_so(members: Members) -> None:
    a = say(members, "a")
    assert members.lag(V2) == 2
    members.took(a, V1)
    say(members, "a")  # an announcement that was under way
    assert names(members.behind(V1)) == []
    assert names(members.behind(V2)) == ["a"]
    assert members.lag(V2) == 1
    say(members, "a", applied=V2)
    assert members.lacking(V2) == []
    assert members.lacking(Version(1, 0)) == ["a"]


def test_a_restarted_learner_goes_on_with_a_lower_number(members: Members) -> None:
    a = say(members, "a", applied=Version(0, 7))
    say(members, "b")
    back = Version(1, 5)
    assert names(members.behind(back)) == members.lacking(back) == ["a", "b"]
    assert members.lag(back) == 5
    say(members, "b", applied=back)
    assert members.lag(back) == 1, "it has not taken it"
    members.took(a, back)
    say(members, "a", applied=Version(0, 7))  # an announcement that was under way
    assert members.lacking(back) == []
    assert members.lag(back) == 0


def test_another_pid_is_another_member(members: Members) -> None:
    old = say(members, "a", applied=V2)
    members.failed(old, gone=False)
    new = say(members, "a", pid=2)
    assert members.fresh() == members.behind(V1) == [new]
    members.took(old, V3)  # what concerns the old one is forgotten
    members.failed(old, gone=True)
    assert members.behind(V1) == [new]


def test_who_fails_is_left_alone_for_longer_each_time(members: Members, clock: Clock) -> None:
    a = say(members, "a")
    for pause in (2, 4, 8, 16, 32, 60, 60):
        members.failed(a, gone=False)
        clock.now += pause - 0.5
        say(members, "a")
        assert names(members.behind(V1)) == []
        clock.now += 0.5
        assert names(members.behind(V1)) == ["a"]
    members.took(a, V1)
    members.failed(a, gone=False)
    clock.now += 2
    say(members, "a")
    assert names(members.behind(V2)) == ["a"]


def test_who_is_gone_counts_no_more_until_it_speaks(members: Members, clock: Clock) -> None:
    a = say(members, "a")
    members.failed(a, gone=True)
    assert members.fresh() == []
    assert members.lacking(V1) == []
    assert members.lag(V1) is None
    say(members, "a")
    assert members.lag(V1) == 1
    assert members.lacking(V1) == ["a"]
    assert members.lacking(V1, failed=False) == []
    assert members.behind(V1) == []  # still left alone


def test_nonsense_is_counted_and_ignored() -> None:
    members, heard = Members(), threading.Event()
    members.on_change = heard.set
    good = wire.Announce(
        name="a", pid=1, endpoint="tcp://h:1", workers=1, applied=V0, ready=True
    )  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(members.endpoint)
        for frames in (
            [b"\xc1"], [b""], [b"a", b"b"], wire.encode(wire.StatsRequest()),
            wire.encode(wire.Announce(**{f: getattr(good, f) for f in good.__struct_fields__}
                                      | {"workers": -1})),
            wire.encode(good),
        ):  # fmt: skip
            socket.send_multipart([bytes(f) for f in frames])
        assert members.wait_for(1, 60)
        assert heard.wait(60)
    assert members.malformed == 5
    assert not members.wait_for(2, 0.0)
    members.close()


def test_an_actor_announces_itself_and_what_it_applies_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members, engine = Members(), FakeEngine()
    news = threading.Semaphore(0)
    members.on_change = lambda: news.release()

    def hear() -> list[Member]:
        assert news.acquire(timeout=60)
        return members.fresh()

    async def run() -> None:
        monkeypatch.setattr(announce, "ANNOUNCE_S", 3600.0)
        service = WeightService(subscriber(engine))
        announcer = Announcer(
            members.endpoint, service, name="a", workers=2, applied=lambda: engine.applied
        )
        running = asyncio.create_task(announcer.run())
        (member,) = await asyncio.to_thread(hear)
        assert (member.name, member.endpoint, member.workers) == ("a", service.endpoint, 2)
        assert members.lacking(V1) == ["a"]
        announcer.look()  # no news
        engine.applied = V1
        announcer.look()
        await asyncio.to_thread(hear)
        assert members.lacking(V1) == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        announcer.close()
        announcer.close()
        assert service.on_idle is None
        await service.close()

    asyncio.run(run())
    members.close()
    assert not news.acquire(blocking=False)


def test_an_announcement_waits_for_nobody() -> None:
    """Nobody listens where it goes, and far more are sent than the socket keeps."""

    async def run() -> None:
        service = WeightService(subscriber(FakeEngine()))
        with zmq.Context() as context, context.socket(zmq.PULL) as dead:
            port = dead.bind_to_random_port("tcp://127.0.0.1")
        announcer = Announcer(
            f"tcp://127.0.0.1:{port}", service, name="a", workers=1, applied=lambda: V0
        )
        began = time.monotonic()
        for _ in range(100):
            announcer._announce()
        announcer.close()
        assert time.monotonic() - began < 30
        await service.close()

    asyncio.run(run())


def test_members_need_no_torch() -> None:
    code = "import sys, asyncrl.learner.publication.members; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
