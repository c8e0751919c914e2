"""The timeline as a file."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from asyncrl.errors import UserError
from asyncrl.monitor.outputs import replacing
from asyncrl.monitor.trace.events import Timeline
from asyncrl.monitor.trace.reading import read_spans


@dataclass(frozen=True, slots=True)
class Written:
    """What a trace holds.

    >>> Written(events=9, samples=1, seconds=2.5, malformed=0).samples
    1
    """

    events: int
    samples: int
    """Whose life is drawn from lease to training."""
    seconds: float
    malformed: int
    """Lines that could not be read, and are not in it."""


def write_trace(folder: Path, out: Path, steps: tuple[int, int] | None = None) -> Written:
    """Write a run's timeline, compressed if `out` ends in ".gz".

    Args:
        folder: of the run.
        out: the file; what is there is replaced.
        steps: first and last batch; None is the whole run.

    Raises:
        DataError: the run kept no spans.
        UserError: `out` cannot be written, or no batch of `steps` was trained.
    """
    spans = read_spans(folder)
    events = Timeline(spans, steps).events()
    if not events and steps is not None:
        raise UserError(f"--steps {steps[0]}:{steps[1]}: the run has trained none of these batches")
    hosts = sorted({p.host for p in spans.processes})
    run_id = spans.processes[0].run_id if spans.processes else ""
    head = {"displayTimeUnit": "ms", "otherData": {"run_id": run_id, "hosts": hosts}}
    try:
        with replacing(out) as part, _opened(part, packed=out.suffix == ".gz") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as e:
        raise UserError(f"--output {out}: cannot be written: {e.strerror}") from e
    last = max((e["ts"] + e.get("dur", 0) for e in events if "ts" in e), default=0)
    flows = sum(e["ph"] == "s" for e in events)
    return Written(len(events), flows, last / 1e6, spans.malformed)


def _opened(path: Path, *, packed: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if packed else open(path, "w", encoding="utf-8")
