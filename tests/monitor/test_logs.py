"""One view of all logs: every line of every format is there once, in order, with whose it is."""

import io
import json
import logging
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from asyncrl import logs
from asyncrl.cli import app
from asyncrl.errors import UserError
from asyncrl.launch.ray_logs import keep_ray_logs
from asyncrl.monitor import log_file
from asyncrl.monitor.log_view import show
from asyncrl.monitor.logs import LogReader, shown

NOON = 1_764_504_000.0
"""2025-11-30T12:00:00Z"""


TRACE = "Traceback (most recent call last):\n"
CHAINED = "During handling of the above exception, another exception occurred:"


def ours(at, level, text, logger="asyncrl.actors.rollout"):
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return f"{stamp}.{round(at % 1 * 1000):03d}Z {level} {logger}: {text}\n"


def local(at, form):
    return time.strftime(form, time.localtime(at))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("{}\n")
    return tmp_path


def write(folder, name, text, mode="a"):
    with open(folder / "logs" / f"{name}.log", mode, encoding="utf-8") as file:
        file.write(text)


def test_lines_of_every_format_are_merged_by_time(folder):
    begin = "actor-0 of run r-1 begins, pid 7"
    write(folder, "actor-0", ours(NOON, "INFO", begin, "asyncrl.logs"))
    write(folder, "actor-0", f"(EngineCore pid=9) WARNING {local(NOON + 2, '%m-%d %H:%M:%S')} "
                             "[core.py:123] cache is full\n")  # fmt: skip
    write(folder, "actor-0", "terminate called after: Segmentation fault\n")
    write(folder, "learner-1", ours(NOON + 1.25, "ERROR", "run failed"))
    write(folder, "learner-1", f"{TRACE}  File x\n    f()\nValueError: no\n\n{CHAINED}\n\n{TRACE}"
                               "  File y\nKeyError: 'k'\n")  # fmt: skip
    write(folder, "learner-1", "a library prints this\n" + ours(NOON + 3, "INFO", "on"))
    write(folder, "ray", f"[{local(NOON + 0.5, '%Y-%m-%d %H:%M:%S')},500 W 11 12] (raylet) "
                         "main.cc:1: low memory\n")  # fmt: skip
    write(folder, "forkserver", f"W{local(NOON + 0.75, '%m%d %H:%M:%S')}.750000 12 torch/x.py:53] "
                                "no triton\nimports took 3 s\n")  # fmt: skip
    os.utime(folder / "logs" / "forkserver.log", (NOON, NOON))
    entries = LogReader(folder).update(whole=True)
    assert [(e.name, e.level, e.message) for e in entries] == [
        ("actor-0", "INFO", begin),
        ("ray", "WARNING", "main.cc:1: low memory"),
        ("forkserver", "WARNING", "no triton"),
        ("forkserver", "INFO", "imports took 3 s"),
        ("learner-1", "ERROR", "run failed"),
        ("learner-1", "INFO", "a library prints this"),
        ("actor-0", "WARNING", "cache is full"),
        ("actor-0", "ERROR", "terminate called after: Segmentation fault"),
        ("learner-1", "INFO", "on"),
    ]
    failed = entries[4]
    assert (failed.role, failed.rank, failed.run_id, failed.time) == (
        "learner",
        1,
        "r-1",
        NOON + 1.25,
    )
    assert failed.traceback.startswith("Traceback")
    assert failed.traceback.count("\n") == 9
    assert failed.traceback.endswith("KeyError: 'k'")
    assert entries[6].logger == "vllm EngineCore core.py:123"
    assert [e.logger for e in entries if e.message.startswith(("a lib", "term", "imp"))] == [
        "raw"
    ] * 3
    text = "\n".join(line for e in entries for line in shown(e))
    assert "learner-1  ERROR   actors.rollout: run failed\n    Traceback" in text


def test_it_reads_on_and_waits_for_the_end_of_what_grows(folder):
    reader = LogReader(folder)
    assert reader.update() == []
    write(folder, "actor-0", ours(NOON, "INFO", "one") + ours(NOON + 1, "ERROR", "two")[:20])
    assert reader.update() == [], "the newest may still grow"
    write(folder, "actor-0", ours(NOON + 1, "ERROR", "two")[20:] + "Traceback (most recent")
    assert [e.message for e in reader.update()] == ["one"]
    write(folder, "actor-0", " call last):\n  File\n")
    assert reader.update() == []
    write(folder, "actor-0", "ValueError: x\n" + ours(NOON + 2, "INFO", "three"))
    (two,) = reader.update()
    assert two.traceback.endswith("ValueError: x")
    assert [e.message for e in reader.update()] == ["three"], "nothing came: it is whole"
    write(folder, "actor-0", "\rprogress 1 %\rprogress 2 %\n")
    assert [e.message for e in reader.update(whole=True)] == ["progress 2 %"]
    assert reader.update(whole=True) == []


def test_a_line_with_the_form_of_a_record_and_no_date_is_raw(folder):
    lines = ("2026-13-45T00:00:00.000Z INFO x: y", "(m pid=1) INFO 99-99 99:99:99 [x] y",
             "I9999 99:99:99.123 1 x] y")  # fmt: skip
    write(folder, "actor-0", ours(NOON, "INFO", "one") + "\n".join(lines) + "\n")
    entries = LogReader(folder).update(whole=True)
    assert [(e.logger, e.message, e.time) for e in entries[1:]] == [
        ("raw", line, NOON) for line in lines
    ]


def test_what_others_wrote_moves_no_cursor(folder):
    write(folder, "actor-0", ours(NOON, "ERROR", "a\x1b[2Jb") + f"{TRACE}  File\x1b[2J\nKeyError\n")
    (entry,) = LogReader(folder).update(whole=True)
    assert any("\x1b[2J" in line for line in shown(entry)), "a file has it as it was"
    for line in shown(entry, colour=True):
        assert "\x1b[2J" not in line


def test_the_end_alone(folder):
    write(folder, "actor-0", "".join(ours(NOON + k, "INFO", f"line {k}") for k in range(3000)))
    write(folder, "launcher", ours(NOON + 2999.5, "INFO", "last"))
    found = LogReader(folder, tail=True).update(whole=True)
    assert [e.message for e in found[-3:]] == ["line 2998", "line 2999", "last"]
    assert len(found) < 3000
    (*_, last) = LogReader(folder, "actor", tail=True).update(whole=True)
    assert last.message == "line 2999"


def test_what_the_formatter_writes_is_read_back(folder):
    code = (
        "import logging, sys\n"
        "from asyncrl.logs import write_to\n"
        "write_to(sys.stderr, 'learner-0', 'run-9')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('a.b').exception('it %s', 'broke')\n"
        "logging.getLogger('a.b').debug('not shown')\n"
    )
    before = time.time()
    with open(folder / "logs" / "learner-0.log", "wb") as file:
        subprocess.run([sys.executable, "-c", code], check=True, stderr=file, timeout=60)
    begun, broke = LogReader(folder).update(whole=True)
    assert begun.message.startswith("learner-0 of run run-9 begins, pid ")
    assert (broke.level, broke.logger, broke.message, broke.run_id) == (
        "ERROR", "a.b", "it broke", "run-9",
    )  # fmt: skip
    assert broke.traceback.endswith("ZeroDivisionError: division by zero")
    assert before - 0.01 < begun.time <= broke.time < time.time() + 0.01


def test_the_launcher_s_records_are_written_for_a_while():
    stream, log = io.StringIO(), logging.getLogger("asyncrl.x")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with logs.written_to(stream, "launcher", "r"):
        log.info("within")
    log.warning("after")
    assert "launcher of run r begins" in stream.getvalue()
    assert "INFO asyncrl.x: within" in stream.getvalue()
    assert "after" not in stream.getvalue()
    assert (root.handlers, root.level) == (handlers, level)


@pytest.fixture
def shown_run(folder):
    for k, level in enumerate(("DEBUG", "INFO", "WARNING", "ERROR")):
        write(folder, f"actor-{k % 2}", ours(time.time() - 100 + k, level, f"m{k}"))
    write(folder, "launcher", ours(time.time(), "INFO", "now"))
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["m0", "m1", "m2", "m3", "now"]),
        (("--level", "warning"), ["m2", "m3"]),
        (("--role", "actor-1"), ["m1", "m3"]),
        (("--role", "actor", "--level", "info"), ["m1", "m2", "m3"]),
        (("--since", "50s"), ["now"]),
    ],
)
def test_the_command_s_filters(shown_run, options, expected):
    done = CliRunner().invoke(app, ["logs", str(shown_run), "--json", *options])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [line["message"] for line in lines] == expected
    fields = {"time", "run_id", "role", "rank", "level", "logger", "message", "traceback"}
    assert all(line.keys() == fields for line in lines)


def test_what_is_asked_for_must_be_there(shown_run):
    for options, words in (
        ({"role": "actor-7"}, "actor-0, actor-1, launcher"),
        ({"level": "loud"}, "debug, info, warning"),
        ({"since": "yesterday"}, "90s, 5m or 2h"),
    ):
        with pytest.raises(UserError, match=words):
            show(shown_run, **options)


def test_following_ends_with_the_run(shown_run):
    status = {
        "schema": 1, "run": "r", "run_id": "r-1", "state": "ended", "phase": "ending", "pid": 1,
        "process_started": 0.0, "host": "h", "updated_at": time.time(), "step": 1, "steps": 1,
        "version": 0, "reward": None, "elapsed_s": 1.0, "left_s": None, "roles": [],
        "ledger": None,
    }  # fmt: skip
    (shown_run / "status.json").write_text(json.dumps(status))
    out = io.StringIO()
    show(shown_run, follow=True, file=out)
    assert [line.rpartition(": ")[2] for line in out.getvalue().splitlines()] == [
        "m0", "m1", "m2", "m3", "now",
    ]  # fmt: skip


def test_ray_s_complaints_are_kept(tmp_path, folder):
    session = tmp_path / "session_2026-11-30_08-00-00_0_1" / "logs"
    session.mkdir(parents=True)
    os.symlink(session.parent, tmp_path / "session_latest")
    (session / "raylet.out").write_text(
        "[2025-11-30 12:00:00,000 I 1 1] (raylet) main.cc:1: hello\n"
        "[2025-11-30 12:00:01,000 E 1 1] (raylet) main.cc:2: dead\n"
    )
    (session / "worker-1.err").write_text(":job_id:01\nTraceback\n")
    (session / "gcs_server.out").write_text("- GetAllNodeInfo request count: 0\n")
    (session / "gcs_server.err").write_text("")
    keep_ray_logs(str(tmp_path), str(folder / "logs" / "ray.log"))
    entries = LogReader(folder).update(whole=True)
    assert [e.message for e in entries if "main.cc" in e.message] == ["main.cc:2: dead"]
    assert {e.level for e in entries if "main.cc" in e.message} == {"ERROR"}
    assert {"Traceback", "worker-1.err:"} <= {e.message for e in entries}
    assert not [e for e in entries if "job_id" in e.message or "request count" in e.message]
    keep_ray_logs(str(tmp_path / "none"), str(tmp_path / "no.log"))
    assert not (tmp_path / "no.log").exists()


def test_the_first_lines_come_before_the_rest_is_read(folder, monkeypatch):
    monkeypatch.setattr(log_file, "CHUNK_BYTES", 1_000)
    for role in ("actor-0", "actor-1"):
        write(
            folder, role, "printed first\n" + ours(NOON, "INFO", f"{role} of run r-1 begins, pid 7")
        )
        write(folder, role, "".join(ours(NOON + k, "INFO", f"{role} {k}") for k in range(1, 500)))
    reader = LogReader(folder)
    stream = reader.stream(whole=True)
    assert [next(stream).run_id for _ in range(2)] == ["r-1", "r-1"]
    assert all(file.at <= 2_000 for file in reader._files.values())
    rest = list(stream)
    assert [e.time for e in rest] == sorted(e.time for e in rest)
    assert len(rest) == 2 * 501 - 2
    assert rest == LogReader(folder).update(whole=True)[2:]


def test_a_log_of_an_odd_name_is_read(folder):
    for name in ("x-²", f"x-{'9' * 200}"):
        write(folder, name, ours(NOON, "INFO", "here"))
        assert LogReader(folder, name).update(whole=True)[0].name == name


@pytest.mark.parametrize("after", [0, 1.5, 2, 3.5, 60])
def test_since_leaves_out_what_is_older_and_nothing_else(folder, after):
    for launch, at in (("r-1", NOON), ("r-2", NOON + 2)):
        write(folder, "actor-0", ours(at, "INFO", f"actor-0 of run {launch} begins, pid 7"))
        write(folder, "actor-0", ours(at + 1, "ERROR", "no") + f"{TRACE}ValueError: no\nraw\n")
    write(folder, "ray", f"[{local(NOON + 9, '%Y-%m-%d %H:%M:%S')},000 W 11 12] (raylet) late\n")
    whole = [e for e in LogReader(folder).update(whole=True) if e.time >= NOON + after]
    some = LogReader(folder, since=NOON + after).update(whole=True)
    assert [e for e in some if e.time >= NOON + after] == whole
    assert len(some) <= len(whole) + 3
