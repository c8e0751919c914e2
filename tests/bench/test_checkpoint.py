"""The checkpoint's bench: all sides train the same steps, and its figures from what they took."""

from __future__ import annotations

import pytest

from tests.bench.test_learner import spec_of


def test_turns_with_and_without_a_checkpoint(tmp_path):
    from checkpoint import Learner, take_turns

    spec = spec_of(tmp_path)
    learner = Learner(spec.model, tmp_path / "run", spec.workload, threads=1)
    try:
        turns = take_turns(learner, repeats=2, steps=2, patience_s=60.0)
    finally:
        learner.close()
    assert len(turns.saving) == len(turns.bare) == len(turns.plain) == 2
    assert [told["batch"] for told in turns.told] == [3, 13]
    assert not (tmp_path / "run" / "bare").exists()
    assert all(told["event"] == "checkpoint" for told in turns.told)


def test_figures_are_in_steps():
    from checkpoint import Turns, summarise
    from harness import Report

    told = [{"stage_s": 0.2, "write_s": 1.0, "sync_s": 0.5, "bytes": 100}] * 2
    report = Report("checkpoint")
    summarise(report, Turns([6.5, 6.9], [6.2, 6.2], [6.0, 6.0], told), steps=3, model="m")
    stall, copy = report.values["stall_frac"], report.values["copy_frac"]
    assert (stall.value, stall.better) == (pytest.approx(0.35), "lower")
    assert stall.params["each"] == [0.25, 0.45]
    assert stall.params["step_s"] == 2.0
    assert report.values["bare_write_frac"].value == pytest.approx(0.1)
    assert copy.value == pytest.approx(0.1)
