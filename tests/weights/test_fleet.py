"""The learner's calls to several weight services: fan-out, failures by name, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from asyncrl import wire
from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.weight_fleet import FleetClient, Limits
from asyncrl.types import Version
from tests.weights.fakes import FakeEngine, Services

INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
V1 = Version(0, 1)


@pytest.fixture
def silent() -> Iterator[zmq.Socket[bytes]]:
    """A socket that takes requests and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def fleet(
    endpoints: list[str], workers: list[int] | None = None, *, s: float = 30, first: int = 0
) -> FleetClient:
    counts = workers or [1] * len(endpoints)
    members = [
        Member(f"actor-{i + first}", 1, endpoint, n)
        for i, (endpoint, n) in enumerate(zip(endpoints, counts, strict=True))
    ]
    client = FleetClient(members, Limits(step_s=s, transfer_s=s, margin_s=0.0))
    client.start_round(V1)
    return client


def test_fleet_drives_every_actor_and_gives_each_its_ranks() -> None:
    engines = [FakeEngine() for _ in range(3)]
    with Services(engines) as endpoints:
        client = fleet(endpoints, [2, 1, 4])
        client.init_weight_transfer_engine({"port": 1, "rank_offset": 1})
        client.start_weight_update()
        client.update_weights(INFO)
        client.finish_weight_update()
        assert client.applied == client.received == list(client.members)
        assert client.failures == {}
        client.close()
    assert [e.infos[0]["rank_offset"] for e in engines] == [1, 3, 4]
    assert all(e.applied == V1 for e in engines)
    assert set(client.timings) == {"join", "begin", "receive", "commit"}


def test_fleet_waits_longer_to_begin_where_actors_wait_for_their_requests(
    silent: zmq.Socket[bytes],
) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    client = fleet([f"tcp://127.0.0.1:{port}"], s=1.0)
    client.limits = client.limits._replace(drain_s=60.0)
    beginning = threading.Thread(target=client.start_weight_update)
    beginning.start()
    peer, *frames = silent.recv_multipart()
    left = client.deadline - time.monotonic()
    silent.send_multipart([peer, *wire.encode(wire.Ok(req=wire.decode(frames)[0].req))])
    beginning.join(30)
    assert 30 < left <= 61
    assert client.failures == {}
    client.close()


def test_fleet_names_who_refused_and_who_was_silent(silent: zmq.Socket[bytes]) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    with Services([FakeEngine(), FakeEngine(fails="begin")]) as endpoints:
        # actor-0 was not ready in time: the names are the announced ones, not places in the list.
        client = fleet([*endpoints, f"tcp://127.0.0.1:{port}"], s=1.0, first=1)
        with pytest.raises(WeightSyncError) as e:
            client.start_weight_update()
        kinds = {m.name: (f.phase, f.kind) for m, f in client.failures.items()}
        client.close()
    assert kinds == {"actor-2": ("begin", "refused"), "actor-3": ("begin", "silent")}
    text = str(e.value)
    assert text.startswith("weights 0:1, begin: actor-2 ")
    assert "refused with WeightSyncError: weight update: begin failed: no begin today" in text
    assert f"actor-3 (tcp://127.0.0.1:{port}) did not answer within" in text
    assert "actor-0" not in text
    assert "actor-1" not in text


def test_fleet_notices_a_death_long_before_the_deadline(silent: zmq.Socket[bytes]) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")

    def die_on_request() -> None:
        silent.recv_multipart()
        silent.close()

    thread = threading.Thread(target=die_on_request)
    thread.start()
    client = fleet([f"tcp://127.0.0.1:{port}"], s=60.0)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="receive: actor-0 .*its connection closed"):
        client.update_weights(INFO)
    thread.join(30)
    with pytest.raises(WeightSyncError, match="begin: actor-0 .*nothing listens there"):
        client.start_weight_update()
    assert [f.kind for f in client.failures.values()] == ["gone"]
    assert time.monotonic() - started < 30
    client.close()


def test_only_those_that_received_are_asked_to_commit() -> None:
    engines = [FakeEngine(), FakeEngine(fails="receive")]
    with Services(engines) as endpoints:
        client = fleet(endpoints)
        client.start_weight_update()
        with pytest.raises(WeightSyncError, match="receive: actor-1"):
            client.update_weights(INFO)
        client.finish_weight_update()
        assert [m.name for m in client.applied] == ["actor-0"]
        client.close()
    assert [e.steps[-1] for e in engines] == ["commit", "abandon"]


@pytest.mark.parametrize(
    ("fails", "version", "kind"), [("commit", V1, "dead"), ("", Version(0, 0), "applied")]
)
def test_failures_say_what_is_left_of_the_engine(fails: str, version: Version, kind: str) -> None:
    with Services([FakeEngine(fails=fails)]) as endpoints:
        client = fleet(endpoints)
        client.start_round(version)

        def publish() -> None:
            client.start_weight_update()
            client.update_weights(INFO)
            client.finish_weight_update()

        with pytest.raises(WeightSyncError):
            publish()
        assert [f.kind for f in client.failures.values()] == [kind]
        client.close()


def test_an_address_that_cannot_be_reached_is_a_failure_like_others() -> None:
    client = fleet(["nonsense"])
    with pytest.raises(WeightSyncError, match="begin: actor-0 .nonsense. has no address"):
        client.start_weight_update()
    client.close()


def test_a_wait_says_on_whom_and_can_be_shortened(silent: zmq.Socket[bytes]) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    client = fleet([f"tcp://127.0.0.1:{port}"], s=3600.0)
    seen: list[str] = []

    def look() -> None:
        silent.recv_multipart()
        seen.append(client.waiting_for())
        client.hurry()

    thread = threading.Thread(target=look)
    thread.start()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="did not answer within"):
        client.start_weight_update()
    assert time.monotonic() - started < 60
    thread.join(30)
    (text,) = seen
    assert text.startswith("weights 0:1, begin: no answer yet from actor-0 (3")
    assert client.waiting_for() == ""
    client.close()
