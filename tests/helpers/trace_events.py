"""What the trace-event format asks of a file, and what we ask of a timeline."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PHASES = set("XiCMstf")
METADATA = {"process_name": "name", "process_sort_index": "sort_index",
            "thread_name": "name", "thread_sort_index": "sort_index"}  # fmt: skip

Event = dict[str, Any]


def read_trace(path: Path) -> list[Event]:
    """The events of a file, which is a JSON object with the key traceEvents."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = json.loads(text)
    assert content["displayTimeUnit"] in ("ms", "ns")
    return content["traceEvents"]


def check_trace(events: list[Event]) -> None:
    """Assert that they are valid, in order, that slices nest and that flows lead through slices."""
    for e in events:
        _check_event(e)
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert not timed or timed[0]["ts"] == 0
    for mine in _slices(events).values():
        _check_nesting(mine)
    _check_flows(events)


def named(events: list[Event], name: str) -> dict[int, str]:
    """The pid's names, or with "thread_name" those of (pid, tid)."""
    key = (lambda e: e["pid"]) if name == "process_name" else (lambda e: (e["pid"], e["tid"]))
    return {key(e): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == name}


def _check_event(e: Event) -> None:
    assert e["ph"] in PHASES, e
    assert isinstance(e["name"], str), e
    assert e["name"], e
    assert type(e["pid"]) is int, e
    assert type(e["tid"]) is int, e
    if e["ph"] == "M":
        assert set(e["args"]) == {METADATA[e["name"]]}, e
        return
    assert type(e["ts"]) in (int, float), e
    assert e["ts"] >= 0, e
    if e["ph"] == "X":
        assert e["dur"] >= 0, e
    elif e["ph"] == "i":
        assert e["s"] in "gpt", e
    elif e["ph"] == "C":
        assert all(type(v) in (int, float) for v in e["args"].values()), e
    else:
        assert type(e["id"]) is int, e
        assert e.get("bp") == ("e" if e["ph"] == "f" else None), e


def _slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            found[(e["pid"], e["tid"])].append((e["ts"], e["ts"] + e["dur"]))
    return found


def _check_nesting(slices: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for at, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= at:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "slices of one thread overlap"
        open_ends.append(end)


def _check_flows(events: list[Event]) -> None:
    """A flow's steps lie in slices that came before them in the file, each on its thread."""
    flows = defaultdict(list)
    open_slices: dict[tuple[int, int], list[float]] = defaultdict(list)
    for e in events:
        thread = (e["pid"], e["tid"])
        if e["ph"] == "X":
            ends = open_slices[thread]
            open_slices[thread] = [end for end in ends if end > e["ts"]] + [e["ts"] + e["dur"]]
        elif e["ph"] in "stf":
            flows[(e["cat"], e["name"], e["id"])].append(e["ph"])
            assert any(end >= e["ts"] for end in open_slices[thread]), f"{e} lies in no slice"
    for steps in flows.values():
        phases = "".join(steps)
        assert phases[0] == "s", phases
        assert phases[-1] == "f", phases
        assert set(phases[1:-1]) <= {"t"}, phases
