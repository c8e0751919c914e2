"""Where a process's time goes, and its pulse."""

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.hub import Hub, HubClient
from asyncrl.metrics import STATES, IdleMeter, TimeShares
from asyncrl.pulse import ProcessMeter, Pulse
from asyncrl.types import Version
from asyncrl.waits import Waits
from tests.helpers.metric_names import undocumented

ops = st.lists(
    st.tuples(st.sampled_from(STATES[:-1]), st.booleans(), st.floats(0, 10)), max_size=60
)


@given(ops)
def test_each_second_belongs_to_exactly_one_state(operations):
    now = 0.0
    shares = TimeShares(clock=lambda: now)
    active = dict.fromkeys(STATES, 0)
    expected = dict.fromkeys(STATES, 0.0)
    for state, enter, seconds in operations:
        if enter:
            shares.enter(state)
            active[state] += 1
        elif active[state]:
            shares.leave(state)
            active[state] -= 1
        now += seconds
        expected[next((s for s in STATES if active[s]), "idle")] += seconds
    totals = shares.totals()
    assert sum(totals.values()) == pytest.approx(now)
    assert totals == pytest.approx(expected)


def test_leaving_what_was_not_entered_is_an_error():
    with pytest.raises(ValueError, match="train"):
        TimeShares().leave("train")


def test_idle_meter_reads_the_share_since_the_last_reading():
    now = 0.0
    shares = TimeShares(clock=lambda: now)
    meter = IdleMeter(shares)
    assert meter.read() is None
    with shares.state("get_wait"):
        now = 3.0
    with shares.state("train"):
        now = 4.0
    assert meter.read() == pytest.approx(0.75)
    with shares.state("train"):
        now = 5.0
    assert meter.read() == pytest.approx(0.0)


def test_threads_may_share_a_process_s_time():
    shares = TimeShares()
    began = time.monotonic()
    end = threading.Event()

    def work(state):
        while not end.is_set():
            with shares.state(state):
                pass

    threads = [threading.Thread(target=work, args=(s,)) for s in ("train", "get_wait")]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        shares.metrics()
    end.set()
    for thread in threads:
        thread.join()
    assert sum(shares.totals().values()) == pytest.approx(time.monotonic() - began, abs=0.5)
    assert shares._active == dict.fromkeys(STATES, 0) | {"idle": 1}


class Kept:
    """A listener that remembers, and can be waited on."""

    def __init__(self):
        self.records = []
        self._changed = threading.Condition()

    def write(self, record):
        with self._changed:
            self.records.append(record)
            self._changed.notify_all()

    def wait_for(self, condition, timeout=30):
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(condition(r) for r in self.records), timeout
            ), self.records
            return next(r for r in self.records if condition(r))


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def hub(kept):
    hub = Hub([], listeners=[kept.write], run_id="r")
    yield hub
    hub.close()


@pytest.fixture
def client(hub):
    client = HubClient(hub.endpoint, "learner", 1)
    yield client
    client.close()


def test_pulse_tells_waits_time_and_cost_while_the_role_is_blocked(client, kept):
    shares, waits = TimeShares(), Waits("learner-1")
    pulse = Pulse(
        client, waits=waits, position=lambda: (3, Version(0, 2)),
        metrics=[shares.metrics], every_s=0.15,
    )  # fmt: skip
    with shares.state("get_wait"), waits.on("batch 4", owner="buffer-0", deadline_s=9.0):
        # This thread does nothing but wait here.
        record = kept.wait_for(lambda r: r["waits"] and "host/cpu_frac" in r["metrics"])
    assert (record["role"], record["rank"], record["step"], record["version"]) == (
        "learner", 1, 3, 2,
    )  # fmt: skip
    assert record["pid"] == os.getpid()
    (wait,) = record["waits"]
    assert (wait["what"], wait["on"]) == ("batch 4", "buffer-0")
    assert 0 < wait["deadline_s"] <= 9.0
    assert record["metrics"]["time/get_wait_s"] > 0
    assert record["metrics"]["host/rss_bytes"] > 10e6
    assert undocumented(record["metrics"], "Every process") == []
    kept.records.clear()
    pulse.close()
    assert kept.wait_for(lambda r: not r["waits"])
    assert not pulse._thread.is_alive()
    pulse.close()


def test_pulse_survives_what_it_is_given(client, kept, caplog):
    def broken():
        raise RuntimeError("no such engine")

    pulse = Pulse(
        client, waits=Waits("actor-0"), position=lambda: (0, Version(0, 0)),
        metrics=[broken, lambda: {"actor/in_flight": 2.0}], every_s=0.02,
    )  # fmt: skip
    for _ in range(3):
        kept.records.clear()
        kept.wait_for(lambda r: r["metrics"].get("actor/in_flight") == 2.0)
    pulse.close()
    assert len(caplog.records) == 1


def test_pulse_without_a_position_says_nothing_and_ends(client, kept, caplog):
    def position():
        raise AttributeError("not set up")

    asked = threading.Event()
    pulse = Pulse(
        client, waits=Waits("actor-0"), position=position,
        metrics=[lambda: asked.set() or {}], every_s=0.02,
    )  # fmt: skip
    assert asked.wait(30)
    pulse.close()
    assert not pulse._thread.is_alive()
    assert kept.records == []
    assert len(caplog.records) == 1


def test_pulse_logs_waits_that_grow_long(client, caplog):
    logged = threading.Event()
    waits = Waits("actor-0", warn_s=0.01)
    warn = waits.warn

    def warn_and_tell():
        warn()
        if "has waited" in caplog.text:
            logged.set()

    waits.warn = warn_and_tell
    pulse = Pulse(client, waits=waits, position=lambda: (0, Version(0, 0)), every_s=0.02)
    with waits.on("leases", owner="buffer-0"):
        assert logged.wait(30)
    pulse.close()


def test_pulse_ends_when_nobody_listens():
    client = HubClient("tcp://127.0.0.1:1", "actor")
    pulse = Pulse(client, waits=Waits("actor-0"), position=lambda: (0, Version(0, 0)), every_s=0.02)
    began = time.monotonic()
    pulse.close()
    client.close()
    assert time.monotonic() - began < 10


BURN = """
import os, sys
print("up", flush=True)
sys.stdin.readline()
while sum(os.times()[:2]) < 0.6: pass
print("done", flush=True)
sys.stdin.readline()
"""


def test_processor_time_counts_child_processes():
    child = subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "up\n"
        with_child, alone = ProcessMeter(), ProcessMeter(children=False)
        began = time.monotonic()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        both, mine = with_child.read(), alone.read()
        seconds = time.monotonic() - began
        assert both["host/cpu_frac"] * seconds > 0.4
        assert both["host/cpu_frac"] - mine["host/cpu_frac"] > 0.3 / seconds
        assert both["host/rss_bytes"] > mine["host/rss_bytes"] + 1e6
    finally:
        child.kill()
        child.communicate()
    assert with_child.read()["host/rss_bytes"] < both["host/rss_bytes"]
