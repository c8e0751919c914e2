"""The publisher's waits, its end and its timings, with a sender that moves no bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner import publish
from asyncrl.learner.publish import BroadcastPublisher
from asyncrl.types import Version
from asyncrl.weights import ParamSpec


class FakeSender:
    """Drives the (empty) fleet as vLLM's engines do; `broadcast` stands for the collective."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.broadcast: Callable[[], object] = lambda: None
        self.shut_down = 0

    def send_weights(self) -> None:
        self.fleet.start_weight_update()
        self.broadcast()
        self.fleet.update_weights({})
        self.fleet.finish_weight_update()

    def shutdown(self) -> None:
        self.shut_down += 1


class Publisher(BroadcastPublisher):
    def _join(self, backend: str, address: str, world_size: int) -> Any:
        self.sender = FakeSender(self._fleet)
        return self.sender


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(
        [], rank=0, world=1, source=lambda: [("w", torch.ones(3))],
        metadata=[ParamSpec("w", "float32", (3,))], backend="gloo", device=torch.device("cpu"),
        timeout_s=0.05,
    )  # fmt: skip
    yield made
    made._fleet.close()


def fail() -> None:
    raise RuntimeError("cut")


def test_a_stuck_collective_is_given_up_and_close_does_not_wait_again(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "STUCK_MARGIN_S", 0.05)
    released = threading.Event()
    publisher.sender.broadcast = released.wait
    publisher.publish(Version(0, 1))
    thread = publisher._thread
    assert thread is not None
    try:
        with pytest.raises(WeightSyncError, match="weights 0:1: the sending thread is stuck"):
            publisher.wait()
        assert thread.is_alive()
        with pytest.raises(WeightSyncError, match="stuck"):
            publisher.publish(Version(0, 2))
        monkeypatch.setattr(publish, "STUCK_MARGIN_S", 3600.0)
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 60
        assert publisher.sender.shut_down == 0  # it would wait for the collective
    finally:
        released.set()
        thread.join(30)
    assert not thread.is_alive()


def test_close_repeats_no_failure_and_hides_none(publisher: Publisher) -> None:
    publisher.sender.broadcast = fail
    publisher.publish(Version(0, 1))
    with pytest.raises(WeightSyncError, match="weights 0:1: RuntimeError: cut"):
        publisher.close()
    assert publisher.sender.shut_down == 2  # by the thread and by close
    publisher.close()


def test_timings_are_handed_out_once_for_each_publication(publisher: Publisher) -> None:
    assert publisher.take_timings() == {}
    publisher.sender.broadcast = lambda: time.sleep(0.02)  # between begin and receive
    publisher.publish(Version(0, 1))
    publisher.wait()
    timings = publisher.take_timings()
    names = {"blocked_s", "total_s", "pause_s", "transfer_s", "bytes"}
    assert set(timings) == {f"sync/{name}" for name in names}
    assert timings["sync/bytes"] == 12
    assert 0.02 <= timings["sync/pause_s"] <= timings["sync/total_s"]
    assert timings["sync/transfer_s"] < timings["sync/pause_s"]
    assert publisher.take_timings() == {}
    publisher.close()
    assert publisher.sender.shut_down == 1
