"""Figures of a whole run."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import RunHistory
from tests.monitor.small_run import SmallRun


def test_the_pace_leaves_out_the_time_between_two_launches(tmp_path: Path) -> None:
    # 32 samples a second, a pause of 100 s, and the same pace again.
    records = [(1, 0, 1.0), (2, 0, 2.0), (3, 0, 3.0), (4, 1, 103.0), (5, 1, 104.0)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step, incarnation, wall_s in records:
            line = {
                "run_id": "r", "step": step, "version": step, "incarnation": incarnation,
                "wall_s": wall_s, "role": "buffer", "rank": 0, "hist": {},
                "metrics": {"samples/trained": 32.0 * step, "samples/dispatched": 32.0 * step},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    history = RunHistory(tmp_path)
    history.update()
    told = {f.label: f.value for f in finals(history)}
    assert told["samples/s trained"] == 32.0
    assert told["dispatched in vain"] == 0.0


def test_actors_that_came_and_went_count_by_what_they_made(tmp_path: Path) -> None:
    # One after the other, 100 tokens a second each: together that is no more.
    run = SmallRun(tmp_path)
    for second in range(40):
        made = {"actor/generated_tokens": 100.0 * (second % 20)}
        run.metrics(made, role="actor", rank=second // 20, wall_s=float(second))
    history = RunHistory(run.folder)
    history.update()
    told = {f.label: f.value for f in finals(history)}
    assert told["tokens/s generated"] == (1900 + 1900) / 39
