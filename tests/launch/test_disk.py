"""A disk that is full: what was written stays whole, what is lost is counted and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from asyncrl.config.schema import Config
from asyncrl.disk import log_stream, trouble
from asyncrl.monitor.board import Board
from asyncrl.monitor.console import ConsoleView

LIMIT = 20_000
FULL = """
import resource, sys
from pathlib import Path
from asyncrl import wire
from asyncrl.config.schema import Config
from asyncrl.hub import Hub
from asyncrl.idlog import IdLog
from asyncrl.monitor.board import Board
from asyncrl.monitor.status_file import StatusFile
from asyncrl.sinks import JsonlSink
from asyncrl.types import SampleId

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

def record(k):
    return wire.Record(role="learner", rank=0, step=k, version=0, incarnation=0,
                       metrics={"loss/policy": 1.0}, event={"event": "told", "k": k})

def drained(hub, k):
    hub.write(record(k))
    while hub._outlets[0]._queue:
        pass

resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
hub = Hub([JsonlSink(str(folder / "metrics.jsonl"), str(folder / "events.jsonl"))], run_id="r")
ids = IdLog(str(folder / "ids.tsv"))
for k in range(600):
    hub.write(record(k))
    ids.add("trained", SampleId("sums", 0, k, 0), "x" * 30)
    ids.add("trained", SampleId("sums", 0, k, 1), "x" * 30)
    ids.flush()
board = Board(Config())
status = StatusFile(str(folder / "status.json"), board, run_id="r", run="r", every_s=3600)
board.phase = "x" * limit
status._write("running")
while not hub.troubles():
    pass
print(hub.troubles()["JsonlSink"])
def whole():
    names = ("metrics.jsonl", "events.jsonl")
    return min(len((folder / name).read_bytes().splitlines()) for name in names)

while hub._outlets[0].dropped + whole() < 600:  # a record is lost, or whole in both files
    pass
lost = (hub.metrics()["hub/sink_dropped/JsonlSink"], ids.lost)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
board.phase = "training"
hub.write(record(1000))
ids.add("trained", SampleId("sums", 0, 1000, 0), 1000)
ids.close()
status.close()
hub.close()
assert not hub.troubles()
print(*lost)
"""


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The files of a process whose files may not grow, until they may; and what it said."""
    folder = tmp_path_factory.mktemp("full")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder), str(LIMIT)], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines(), done.stderr


def test_records_are_whole_and_what_is_lost_is_counted_and_said(full):
    folder, (told, counts), _ = full
    assert told.startswith(str(folder))
    assert ".jsonl cannot be written (" in told
    assert "(file too large, the limit is 20,000 bytes): raise it (ulimit -f); records are" in told
    lost = 0
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (folder / name).read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps[:-1] == list(range(len(steps) - 1))
        assert steps[-1] == 1000
        lost = max(lost, 600 - (len(steps) - 1))
    assert float(counts.split()[0]) == lost > 100


def test_lists_of_ids_are_whole(full):
    folder, (_, counts), said = full
    rows = [line.split("\t") for line in (folder / "ids.tsv").read_text().splitlines()]
    numbers = [(int(row[3]), int(row[4])) for row in rows]
    there = len(numbers) // 2
    assert numbers == [*((k, n) for k in range(there) for n in (0, 1)), (1000, 0)]
    assert int(counts.split()[1]) == 2 * (600 - there) > 0
    assert said.count("facts about samples are left out") == 1


def test_the_status_is_the_last_that_had_room(full):
    folder, _, said = full
    assert json.loads((folder / "status.json").read_text())["phase"] == "training"
    assert "status.json cannot be written" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "x"), "no space left on device, .* GiB are free\\): make room"),
        (OSError(27, "x"), "file too large\\): use a file system that takes files of this size"),
        (OSError(30, "x"), "read-only file system\\): let this user write there"),
        (OSError(5, "x"), "input/output error\\): see to the disk"),
    ],
)
def test_words_for_a_disk_that_refuses(tmp_path, error, words):
    with pytest.raises(OSError, match=words):
        raise OSError(trouble(tmp_path / "file", error))


def test_logs_and_console_lose_lines_and_nobody_who_writes_them(tmp_path):
    with log_stream(os.open("/dev/full", os.O_WRONLY), closefd=True) as log:
        print("lost", file=log)
        log.buffer.write(b"lost")
        log.flush()
    terminal = open("/dev/full", "w")  # noqa: SIM115
    ConsoleView(Board(Config()), title="", mode="plain", file=terminal).say("lost")
    with pytest.raises(OSError, match="No space left"):
        terminal.close()
    path = tmp_path / "log"
    with log_stream(os.open(path, os.O_WRONLY | os.O_CREAT), closefd=True) as log:
        print("k\u00fche \udc80", file=log)
        assert path.read_bytes() == b"k\xc3\xbche \\udc80\n", "line by line"
