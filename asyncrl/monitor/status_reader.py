"""Finding a run's status.json, and putting it into words."""

from __future__ import annotations

import shlex
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from asyncrl.config.paths import expand
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import UserError
from asyncrl.monitor import status_schema, words
from asyncrl.monitor.fleet_view import ENDED
from asyncrl.monitor.process import start_ticks
from asyncrl.monitor.reading.plain import load
from asyncrl.monitor.summary import ledger_line
from asyncrl.wire import Stats

LATE_S = 10.0
"""A launcher that has not written for this long is in trouble."""
SAME_START_S = 60.0
"""A process's start as the system tells it moves when its clock is set."""
UNKNOWN = "unknown"
"""State of a role that lived when the launcher was last heard of."""

Status = dict[str, Any]


class NoStatusError(UserError):
    """The run has no status.json yet."""


class Standing(NamedTuple):
    """How much of a status.json is still so."""

    kind: Literal["alive", "silent", "gone", "ended"]
    """silent: the launcher should have written since; gone: it is not alive any more."""
    ago_s: float
    """Seconds since it was written."""

    @property
    def known(self) -> bool:
        """Whether it tells what is, or how it ended, and not only what was."""
        return self.kind in ("alive", "ended")

    @property
    def over(self) -> bool:
        """Whether nobody can be asked any more."""
        return self.kind in ("gone", "ended")


def standing(folder: Path, s: Status) -> Standing:
    """How much of a run's status is still so."""
    return _standing(s, _summary(folder))


def _standing(s: Status, summary: Status) -> Standing:
    ago = max(time.time() - s["updated_at"], 0.0)
    if summary or s["state"] == "ended":
        return Standing("ended", ago)
    if s["host"] == socket.gethostname() and not _alive(s):
        return Standing("gone", ago)
    return Standing("silent" if ago > LATE_S else "alive", ago)


def as_known(role: Status, now: Standing) -> Status:
    """A role as far as it is known: its age grows on while nothing is heard, a deadline does not.

    Args:
        role: of status.json, written when the launcher was last heard of.
    """
    if now.kind == "ended":
        state = "ended" if role["state"] != "dead" else "dead"
        return role | {"state": state, "record_age_s": None, "phase": None, "waits": [],
                       "open_waits": 0}  # fmt: skip
    if now.known or role["state"] in ENDED:
        return role
    age = role["record_age_s"]
    return role | {
        "state": UNKNOWN, "record_age_s": None if age is None else age + now.ago_s,
        "waits": [wait | {"deadline_s": None} for wait in role["waits"]],
    }  # fmt: skip


def how_to_go_on(folder: Path, now: Standing) -> str:
    """The command that resumes a run that is over and did not finish; empty without checkpoints."""
    if not now.over or _summary(folder).get("ended") == "finished":
        return ""
    if next(folder.glob("checkpoints/step-*/meta.json"), None) is None:
        return ""
    return resume_command(folder)


def resume_command(folder: Path) -> str:
    """As it can be pasted: the run's name alone where --resume looks for names."""
    usual = Path("runs", folder.name)
    named = usual.is_dir() and usual.resolve() == folder.resolve()
    return f"asyncrl launch --resume {shlex.quote(folder.name if named else str(folder))}"


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
    for folder in (expand(run, "RUN"), directory / run):
        if _is_run(folder):
            return folder
    raise UserError(
        f"no run {run}: neither a run's folder nor a name in {directory}{did_you_mean(run, names)}"
    )


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "status.json").is_file()


def read(folder: Path) -> Status:
    """The content of its status.json, its fields checked.

    Raises:
        NoStatusError: there is none yet.
        UserError: it is not one.
    """
    path = folder / "status.json"
    try:
        content = load(path)
        if content["schema"] != 1:
            raise ValueError(f"schema {content['schema']}, this asyncrl reads 1")
        status_schema.check(content)
    except FileNotFoundError:
        raise NoStatusError(
            f"{folder} has no status.json: the run has only just begun, or is older than this file"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise UserError(f"{path} is not a run's status: {type(e).__name__}: {e}") from e
    return dict(content)


def describe(folder: Path, s: Status) -> Iterator[str]:
    """The status in lines, for people."""
    summary = _summary(folder)
    now = _standing(s, summary)
    yield f"run       {s['run']}   {folder}"
    yield f"state     {_state(s, summary, now)}"
    if go_on := how_to_go_on(folder, now):
        yield f"go on     {go_on}"
    reward = "-" if s["reward"] is None else f"{s['reward']:.3f}"
    left = f", {words.clock(s['left_s'])} left" if now.kind == "alive" else ""
    yield (
        f"step      {s['step']}/{s['steps']}   version {s['version']}   reward {reward}"
        f"   {words.clock(s['elapsed_s'])} gone{left}"
    )
    if s.get("actors") is not None and now.kind != "ended":  # an older file has none
        yield _actors(s["roles"], s["actors"]) + ("" if now.known else ", when last told")
    yield from _roles([as_known(role, now) for role in s["roles"]], now)
    if s.get("stalled") and now.kind != "ended":
        when = "" if now.known else ", when last told"
        yield f"stalled   {words.age(s['stalled']['for_s'])}{when}: {s['stalled']['why']}"
    for d in s.get("deadlines", ()):
        target = f"{d['what']} on {d['on']}" if d["on"] else d["what"]
        passed = d["ago_s"] + (0.0 if now.known else now.ago_s)
        ago = "" if now.kind == "ended" else f", {words.age(passed)} ago"
        yield f"deadline  {d['role']} gave up after {words.age(d['waited_s'])} for {target}{ago}"
    if s["ledger"] is not None:
        stats = Stats(
            counts=s["ledger"]["counts"], gauges={}, conserved=s["ledger"]["conserved"],
            state="done" if summary else "running",
        )  # fmt: skip
        yield ledger_line(stats)


def state_of(folder: Path, s: Status) -> str:
    """What the run is doing or how it ended, in words."""
    summary = _summary(folder)
    return _state(s, summary, _standing(s, summary))


def why_over(folder: Path, s: Status) -> str:
    """Why nobody can be asked any more, in words; empty while the launcher is alive."""
    summary = _summary(folder)
    now = _standing(s, summary)
    return _state(s, summary, now) if now.over else ""


def _summary(folder: Path) -> Status:
    """What the run wrote at its end; nothing before."""
    try:
        content = load(folder / "summary.json")
        return {"ended": str(content["ended"]), "reason": str(content.get("reason") or "")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _state(s: Status, summary: Status, now: Standing) -> str:
    if summary:
        ended, reason = summary["ended"], summary["reason"]
        return f"ended: {ended}" + (f" ({reason})" if reason and reason != ended else "")
    told = f"last told {words.age(now.ago_s)} ago, while {s['phase']}"
    match now.kind:
        case "ended":
            return f"ended, without a summary; {told}"
        case "gone":
            return f"launcher (pid {s['pid']}) is not alive any more; {told}"
        case "silent":
            return f"nothing heard of the launcher (pid {s['pid']} on {s['host']}); {told}"
        case "alive":
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


def _roles(roles: list[Status], now: Standing) -> Iterator[str]:
    rows = [("role", "state", "pid", "restarts", "version", "heard",
             "waits" if now.known else "waited then")]  # fmt: skip
    for r in roles:
        heard = r["record_age_s"]
        rows.append((
            r["name"], r["state"], "-" if r["pid"] is None else str(r["pid"]),
            str(r["restarts"]), "-" if r["version"] is None else str(r["version"]),
            "-" if heard is None else f"{words.age(heard)} ago", _waits(r),
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
    return words.wait_of(role["waits"][0]) + more
