"""What is shown of a run beside its figures, from its files, as plain data."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.monitor import words
from asyncrl.monitor.advice import advise_run, as_json
from asyncrl.monitor.log_file import Entry as LogEntry
from asyncrl.monitor.reading.finals import Final
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.reading.plain import load
from asyncrl.monitor.reading.recent import recent_samples
from asyncrl.monitor.status_reader import (
    NoStatusError,
    Standing,
    Status,
    as_known,
    how_to_go_on,
    read,
    standing,
    state_of,
    why_over,
)
from asyncrl.monitor.summary import TERMS
from asyncrl.recording import Entry

EVENTS = 60
"""The newest that are sent."""
SAMPLES = 8


def brief(folder: Path) -> dict[str, Any]:
    """A run in the list of runs."""
    try:
        status = read(folder)
    except NoStatusError:
        return unread("no status.json yet")
    except UserError as e:
        return unread(str(e).removeprefix(f"{folder}{os.sep}"))
    over = why_over(folder, status)
    return {
        "state": over or state_of(folder, status), "over": bool(over),
        "step": status["step"], "steps": status["steps"],
    }  # fmt: skip


def unread(why: str) -> dict[str, Any]:
    """A run of whose state nothing is known, in the list of runs."""
    return {"state": words.text(why), "over": False, "step": None, "steps": None}


def status_of(folder: Path) -> Status | None:
    """A run's status.json; None where there is none that can be read."""
    try:
        return read(folder)
    except UserError:
        return None


def state(
    folder: Path, history: RunHistory, finals: Sequence[Final], events: int = EVENTS
) -> dict[str, Any]:
    """The tiles, the roles with their waits, the ledger and the last events of a run."""
    status = status_of(folder)
    found = brief(folder) | {
        "finals": [[f.label, f.text] for f in finals],
        "events": history.happened.newest(events),
        "malformed": history.malformed,
    }
    if status is None:
        return found | {"roles": [], "ledger": None}
    now = standing(folder, status)
    return found | {
        "version": status["version"], "reward": status["reward"],
        "elapsed_s": status["elapsed_s"],
        "left_s": status["left_s"] if now.kind == "alive" else None,
        "age_s": None if found["over"] else max(0.0, time.time() - status["updated_at"]),
        "stalled": None if found["over"] else status.get("stalled"),
        "roles": [_role(role, now) for role in status["roles"]],
        "unknown_s": None if now.known else now.ago_s, "go_on": how_to_go_on(folder, now),
        "ledger": _ledger(status["ledger"], found["over"]),
    }  # fmt: skip


def startup(folder: Path) -> list[list[Any]]:
    """(role, phase, seconds, seconds from the command to its end) of a run that has ended."""
    try:
        phases = load(folder / "summary.json")["startup"]
        return [
            [str(p["role"]), str(p["phase"]), float(p["seconds"]), float(p["ended_s"])]
            for p in phases
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _role(told: Status, now: Standing) -> dict[str, Any]:
    role = as_known(told, now)
    doing = f"{role['phase']} {role['phase_s']:.0f} s" if role["phase"] else ""
    return {
        "name": role["name"], "state": role["state"], "pid": role["pid"],
        "restarts": role["restarts"], "version": role["version"],
        "heard_s": role["record_age_s"],
        "waits": [doing] * bool(doing) + [words.wait_of(w) for w in role["waits"]],
    }  # fmt: skip


def _ledger(ledger: Status | None, over: bool) -> dict[str, Any] | None:
    if ledger is None:
        return None
    counts = ledger["counts"]
    return {
        "dispatched": counts.get("dispatched", 0),
        "terms": [[term, counts.get(term, 0)] for term in TERMS],
        "conserved": ledger["conserved"],
        "waiting_for": "" if over else ledger["waiting_for"],
    }


def log_line(entry: LogEntry) -> dict[str, str]:
    """One record of a role's log."""
    more = f"\n{entry.traceback}" if entry.traceback else ""
    at = time.strftime("%H:%M:%S", time.localtime(entry.time)) if entry.time else ""
    logger = entry.logger.removeprefix("asyncrl.")
    return {
        "at": at, "role": entry.name, "level": entry.level, "logger": logger,
        "text": entry.message + more,
    }  # fmt: skip


def advice(
    folder: Path, history: RunHistory, seconds: float | None = None
) -> list[Mapping[str, Any]]:
    """What would make the run faster or better: by all of it, or by its last seconds."""
    return as_json(advise_run(folder, history, seconds))


def samples(folder: Path, only: str = "") -> list[dict[str, str]]:
    """The last samples of the recording, as text: all, `trained` ones or the `other` ones."""
    return [
        {"head": _head(s.entry), "prompt": s.prompt, "response": s.response}
        for s in recent_samples(folder, SAMPLES, only)
    ]


def _head(entry: Entry) -> str:
    parts = [entry.outcome.replace("_", " "), f"reward {entry.reward:.3f}"]
    if entry.batch is not None:
        parts.insert(1, f"batch {entry.batch}")
    if entry.head_staleness is not None:
        parts.append(f"{entry.head_staleness} behind")
    return f"{', '.join(parts)}; {entry.actor}, {':'.join(map(str, entry.id))}"
