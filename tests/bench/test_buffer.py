"""The buffer's bench: its figures from outcomes, and its sides for a moment each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.test_harness import FOLDER, start


def outcomes(rates: dict[str, float]):
    from buffer_sides import Outcome

    us = {"main": 30.0, "others": 10.0}
    late = np.linspace(0.001, 0.1, 1000)
    return {
        name: [Outcome(rate, us if name[0] in "npdo" else None, late)]
        for name, rate in rates.items()
    }


RATES = {
    "raw 2": 90e3, "none 2": 30e3, "relay 2": 60e3, "raw 20": 60e3, "none 20": 24e3,
    "relay 20": 40e3, "raw 200": 10e3, "none 200": 8e3, "relay 200": 5e3, "process 20": 18e3,
    "disk 20": 6e3, "ray actor 20": 1200.0, "ray queue 20": 600.0, "open none": 5000.0,
    "open process": 4990.0,
}  # fmt: skip


def test_every_key_of_the_design_and_against_the_faster_queue():
    from buffer_sides import QUICK, sides, summarise
    from harness import Report

    assert set(sides(QUICK)) == set(RATES)
    report = Report("buffer")
    summarise(report, outcomes(RATES), QUICK)
    values = {key: v.value for key, v in report.values.items()}
    assert values["msgs_vs_raw_20k"] == pytest.approx(0.4)
    assert values["bytes_vs_raw_200k"] == pytest.approx(0.8)
    assert values["bytes_vs_relay_200k"] == pytest.approx(1.6)
    assert values["msgs_vs_ray_queue_20k"] == pytest.approx(20)
    assert report.values["msgs_vs_ray_queue_20k"].params["faster"] == "ray actor 20"
    assert values["process_vs_none_20k"] == pytest.approx(0.75)
    assert values["msgs_s_12k"] == 5000
    assert values["p99_ms"] == pytest.approx(99, abs=0.1)
    assert "none 20" in report.table()


def test_a_moment_through_the_buffer():
    from buffer_sides import Load, through_buffer

    outcome = through_buffer(Load(2000, 0.2, warm_s=0.1), "process")
    assert outcome.rate > 0
    assert outcome.us is not None
    assert outcome.us["main"] > 0
    steady = through_buffer(Load(2000, 0.5, warm_s=0.2, rate=400.0), "none")
    assert steady.latencies_s is not None
    assert 0.5 * 200 <= len(steady.latencies_s) <= 200
    assert steady.latencies_s.min() > 0


@pytest.mark.parametrize("kind", ["raw", "relay"])
def test_a_moment_of_the_yardsticks(kind):
    from buffer_sides import Load, yardstick

    assert yardstick(kind, Load(2000, 0.2, warm_s=0.1)).rate > 0


def test_a_side_that_fails_is_an_error_in_its_words():
    from buffer_sides import Load, yardstick
    from harness import BenchError

    with pytest.raises(BenchError, match="no-such"):
        yardstick("no-such", Load(2000, 0.1))


def test_a_profile_is_no_measurement(tmp_path):
    done = start(FOLDER / "buffer.py", "--profile", "--json", str(tmp_path / "x.json"))
    assert done.returncode == 1
    assert "--profile measures nothing" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_lean_headers_are_what_the_wire_says():
    from asyncrl import wire
    from tests.helpers.lean_peers import Push, encode, header_of, payload_of, tokens_of

    header = header_of(("p", 0, 3, 1), 7, "actor-0", tokens_of(2000), (0, 5))
    frames = [encode(Push(9, header)), payload_of(2000)]
    message, payload = wire.decode(frames)
    assert isinstance(message, wire.Push)
    assert payload == (frames[1],)
    assert len(wire.encode(message)[0]) == len(frames[0])
    assert message.header.id == ("p", 0, 3, 1)
    assert message.header.version_max == (0, 5)
