"""The publisher's waits, its end and its timings, with a sender that moves no bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication import publish
from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.publish import BroadcastPublisher
from asyncrl.learner.publication.round import Courier
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.types import Version
from asyncrl.weights import ParamSpec

ACTOR = Member("actor-0", 1, "none", 1)


class FakeMembers:
    """One member, always ready, that takes what `deliver` brings."""

    def __init__(self) -> None:
        self.applied = Version(0, 0)
        self.on_change: Any = None
        self.failed_ones: list[Member] = []

    def behind(self, version: Version) -> list[Member]:
        return [ACTOR] if self.applied < version and not self.failed_ones else []

    def lacking(self, version: Version, failed: bool = True) -> list[str]:
        return [ACTOR.name] if self.applied < version else []

    def lag(self, version: Version) -> int:
        return version.version - self.applied.version

    def published(self, version: Version) -> None:
        pass

    def took(self, member: Member, version: Version) -> None:
        self.applied = version

    def failed(self, member: Member, *, gone: bool) -> None:
        self.failed_ones.append(member)


class FakeSender:
    """Drives a client whose member always agrees; `broadcast` stands for the collective."""

    broadcast: Callable[[], object] = staticmethod(lambda: None)
    shut_down = 0

    def __init__(self, client: FleetClient) -> None:
        self.client = client

    def send_weights(self) -> None:
        self.client.start_weight_update()
        FakeSender.broadcast()
        self.client.update_weights({})
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        FakeSender.shut_down += 1


def agree(
    self: FleetClient, phase: str, members: Any, seconds: float, message: Any, done: Any = None
) -> None:
    started = time.monotonic()
    self.deadline = started + seconds
    if done is not None:
        done += members
    self.timings[phase] = (started, time.monotonic())


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[BroadcastPublisher]:
    monkeypatch.setattr(FakeSender, "broadcast", staticmethod(lambda: None))
    monkeypatch.setattr(FakeSender, "shut_down", 0)
    monkeypatch.setattr(Courier, "_join", lambda self, client: FakeSender(client))
    monkeypatch.setattr(FleetClient, "_call", agree)
    members: Any = FakeMembers()
    made = BroadcastPublisher(
        members, source=lambda: [("w", torch.ones(3))],
        layout=Layout.whole([ParamSpec("w", "float32", (3,))]), backend="gloo",
        device=torch.device("cpu"), timeout_s=0.4,
    )  # fmt: skip
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_a_stuck_collective_is_given_up_and_close_does_not_wait_again(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "STUCK_MARGIN_S", 0.2)
    released, sending = threading.Event(), threading.Event()

    def hang() -> None:
        sending.set()
        released.wait()

    monkeypatch.setattr(FakeSender, "broadcast", staticmethod(hang))
    publisher.publish(Version(0, 1))
    assert sending.wait(30)
    try:
        with pytest.raises(WeightSyncError, match="weights 0:1: the sending thread is stuck"):
            publisher.wait()
        with pytest.raises(WeightSyncError, match="stuck"):
            publisher.publish(Version(0, 2))
        with pytest.raises(WeightSyncError, match="stuck"):
            publisher.finish(60.0)
        monkeypatch.setattr(publish, "STUCK_MARGIN_S", 3600.0)
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 60
        assert publisher._thread.is_alive()
        assert FakeSender.shut_down == 0  # it would wait for the collective
    finally:
        released.set()
        publisher._thread.join(30)


@pytest.mark.parametrize("asked", [False, True])
def test_a_bug_ends_the_publisher_and_is_said_once(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(FakeSender, "broadcast", staticmethod(lambda: {}["bug"]))
    publisher.publish(Version(0, 1))
    with pytest.raises(WeightSyncError, match="weights 0:1: KeyError: 'bug'"):
        publisher.wait() if asked else publisher.close()
    publisher.close()
    assert FakeSender.shut_down == 1


def test_a_broken_collective_raises_nowhere(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut() -> None:
        raise RuntimeError("cut")

    monkeypatch.setattr(FakeSender, "broadcast", staticmethod(cut))
    publisher.publish(Version(0, 1))
    publisher.wait()
    (event,) = publisher.take_events()
    assert event == {
        "event": "weights_cut_out", "actor": "actor-0", "version": "0:1", "phase": "send",
        "reason": "RuntimeError: cut",
    }  # fmt: skip
    assert publisher.take_events() == []
    assert FakeSender.shut_down == 1
    assert publisher.finish(0.0) == ["actor-0"]
    timings = publisher.take_timings()
    assert timings["sync/version_lag"] == 1
    assert "sync/pause_s" not in timings


def test_a_source_that_fails_leaves_nothing_to_send(publisher: BroadcastPublisher) -> None:
    publisher.publish(Version(0, 1))
    publisher.wait()
    publisher._source = lambda: [("other", torch.ones(3))]
    with pytest.raises(WeightSyncError, match="snapshot: got other"):
        publisher.publish(Version(0, 2))
    publisher._members.applied = Version(0, 0)  # type: ignore[attr-defined]
    publisher._wake()
    publisher.wait()
    assert publisher.take_events() == []


def test_timings_are_handed_out_once_for_each_publication(
    publisher: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.take_timings() == {"sync/retries": 0, "sync/checksum_fail": 0}
    monkeypatch.setattr(FakeSender, "broadcast", staticmethod(lambda: time.sleep(0.02)))
    publisher.publish(Version(0, 1))
    publisher.wait()
    timings = publisher.take_timings()
    once = {"blocked_s", "total_s", "pause_s", "transfer_s", "bytes", "hash_s"}
    always = {"sync/retries", "sync/checksum_fail", "sync/version_lag"}
    assert set(timings) == {f"sync/{name}" for name in once} | always
    assert timings["sync/bytes"] == 12
    assert 0.02 <= timings["sync/pause_s"] <= timings["sync/total_s"]
    assert timings["sync/transfer_s"] < timings["sync/pause_s"]
    assert set(publisher.take_timings()) == always
    publisher.close()
    assert FakeSender.shut_down == 1
