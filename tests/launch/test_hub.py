"""Records from a role's socket to the sinks: nothing lost that must not be, nobody held up."""

import json
import os
import threading
import time

import pytest
import zmq

from asyncrl import wire
from asyncrl.hub import Hub, HubClient
from asyncrl.sinks import JsonlSink
from tests.helpers.eventually import eventually


def record(k=0, role="actor", rank=0, **fields):
    fields = {"metrics": {"queue/depth": float(k)}} | fields
    return wire.Record(role=role, rank=rank, step=k, version=0, incarnation=0, **fields)


class Sink:
    """Remembers what it was given; `gate` closed makes it hang."""

    def __init__(self):
        self.seen = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def write(self, line):
        self.entered.set()
        self.gate.wait(60)
        self.seen.append(line)

    def close(self):
        self.closed = True


class Hanging(Sink):
    def __init__(self):
        super().__init__()
        self.gate.clear()


@pytest.fixture
def jsonl(tmp_path):
    return JsonlSink(str(tmp_path / "metrics.jsonl"), str(tmp_path / "events.jsonl"))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_of_many_roles_reach_the_files(tmp_path, jsonl):
    hub = Hub([jsonl], run_id="r1")

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
    lines = read(tmp_path / "metrics.jsonl")
    assert len(lines) == 800
    assert {line["run_id"] for line in lines} == {"r1"}
    for rank in range(4):
        mine = [line for line in lines if line["rank"] == rank]
        assert [line["metrics"]["queue/depth"] for line in mine] == list(range(200))
        assert all(line["role"] == "actor" and "event" not in line for line in mine)
    assert sorted(line["rank_seen"] for line in read(tmp_path / "events.jsonl")) == [0, 1, 2, 3]
    walls = [line["wall_s"] for line in lines]
    assert walls == sorted(walls)


def test_waits_and_pids_reach_listeners_and_no_sink(tmp_path, jsonl):
    heard, later, queued = [], [], Sink()
    hub = Hub([jsonl, queued], listeners=[heard.append], run_id="r")
    wait = wire.OpenWait(what="batch 3", on="buffer-0", age_s=4.0)
    hub.write(record(1, metrics={}, waits=(wait,)))
    hub.listen(later.append)
    hub.write(record(2, waits=(wait,), pid=77))
    # At once, in the caller's thread:
    assert [r["waits"][0]["what"] for r in heard] == ["batch 3", "batch 3"]
    assert [r["pid"] for r in heard] == [None, 77]
    assert [r["step"] for r in later] == [2]
    hub.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["step"] == 2
    assert not {"waits", "pid"} & line.keys()
    assert [r["step"] for r in queued.seen] == [2]
    assert not {"waits", "pid"} & queued.seen[0].keys()
    assert (tmp_path / "events.jsonl").read_text() == ""


def test_a_hanging_sink_loses_only_its_own_records(tmp_path, jsonl, caplog):
    hanging, other = Hanging(), Sink()
    hub = Hub([hanging, jsonl, other], run_id="r", queue_records=5)
    hub.write(record(0))
    assert hanging.entered.wait(30)
    began = time.monotonic()
    for k in range(1, 21):
        hub.write(record(k))
        assert_reaches(other, k)
    assert time.monotonic() - began < 30
    assert hub.metrics() == {"hub/sink_dropped/Hanging": 15.0}
    assert "Hanging lost 1 record(s): it is too slow" in caplog.text
    assert "Hanging lost 10 record(s)" in caplog.text
    assert "lost 2 record(s)" not in caplog.text
    hanging.gate.set()
    hub.close()
    assert [r["step"] for r in hanging.seen] == [0, 1, 2, 3, 4, 5], "what it took is in order"
    assert hanging.closed
    assert [r["step"] for r in other.seen] == list(range(21))
    assert len(read(tmp_path / "metrics.jsonl")) == 21
    assert "Hanging lost 15 record(s) in all" in caplog.text


def assert_reaches(sink, step, timeout=30):
    eventually(lambda: sink.seen and sink.seen[-1]["step"] == step, timeout_s=timeout)


def test_close_leaves_a_hanging_sink_behind_and_says_so(tmp_path, jsonl, caplog):
    hanging = Hanging()
    hub = Hub([hanging, jsonl], run_id="r")
    for k in range(3):
        hub.write(record(k))
    assert hanging.entered.wait(30)
    began = time.monotonic()
    hub.close(timeout_s=0.2)
    assert time.monotonic() - began < 10
    assert "Hanging did not end by its deadline: left behind with 2 record(s)" in caplog.text
    assert len(read(tmp_path / "metrics.jsonl")) == 3
    hanging.gate.set()
    hub._outlets[0]._thread.join(30)
    assert [r["step"] for r in hanging.seen] == [0], "nothing is written after the end"


def test_a_failing_sink_is_tried_again_and_does_not_stop_the_others(tmp_path, jsonl, caplog):
    class Broken(Sink):
        def write(self, line):
            if line["step"] < 2:
                raise OSError("disk full")
            super().write(line)

    broken = Broken()
    hub = Hub([broken, jsonl], run_id="r")
    client = HubClient(hub.endpoint, "learner")
    for step in range(3):
        client.emit({"loss/policy": 1.0}, step=step, version=0)
    client.close()
    hub.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 3
    assert [r["step"] for r in broken.seen] == [2]
    assert caplog.text.count("sink Broken failed") == 1
    assert hub.metrics() == {"hub/sink_dropped/Broken": 2.0}


def test_a_failing_listener_stops_neither_the_others_nor_the_files(tmp_path, jsonl, caplog):
    def broken(line):
        raise KeyError("x")

    heard = []
    hub = Hub([jsonl], listeners=[broken, heard.append], run_id="r")
    for k in range(3):
        hub.write(record(k))
    hub.close()
    assert len(read(tmp_path / "metrics.jsonl")) == len(heard) == 3
    assert caplog.text.count("broken at 0x") == 1


def test_threads_of_a_role_share_its_client_and_keep_their_order():
    heard = []
    hub = Hub([], listeners=[heard.append], run_id="r")
    client = HubClient(hub.endpoint, "learner", 1)

    def talk(name):
        for step in range(500):
            client.emit({name: 1.0}, step=step, version=0)

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    hub.close()
    assert hub.malformed == 0
    assert {r["pid"] for r in heard} == {os.getpid()}
    for name in "abc":
        assert [r["step"] for r in heard if name in r["metrics"]] == list(range(500))


def test_the_files_never_drop_however_slow_the_disk(tmp_path, jsonl, monkeypatch):
    gate, put = threading.Event(), JsonlSink._put

    def slow(file, line):
        assert gate.wait(60)
        put(file, line)

    monkeypatch.setattr(JsonlSink, "_put", staticmethod(slow))
    hub = Hub([jsonl], run_id="r", queue_records=5)
    for k in range(100):
        hub.write(record(k))
    gate.set()
    hub.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == list(range(100))
    assert hub.metrics() == {}


def test_a_full_disk_is_told_once_counted_and_leaves_no_torn_line(tmp_path, jsonl, caplog):
    class HalfFull:
        """A file on a disk that takes only half of what is written."""

        def __init__(self, file):
            self.file, self.full = file, False

        def write(self, data):
            return self.file.write(data[: len(data) // 2] if self.full else data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    disk = jsonl._metrics._file = HalfFull(jsonl._metrics._file)
    jsonl.write(line := {"step": 0, "metrics": {"a": 1.0}, "hist": {}, "event": None})
    hub = Hub([jsonl], run_id="r")
    disk.full = True
    for k in range(3):
        hub.write(record(k, event={"event": "told"}))
    eventually(lambda: hub.metrics() == {"hub/sink_dropped/JsonlSink": 3.0})
    assert str(tmp_path / "metrics.jsonl") in hub.troubles()["JsonlSink"]
    assert "make room; records are lost" in hub.troubles()["JsonlSink"]
    disk.full = False
    hub.write(record(9))
    hub.close()
    assert hub.troubles() == {}
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [line["step"], 9]
    assert caplog.text.count("sink JsonlSink lost 1 record") == 1
    assert "the disk took" in caplog.text


def test_close_ends_though_a_role_never_ceases(tmp_path, jsonl, monkeypatch):
    monkeypatch.setattr("asyncrl.hub.DRAIN_S", 0.3)
    hub = Hub([jsonl], run_id="r")
    end = threading.Event()

    def talk():
        client = HubClient(hub.endpoint, "actor")
        client._socket.setsockopt(zmq.LINGER, 0)
        while not end.wait(0.001):
            client.emit({"queue/depth": 1.0}, step=0, version=0)
        client.close()

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        eventually(lambda: (tmp_path / "metrics.jsonl").stat().st_size)
        began = time.monotonic()
        hub.close()
        assert time.monotonic() - began < 20
        assert not hub._thread.is_alive()
    finally:
        end.set()
        thread.join()


def test_records_that_find_no_room_are_counted():
    client = HubClient("tcp://127.0.0.1:1", "actor")  # nobody listens: the queue fills up
    client._socket.setsockopt(zmq.LINGER, 0)
    sent = 10_050
    for step in range(sent):
        client.emit({"queue/depth": 1.0}, step=step, version=0)
    assert 0 < client._dropped <= sent
    client.close()


def test_malformed_records_are_counted():
    hub = Hub([], run_id="r")
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(hub.endpoint)
    socket.send(b"\xc1 not msgpack")
    socket.send_multipart(wire.encode(wire.Ok()))
    socket.close(linger=2000)
    context.term()
    hub.close()
    assert hub.malformed == 2
    assert hub.metrics() == {"hub/malformed": 2.0}
