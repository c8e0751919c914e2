"""status.json of a run's folder: what the run is doing now, for `asyncrl status` and others.

    {"schema": 1, "run_id", "run", "pid", "process_started", "process_ticks", "host", "state",
     "phase", "step", "steps", "version", "reward", "elapsed_s", "left_s", "updated_at", "actors",
     "control": {"endpoint", "curve", "keys"}, "prometheus",
     "roles": [{"name", "state", "pid", "restarts", "version", "phase", "phase_s",
                "record_age_s", "open_waits", "waits": [{"what", "on", "age_s", "deadline_s"}]}],
     "ledger": {"counts", "gauges", "conserved", "waiting_for"},
     "stalled": {"for_s", "why"}, "deadlines": [{"role", "what", "on", "waited_s", "ago_s"}]}

`state` is running or ended; a value that is not known is null. `elapsed_s` is of all launches, the
time between them left out. Times are seconds, `updated_at`
and `process_started` since the epoch; `process_ticks` is the same on a clock that nobody sets:
clock ticks since boot. `record_age_s` is the time since the hub heard of the role
(a record a second); when the buffer heard of an actor is the gauge `heartbeat_age_s/ACTOR`.
`actors`: how many the run is to have. `control`: where the launcher can be asked (docs/wire.md,
`scale`), whether by CURVE, and the folder of lasting keys; null while the run starts. `stalled`:
why nothing moves; null while something does. `deadlines`: the last that have passed, in order.
`prometheus`: the address that it can scrape; null is none.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from typing import Any

import psutil

from asyncrl.disk import trouble, write_whole
from asyncrl.monitor.board import Board
from asyncrl.monitor.fleet_view import RoleView, RoleWait
from asyncrl.monitor.process import start_ticks
from asyncrl.wire import Stats

log = logging.getLogger(__name__)

EVERY_S = 1.0
WAITS_OF_A_ROLE = 5
"""The longest waits of a role that are written; `open_waits` counts them all."""
JOIN_S = 5.0


def snapshot(board: Board) -> dict[str, Any]:
    """The run as the board knows it."""
    now, stats = time.monotonic(), board.stats
    return {
        "phase": board.phase,
        "step": board.step,
        "steps": board.config.run.steps,
        "version": board.version,
        "reward": board.rewards[-1] if board.rewards else None,
        "elapsed_s": round(board.elapsed_s(), 1),
        "left_s": _rounded(board.seconds_left()),
        "actors": board.fleet.actors,
        "control": board.control,
        "prometheus": board.prometheus,
        "roles": [_role(view, now, stats) for view in board.fleet.ordered()],
        "ledger": None if stats is None else {
            "counts": stats.counts, "gauges": stats.gauges, "conserved": stats.conserved,
            "waiting_for": stats.waiting_for,
        },
        "stalled": None if board.stalled is None else {
            "for_s": round(now - board.stalled.since, 1), "why": board.stalled.why,
        },
        "deadlines": [
            {"role": role, "what": e["what"], "on": e["on"], "waited_s": e["waited_s"],
             "ago_s": round(now - when, 1)}
            for when, role, e in list(board.deadlines)
        ],
    }  # fmt: skip


def _role(view: RoleView, now: float, stats: Stats | None) -> dict[str, Any]:
    waits = view.open_waits(now)
    return {
        "name": view.name,
        "state": view.state,
        "pid": view.pid,
        "restarts": view.restarts,
        "version": view.version,
        "phase": view.doing or None,
        "phase_s": round(now - view.doing_since, 1) if view.doing else None,
        "record_age_s": None if view.heard is None else round(now - view.heard, 1),
        "open_waits": len(waits),
        "waits": [
            {"what": w.what, "on": w.on + _why(w, stats), "age_s": round(w.age_s, 2),
             "deadline_s": _rounded(w.deadline_s)}
            for w in waits[:WAITS_OF_A_ROLE]
        ],
    }  # fmt: skip


def _why(wait: RoleWait, stats: Stats | None) -> str:
    """Why an actor gets no leases, as the buffer last told: admission, bytes or prompts."""
    if stats is None or not wait.what.startswith("leases "):
        return ""
    version = stats.gauges.get(f"needs_version/{wait.role}")
    if version is not None:
        return f": admission, it needs version {version:.0f}"
    short = stats.gauges.get(f"needs_bytes/{wait.role}")
    if short is not None:
        return f": bytes, a group takes up to {short / 2**30:.3g} GiB"
    return ": prompts, none is left" if f"needs_prompts/{wait.role}" in stats.gauges else ""


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


class StatusFile:
    """Writes status.json once a second, from a thread of its own, until `close`.

    Args:
        path: of the file; readers see it whole, old or new.
        board: read, never written.
        run: name of the run's folder.
    """

    def __init__(
        self, path: str, board: Board, *, run_id: str, run: str, every_s: float = EVERY_S
    ) -> None:
        self._path, self._board, self._every_s = path, board, every_s
        self._whoami = {
            "schema": 1, "run_id": run_id, "run": run, "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "process_ticks": start_ticks(os.getpid()), "host": socket.gethostname(),
        }  # fmt: skip
        self._failed = False
        self._end = threading.Event()
        self._write("running")
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._write("running")
        self._write("ended")

    def _write(self, state: str) -> None:
        """Replace the file; a failure is logged once and it is tried again the next second."""
        try:
            content = self._whoami | {"state": state} | snapshot(self._board)
            content["updated_at"] = time.time()
            write_whole(self._path, json.dumps(content, indent=1) + "\n")
            self._failed = False
        except OSError as e:
            if not self._failed:
                self._failed = True
                log.error("%s; it is tried again", trouble(self._path, e))
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("%s cannot be written", self._path)

    def close(self) -> None:
        """Write it a last time; safe to call twice."""
        self._end.set()
        self._thread.join(JOIN_S)
