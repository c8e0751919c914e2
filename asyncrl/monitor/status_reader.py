"""Finding a run's status.json, and putting it into words."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import UserError
from asyncrl.monitor import words
from asyncrl.monitor.process import start_ticks
from asyncrl.monitor.summary import ledger_line
from asyncrl.wire import Stats

LATE_S = 10.0
"""A launcher that has not written for this long is in trouble."""
SAME_START_S = 60.0
"""A process's start as the system tells it moves when its clock is set."""

Status = dict[str, Any]


def find(run: str, directory: Path) -> Path:
    """The folder of a run.

    Args:
        run: a folder, the name of one in `directory`, or "latest": the one launched last.
        directory: that holds the runs' folders.

    Raises:
        UserError: there is none.
    """
    names = {p.parent.name: p for p in directory.glob("*/config.yaml")}
    if run == "latest" and not _is_run(Path(run)) and run not in names:
        if not names:
            raise UserError(f"no run in {directory}: name one, or its folder with --dir")
        return max(names.values(), key=lambda p: p.stat().st_mtime).parent
    for folder in (Path(run).expanduser(), directory / run):
        if _is_run(folder):
            return folder
    raise UserError(
        f"no run {run}: neither a run's folder nor a name in {directory}{did_you_mean(run, names)}"
    )


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "status.json").is_file()


def read(folder: Path) -> Status:
    """The content of its status.json.

    Raises:
        UserError: there is none yet, or it is not one.
    """
    path = folder / "status.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != 1:
            raise ValueError(f"schema {content['schema']}, this asyncrl reads 1")
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no status.json: the run has only just begun, or is older than this file"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as e:
        raise UserError(f"{path} is not a run's status: {type(e).__name__}: {e}") from e
    return dict(content)


def describe(folder: Path, s: Status) -> Iterator[str]:
    """The status in lines, for people."""
    summary = _summary(folder)
    yield f"run       {s['run']}   {folder}"
    yield f"state     {_state(s, summary)}"
    reward = "-" if s["reward"] is None else f"{s['reward']:.3f}"
    left = "" if summary else f", {words.clock(s['left_s'])} left"
    yield (
        f"step      {s['step']}/{s['steps']}   version {s['version']}   reward {reward}"
        f"   {words.clock(s['elapsed_s'])} gone{left}"
    )
    if s.get("actors") is not None and not summary:  # an older file has none
        yield _actors(s["roles"], s["actors"])
    yield from _roles(s["roles"], ended=bool(summary))
    if s.get("stalled") and not summary:
        yield f"stalled   {words.age(s['stalled']['for_s'])}: {s['stalled']['why']}"
    for d in s.get("deadlines", ()):
        target = f"{d['what']} on {d['on']}" if d["on"] else d["what"]
        ago = "" if summary else f", {words.age(d['ago_s'])} ago"
        yield f"deadline  {d['role']} gave up after {words.age(d['waited_s'])} for {target}{ago}"
    if s["ledger"] is not None:
        stats = Stats(
            counts=s["ledger"]["counts"], gauges={}, conserved=s["ledger"]["conserved"],
            state="done" if summary else "running",
        )  # fmt: skip
        yield ledger_line(stats)


def state_of(folder: Path, s: Status) -> str:
    """What the run is doing or how it ended, in words."""
    return _state(s, _summary(folder))


def why_over(folder: Path, s: Status) -> str:
    """Why nobody can be asked any more, in words; empty while the launcher is alive."""
    summary = _summary(folder)
    if summary or s["state"] == "ended":
        return _state(s, summary)
    if s["host"] == socket.gethostname() and not _alive(s):
        return _state(s, summary)
    return ""


def _summary(folder: Path) -> Status:
    """What the run wrote at its end; nothing before."""
    try:
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return {"ended": content["ended"], "reason": content.get("reason", "")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _state(s: Status, summary: Status) -> str:
    if summary:
        ended, reason = summary["ended"], summary["reason"]
        return f"ended: {ended}" + (f" ({reason})" if reason and reason != ended else "")
    ago = max(time.time() - s["updated_at"], 0.0)
    told = f"last told {words.age(ago)} ago, while {s['phase']}"
    if s["state"] == "ended":
        return f"ended, without a summary; {told}"
    if s["host"] == socket.gethostname() and not _alive(s):
        return f"launcher (pid {s['pid']}) is not alive any more; {told}"
    if ago > LATE_S:
        return f"nothing heard of the launcher (pid {s['pid']} on {s['host']}); {told}"
    return str(s["phase"])


def _alive(s: Status) -> bool:
    """Whether the process that wrote the file lives, and not another one with its number."""
    try:
        process = psutil.Process(s["pid"])
        if (ticks := s.get("process_ticks")) is not None:  # an older file has none
            same = start_ticks(process.pid) == ticks
        else:
            same = abs(process.create_time() - s["process_started"]) < SAME_START_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _actors(roles: list[Status], wanted: int) -> str:
    states = Counter(r["state"] for r in roles if r["name"].startswith("actor-"))
    leaving = f", {states['leaving']} leave" if states["leaving"] else ""
    return f"actors    {states['alive']} of {wanted} alive{leaving}"


def _roles(roles: list[Status], ended: bool) -> Iterator[str]:
    rows = [("role", "state", "pid", "restarts", "version", "heard", "waits")]
    for r in roles:
        heard = None if ended else r["record_age_s"]
        state = "ended" if ended and r["state"] != "dead" else r["state"]
        rows.append((
            r["name"], state, "-" if r["pid"] is None else str(r["pid"]),
            str(r["restarts"]), "-" if r["version"] is None else str(r["version"]),
            "-" if heard is None else f"{words.age(heard)} ago",
            "-" if ended else _waits(r),
        ))  # fmt: skip
    widths = [max(len(row[k]) for row in rows) for k in range(6)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[6]]).rstrip()


def _waits(role: Status) -> str:
    """What it is doing while it starts, else its longest wait."""
    if role["phase"]:
        return f"{role['phase']} {role['phase_s']:.0f} s"
    if not role["waits"]:
        return "-"
    more = f" (and {role['open_waits'] - 1} more)" if role["open_waits"] > 1 else ""
    return words.wait(**role["waits"][0]) + more
