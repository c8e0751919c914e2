"""What a process notes of itself: bounded, whole lines, and never the role's trouble."""

import json
import os
import threading

import pytest

from asyncrl import spans
from asyncrl.metrics import TimeShares
from asyncrl.spans import SpanLog, span_log


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace" / "actor-1.jsonl"


def make(tmp_path, max_mib=1.0):
    return span_log(str(tmp_path), "actor", 1, "r", max_mib)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_spans_of_all_threads_are_written_with_whose_they_are(tmp_path, path):
    log = make(tmp_path)
    assert not path.parent.exists(), "nothing before there is something to write"
    threads = [
        threading.Thread(target=lambda k=k: [log.add("t", f"{k}", i, i + 0.5) for i in range(100)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with log.span("weights", "begin", version="0:3"):
        pass
    assert log.flush() == {}
    process, *lines = read(path)
    assert (process["track"], process["name"], process["pid"]) == (
        "process",
        "actor-1",
        os.getpid(),
    )
    assert {"role": "actor", "rank": 1, "run_id": "r"}.items() <= process.items()
    assert len(lines) == 401
    assert lines[-1]["name"] == "begin"
    assert lines[-1]["version"] == "0:3"
    assert {(line["name"], line["at"]) for line in lines[:-1]} == {
        (f"{k}", float(i)) for k in range(4) for i in range(100)
    }
    log.add("t", "later", 1.0, 2.0)
    log.close()
    log.close()
    assert read(path)[-1]["s"] == 1.0


def test_states_add_up_to_what_time_shares_say(tmp_path, path):
    now = 0.0
    log = make(tmp_path)
    shares = TimeShares(clock=lambda: now, spans=log)
    for state, seconds in (("generate", 2.0), ("reward", 0.5), ("generate", 1.0)):
        with shares.state(state):
            now += seconds
        now += 0.25
    with shares.state("generate"), shares.state("reward"):
        now += 4.0
        with shares.away("generate"):
            now += 8.0
    with shares.state("train"):
        pass  # too short to be worth a line
    log.flush()
    told: dict[str, float] = {}
    for line in read(path)[1:]:
        assert line["track"] == "state"
        told[line["name"]] = told.get(line["name"], 0.0) + line["s"]
    totals = {k: v for k, v in shares.totals().items() if v}
    assert told == pytest.approx(totals)
    assert totals["reward"] == 8.5


def test_the_newest_are_kept(tmp_path, path):
    log = make(tmp_path, max_mib=20_000 / 2**20)
    for k in range(1000):
        log.add("t", f"{k:04}", k, k + 1)
        log.flush()
    old = read(path.with_name(path.name + ".old"))
    new = read(path)
    assert old[0]["track"] == new[0]["track"] == "process"
    names = [line["name"] for line in old[1:] + new[1:]]
    assert names == [f"{k:04}" for k in range(1000 - len(names), 1000)]
    size = sum(p.stat().st_size for p in path.parent.iterdir())
    assert 10_000 < size <= 20_000


def test_what_a_killed_process_left_torn_spoils_nothing(tmp_path, path):
    first = make(tmp_path)
    first.add("t", "one", 0, 1)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"track": "t", "na')
    second = make(tmp_path)
    second.add("t", "two", 0, 1)
    second.close()
    lines = path.read_bytes().splitlines()
    assert b"two" in lines[-1]
    assert json.loads(lines[-2])["track"] == "process"


def test_what_cannot_be_kept_is_counted(tmp_path, path, monkeypatch, caplog):
    monkeypatch.setattr(spans, "MAX_PENDING", 3)
    log = make(tmp_path)
    for k in range(5):
        log.add("t", f"{k}", k, k)
    assert log.flush() == {"trace/dropped": 2.0}
    path.unlink()
    path.mkdir()
    log.close()  # so that it has to be opened again
    broken = make(tmp_path)
    broken.add("t", "x", 0, 1)
    assert broken.flush() == {"trace/dropped": 1.0}
    broken.add("t", "y", 0, 1)
    assert broken.flush() == {"trace/dropped": 2.0}
    assert len(caplog.records) == 1, "told once"


def test_without_a_folder_nothing_is_kept(tmp_path):
    for log in (SpanLog(), span_log(str(tmp_path), "actor", 0, "r", None)):
        log.add("t", "x", 0, 1)
        assert log.flush() == {}
        assert not log._pending
        assert not log.on
    assert list(tmp_path.iterdir()) == []
