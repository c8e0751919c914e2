"""The registry of waits: what is open, who is told when one grows long."""

import asyncio
import threading
import timeit

import pytest

from asyncrl.waits import Waits


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def seen(waits):
    return [(w.what, w.on, w.age_s, w.deadline_s) for w in waits.open()]


def test_open_waits_have_age_owner_and_what_is_left(clock):
    waits = Waits("learner-0", clock=clock)
    with waits.on("batch 31", owner="buffer-0", deadline_s=60.0) as outer:
        clock.now = 2.0
        with waits.on("version 0:4"):
            clock.now = 5.0
            outer.owner = "buffer-0: 12 samples held by actor-3"
            assert seen(waits) == [
                ("batch 31", "buffer-0: 12 samples held by actor-3", 5.0, 55.0),
                ("version 0:4", "", 3.0, None),
            ]
        assert [w.what for w in waits.open()] == ["batch 31"]
    assert waits.open() == ()


def test_a_wait_that_fails_is_over(clock):
    waits = Waits("a", clock=clock)
    with pytest.raises(TimeoutError), waits.on("leases"):
        raise TimeoutError
    assert waits.open() == ()


def test_long_waits_are_logged_at_doubling_ages_and_at_their_end(clock, caplog):
    waits = Waits("learner-0", warn_s=10.0, clock=clock)
    said = []
    with waits.on("batch 31", owner="buffer-0: held by actor-3", deadline_s=60.0):
        for second in range(1, 43):
            clock.now = float(second)
            waits.warn()
            if caplog.messages:
                said.append((second, caplog.messages[-1]))
                caplog.clear()
    assert said == [
        (s, f"learner-0 has waited {s} s for batch 31 on buffer-0: held by actor-3; "
            f"gives up in {60 - s} s")
        for s in (10, 20, 40)
    ]  # fmt: skip
    assert caplog.messages == ["learner-0 waited 42 s for batch 31 on buffer-0: held by actor-3"]


def test_short_waits_are_not_logged(clock, caplog):
    waits = Waits("actor-0", warn_s=10.0, clock=clock)
    with waits.on("leases", owner="buffer-0"):
        clock.now = 9.9
        waits.warn()
    assert caplog.messages == []


def test_a_late_look_warns_once(clock, caplog):
    waits = Waits("actor-0", warn_s=10.0, clock=clock)
    with waits.on("leases"):
        clock.now = 35.0
        waits.warn()
        waits.warn()
        assert caplog.messages == ["actor-0 has waited 35 s for leases"]


def test_tasks_of_one_loop_wait_beside_each_other():
    waits = Waits("actor-0")

    async def push(k, release):
        with waits.on(f"push {k}", owner="buffer-0"):
            await release.wait()

    async def main():
        release = asyncio.Event()
        tasks = [asyncio.create_task(push(k, release)) for k in range(3)]
        await asyncio.sleep(0)
        assert [w.what for w in waits.open()] == ["push 0", "push 1", "push 2"]
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert [w.what for w in waits.open()] == ["push 0", "push 2"]
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert waits.open() == ()


def test_threads_may_wait_while_another_looks():
    waits = Waits("a")
    end = threading.Event()

    def work():
        while not end.is_set():
            with waits.on("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            assert len(waits.open()) <= 3
            waits.warn()
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert waits.open() == ()


def test_a_wait_costs_microseconds():
    waits = Waits("a")

    def one():
        with waits.on("batch 31", owner="buffer-0"):
            pass

    assert min(timeit.repeat(one, number=1000, repeat=5)) / 1000 < 50e-6


def test_deadlines_that_pass_are_told_once(clock, caplog):
    waits = Waits("actor-0", clock=clock)
    with waits.on("version 0:4", "learner-0", 10.0) as wait:
        clock.now = 9.0
        waits.warn()
        assert waits.take_passed() == []
        wait.renew(5.0)
        clock.now = 13.0
        waits.warn()
        assert waits.take_passed() == []
        clock.now = 14.0
        waits.warn()
        waits.warn()
        passed = waits.take_passed()
    assert [(w.what, w.on, w.age_s) for w in passed] == [("version 0:4", "learner-0", 14.0)]
    assert waits.take_passed() == []
    assert caplog.text.count("the deadline of 14 s for version 0:4 on learner-0 has passed") == 1
    with waits.on("x", deadline_s=1.0):  # nobody looks before it ends
        clock.now += 1.0
    assert [w.what for w in waits.take_passed()] == ["x"]
    with waits.on("y", deadline_s=1.0):
        clock.now += 0.5
    assert waits.take_passed() == []
