"""Time shares, and records from a role's socket to the files."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.metrics import STATES, Hub, HubClient, IdleMeter, JsonlSink, TimeShares

ops = st.lists(
    st.tuples(st.sampled_from(STATES[:-1]), st.booleans(), st.floats(0, 10)), max_size=60
)


@given(ops)
def test_each_second_belongs_to_exactly_one_state(operations):
    now = 0.0
    shares = TimeShares(clock=lambda: now)
    active = dict.fromkeys(STATES, 0)
    expected = dict.fromkeys(STATES, 0.0)
    for state, enter, seconds in operations:
        if enter:
            shares.enter(state)
            active[state] += 1
        elif active[state]:
            shares.leave(state)
            active[state] -= 1
        now += seconds
        expected[next((s for s in STATES if active[s]), "idle")] += seconds
    totals = shares.totals()
    assert sum(totals.values()) == pytest.approx(now)
    assert totals == pytest.approx(expected)


def test_leaving_what_was_not_entered_is_an_error():
    with pytest.raises(ValueError, match="train"):
        TimeShares().leave("train")


def test_idle_meter_reads_the_share_since_the_last_reading():
    now = 0.0
    shares = TimeShares(clock=lambda: now)
    meter = IdleMeter(shares)
    assert meter.read() is None
    with shares.state("get_wait"):
        now = 3.0
    with shares.state("train"):
        now = 4.0
    assert meter.read() == pytest.approx(0.75)
    with shares.state("train"):
        now = 5.0
    assert meter.read() == pytest.approx(0.0)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_of_many_roles_reach_the_files(tmp_path):
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    hub = Hub([JsonlSink(str(metrics), str(events))], run_id="r1")

    def role(rank):
        client = HubClient(hub.endpoint, "actor", rank)
        for step in range(200):
            client.emit({"queue/depth": step}, step=step, version=step // 2, incarnation=0)
        client.emit(step=200, version=100, event={"event": "end", "rank_seen": rank})
        client.close()

    threads = [threading.Thread(target=role, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.close()
    lines = read(metrics)
    assert len(lines) == 800
    assert {line["run_id"] for line in lines} == {"r1"}
    for rank in range(4):
        mine = [line for line in lines if line["rank"] == rank]
        assert [line["metrics"]["queue/depth"] for line in mine] == list(range(200))
        assert all(line["role"] == "actor" and "event" not in line for line in mine)
    assert sorted(line["rank_seen"] for line in read(events)) == [0, 1, 2, 3]
    walls = [line["wall_s"] for line in lines]
    assert walls == sorted(walls)


def test_a_failing_sink_does_not_stop_the_others(tmp_path, caplog):
    class Broken:
        def write(self, record):
            raise OSError("disk full")

        def close(self):
            raise AssertionError("a sink that is off must not be closed again")

    metrics = tmp_path / "metrics.jsonl"
    hub = Hub([Broken(), JsonlSink(str(metrics), str(tmp_path / "e"))], run_id="r")
    client = HubClient(hub.endpoint, "learner")
    for step in range(3):
        client.emit({"loss/policy": 1.0}, step=step, version=0)
    client.close()
    hub.close()
    assert len(read(metrics)) == 3
    assert caplog.text.count("Broken failed") == 1


def test_records_that_find_no_room_are_counted():
    client = HubClient("tcp://127.0.0.1:1", "actor")  # nobody listens: the queue fills up
    client._socket.setsockopt(17, 0)  # LINGER: nothing to wait for at the end
    sent = 10_050
    for step in range(sent):
        client.emit({"queue/depth": 1.0}, step=step, version=0)
    assert 0 < client._dropped <= sent
    client.close()


def test_malformed_records_are_counted(tmp_path):
    import zmq

    hub = Hub([], run_id="r")
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(hub.endpoint)
    socket.send(b"\xc1 not msgpack")
    socket.close(linger=2000)
    context.term()
    hub.close()
    assert hub.malformed == 1
