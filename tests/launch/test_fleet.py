"""The fleet's rules, against a cluster that only takes notes."""

import itertools
import random

import pytest

from asyncrl.config.load import load
from asyncrl.errors import EngineError, EngineMemoryError, RoleDiedError, UserError
from asyncrl.launch import fleet as fleet_module
from asyncrl.launch.backoff import MAX_BACKOFF_S
from asyncrl.launch.fleet import GATHER_S, Fleet
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.types import Version


class FakeHost:
    """Refuses a second call while one is under way, as a RoleHost's pipe would mix them up."""

    def __init__(self, cluster, rank):
        self.cluster, self.rank, self.alive, self.calls = cluster, rank, True, []
        self.call = self

    def remote(self, method, *arguments):
        assert self.alive, "a call to a killed host"
        self.calls.append((method, arguments))
        return (self, len(self.calls))


class FakeCluster:
    def __init__(self):
        self.hosts = []

    def start(self, spec, log_path):
        host = FakeHost(self, spec)
        self.hosts.append(host)
        return host

    def kill(self, host):
        assert host.alive, "killed twice"
        host.alive = False


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(fleet_module, "time", clock)
    return clock


def make(*overrides):
    config = load("tiny", ("cluster.actors=3", *overrides), {}).config
    events, gone = [], []
    fleet = Fleet(
        config, FakeCluster(), spec_of=lambda rank: rank, log_of=lambda name: f"{name}.log",
        tell=lambda event, **fields: events.append((event, fields)),
        gone=lambda name, why: gone.append(name),
    )  # fmt: skip
    fleet.start()
    return fleet, events, gone


def good():
    return None


def fails(error):
    def result():
        raise error

    return result


def up(fleet, rank, version=0):
    fleet.ended(fleet.slots[rank], good)
    fleet.run_ready("buffer", "learner", Version(0, version))


DIED = RoleDiedError("actor-1 died: killed")


def test_an_actor_runs_as_soon_as_it_is_set_up(clock):
    fleet, _, _ = make()
    up(fleet, 1)
    assert [s.state for s in fleet.slots] == ["starting", "running", "starting"]
    run = ("run", ("buffer", "learner", Version(0, 0), True))
    assert fleet.slots[1].host.calls == [("setup", ()), run]


def test_a_restart_backs_off_and_catches_up_without_a_first_evaluation(clock):
    fleet, events, gone = make("cluster.restart_backoff_s=2")
    up(fleet, 1)
    old = fleet.slots[1].host
    fleet.ended(fleet.slots[1], fails(DIED))
    assert not old.alive
    assert gone == ["actor-1"]
    assert fleet.slots[1].state == "backoff"
    fleet.tick(lambda slot: False)
    clock.now += 1.9
    fleet.tick(lambda slot: False)
    assert fleet.slots[1].host is None
    clock.now += 0.2
    fleet.tick(lambda slot: False)
    assert fleet.slots[1].state == "starting"
    up(fleet, 1, version=7)
    assert fleet.slots[1].host.calls[-1] == ("run", ("buffer", "learner", Version(0, 7), False))
    assert fleet.slots[1].restarts == 1
    assert [e for e, _ in events] == ["actor_died", "actor_restarted"]


def test_the_wait_doubles_up_to_a_limit_and_a_sample_resets_it(clock):
    fleet, events, _ = make("cluster.max_restarts=9", "cluster.restart_backoff_s=1")
    waits = []
    for _ in range(9):
        up(fleet, 1)
        fleet.ended(fleet.slots[1], fails(DIED))
        waits.append(fleet.slots[1].until - clock.now)
        clock.now = fleet.slots[1].until
        fleet.tick(lambda slot: False)
    assert waits == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]
    up(fleet, 1)
    fleet.write({"role": "actor", "rank": 1, "metrics": {"actor/samples_pushed": 3}})
    fleet.ended(fleet.slots[1], fails(DIED))
    assert fleet.slots[1].state == "backoff"
    assert fleet.slots[1].until - clock.now == 1


def test_one_that_never_produces_is_given_up_and_the_last_one_ends_the_run(clock):
    fleet, events, _ = make("cluster.max_restarts=1")
    for rank in range(3):
        up(fleet, rank)
    for rank, attempt in itertools.product(range(3), range(2)):
        last = (rank, attempt) == (2, 1)
        if last:
            with pytest.raises(RoleDiedError, match="no actor is left.*max_restarts=1"):
                fleet.ended(fleet.slots[rank], fails(DIED))
            return
        fleet.ended(fleet.slots[rank], fails(DIED))
        if attempt == 0:
            clock.now = fleet.slots[rank].until
            fleet.tick(lambda slot: False)
            up(fleet, rank)
        else:
            assert fleet.slots[rank].state == "gone"
    raise AssertionError


def test_a_setting_that_no_engine_starts_with_ends_the_run_at_once(clock):
    fleet, _, _ = make()
    with pytest.raises(UserError, match="no module"):
        fleet.ended(fleet.slots[0], fails(UserError("task.reward=x:y: no module")))
    fleet, _, _ = make()
    fleet.ended(fleet.slots[0], fails(EngineError("its core was killed, perhaps")))
    clock.now = fleet.slots[0].until
    fleet.tick(lambda slot: False)
    with pytest.raises(EngineError, match="vLLM did not start"):
        fleet.ended(fleet.slots[0], fails(EngineError("vLLM did not start")))


def test_once_one_is_up_a_failing_set_up_is_tried_again(clock):
    fleet, _, _ = make()
    up(fleet, 1)
    fleet.ended(fleet.slots[0], fails(EngineError("out of memory")))
    assert fleet.slots[0].state == "backoff"


def test_a_late_set_up_is_ended(clock):
    fleet, _, gone = make("cluster.ready_timeout_s=50")
    up(fleet, 0)
    clock.now += 51
    fleet.tick(lambda slot: False)
    assert [s.state for s in fleet.slots] == ["running", "backoff", "backoff"]
    assert gone == ["actor-1", "actor-2"]


def test_at_the_end_nobody_is_restarted_and_the_silent_are_left(clock):
    fleet, _, _ = make()
    up(fleet, 0)
    up(fleet, 1)
    left = list(fleet.end(silent=lambda slot: slot.rank == 1))
    assert [s.name for s in left] == ["actor-1"]
    assert [s.state for s in fleet.slots] == ["running", "gone", "gone"]
    fleet.ended(fleet.slots[0], fails(DIED))
    assert fleet.over
    clock.now += 1000
    fleet.tick(lambda slot: False)
    assert fleet.refs() == {}


def test_random_walk_never_calls_a_dead_host(clock):
    """The fakes refuse what must not happen; here only the states are checked."""
    generator = random.Random(0)
    fleet, _, _ = make("cluster.max_restarts=1000000")
    up(fleet, 0)
    for _ in range(2000):
        slot = generator.choice(fleet.slots)
        what = generator.random()
        if slot.ref is not None and what < 0.4:
            if slot.state == "running" and not fleet.ending:
                fleet.ended(slot, fails(DIED))
            else:
                fleet.ended(slot, good if generator.random() < 0.7 else fails(DIED))
        elif what < 0.6:
            clock.now += generator.random() * 100
            fleet.tick(lambda slot: False)
        else:
            fleet.run_ready("b", "l", Version(0, 1))
        for s in fleet.slots:
            assert (s.ref is not None) == (s.state in ("starting", "running"))
            assert s.host is None or s.host.alive
    assert sum(s.restarts for s in fleet.slots) > 100


def test_an_actor_without_a_sign_of_life_is_ended_and_restarted(clock):
    fleet, events, gone = make()
    up(fleet, 0)
    up(fleet, 1)
    fleet.tick(lambda slot: slot.rank == 1)
    assert [s.state for s in fleet.slots] == ["running", "backoff", "starting"]
    assert gone == ["actor-1"]
    assert "no sign of life" in events[0][1]["reason"]


def test_training_waits_a_little_for_actors_that_are_still_set_up(clock):
    fleet, _, _ = make()
    assert not fleet.gathered
    up(fleet, 0)
    assert not fleet.gathered
    fleet.ended(fleet.slots[1], fails(DIED))
    up(fleet, 2)
    assert fleet.gathered, "one that failed is not waited for"
    fleet, _, _ = make()
    up(fleet, 0)
    clock.now += GATHER_S + 1
    assert fleet.gathered, "nor one that is late"


# --- scaling ------------------------------------------------------------------------------


def states(fleet):
    return [s.state for s in fleet.slots]


def test_one_that_joins_gets_the_next_name_and_no_first_evaluation(clock):
    fleet, events, gone = make()
    up(fleet, 0)
    joining, leaving = fleet.scale(5)
    assert [s.name for s in joining] == ["actor-3", "actor-4"]
    assert leaving == []
    assert states(fleet) == ["running", *["starting"] * 4]
    up(fleet, 4, version=7)
    assert fleet.slots[4].host.calls[-1] == ("run", ("buffer", "learner", Version(0, 7), False))
    assert (events, gone) == ([], [])


def test_those_with_the_highest_numbers_leave_and_are_no_deaths(clock):
    fleet, events, gone = make("cluster.max_restarts=0")
    for rank in range(3):
        up(fleet, rank)
    joining, leaving = fleet.scale(1)
    assert (joining, [s.name for s in leaving]) == ([], ["actor-1", "actor-2"])
    assert states(fleet) == ["running", "leaving", "leaving"]
    assert [s.shown for s in fleet.slots] == ["alive", "leaving", "leaving"]
    hosts = [s.host for s in fleet.slots]
    fleet.ended(fleet.slots[1], good)
    fleet.ended(fleet.slots[2], fails(DIED))
    assert states(fleet) == ["running", "left", "left"]
    assert [h.alive for h in hosts] == [True, False, False]
    assert gone == ["actor-1", "actor-2"], "its leases are free at once"
    assert events == [
        ("actor_left", {"actor": "actor-1"}),
        ("actor_left", {"actor": "actor-2", "reason": "actor-1 died: killed"}),
    ]
    clock.now += 1000
    fleet.tick(lambda slot: slot.rank > 0)
    assert states(fleet) == ["running", "left", "left"]
    assert list(fleet.refs().values()) == [fleet.slots[0]]
    assert not fleet.over
    fleet.ended(fleet.slots[0], good)
    assert fleet.over


def test_who_does_not_leave_in_time_is_ended(clock):
    fleet, events, gone = make("rollout.lease_timeout_s=9")
    for rank in range(3):
        up(fleet, rank)
    fleet.scale(2)
    host = fleet.slots[2].host
    clock.now += 8
    fleet.tick(lambda slot: slot.rank == 2)
    assert host.alive
    clock.now += 2
    fleet.tick(lambda slot: False)
    assert not host.alive
    assert gone == ["actor-2"]
    reason = "not done within rollout.lease_timeout_s=9"
    assert events == [("actor_left", {"actor": "actor-2", "reason": reason})]


def test_who_did_not_run_yet_leaves_at_once(clock):
    fleet, _, _ = make()
    up(fleet, 0)
    fleet.ended(fleet.slots[1], fails(DIED))
    host = fleet.slots[2].host
    fleet.scale(1)
    assert states(fleet) == ["running", "left", "left"]
    assert not host.alive
    clock.now += 1000
    fleet.tick(lambda slot: False)
    assert states(fleet) == ["running", "left", "left"], "no restart either"


def test_who_is_wanted_again_starts_once_it_has_left(clock):
    fleet, _, _ = make()
    for rank in range(3):
        up(fleet, rank)
    fleet.scale(1)
    fleet.ended(fleet.slots[1], good)
    old = fleet.slots[2].host
    joining, _ = fleet.scale(3)
    assert [s.name for s in joining] == ["actor-1", "actor-2"]
    assert states(fleet) == ["running", "starting", "leaving"]
    fleet.ended(fleet.slots[2], good)
    assert states(fleet) == ["running", "starting", "left"]
    fleet.tick(lambda slot: False)
    assert states(fleet) == ["running", "starting", "starting"]
    assert fleet.slots[2].host is not old


def test_who_was_given_up_is_tried_again(clock):
    fleet, _, _ = make("cluster.max_restarts=0")
    up(fleet, 0)
    up(fleet, 1)
    fleet.ended(fleet.slots[1], fails(DIED))
    assert fleet.slots[1].state == "gone"
    joining, _ = fleet.scale(3)
    assert [s.name for s in joining] == ["actor-1"]
    assert states(fleet) == ["running", "starting", "starting"]
    up(fleet, 1)
    fleet.scale(4)
    up(fleet, 3)
    fleet.ended(fleet.slots[3], fails(DIED))
    assert fleet.slots[3].state == "gone", "max_restarts holds for who joined, too"


def test_random_scaling_never_calls_a_dead_host_and_ends_where_it_is_asked_to(clock):
    generator = random.Random(1)
    fleet, _, _ = make("cluster.max_restarts=1000000")
    up(fleet, 0)
    for _ in range(2000):
        slot, what = generator.choice(fleet.slots), generator.random()
        if what < 0.2:
            fleet.scale(generator.randrange(1, 6))
        elif slot.ref is not None and what < 0.6:
            running = slot.state == "running"
            fleet.ended(slot, fails(DIED) if running or generator.random() < 0.3 else good)
        elif what < 0.8:
            clock.now += generator.random() * 60
            fleet.tick(lambda slot: False)
        else:
            fleet.run_ready("b", "l", Version(0, 1))
        for s in fleet.slots:
            assert (s.ref is not None) == (s.state in ("starting", "running", "leaving"))
            assert s.host is None or s.host.alive
    wanted = fleet.wanted
    while any(s.state != ("running" if s.rank < wanted else "left") for s in fleet.slots):
        for s in fleet.slots:
            if s.state in ("starting", "leaving"):
                fleet.ended(s, good)
        fleet.run_ready("b", "l", Version(0, 1))
        clock.now += 30
        fleet.tick(lambda slot: False)


@pytest.fixture
def kernel(monkeypatch):
    """What the kernel has killed for memory, as a list with one number; None: it does not say."""
    count = [3]
    monkeypatch.setattr("asyncrl.out_of_memory.kills", lambda: count[0])
    return count


def in_flight(fleet, rank):
    return fleet._cluster.hosts[-1].rank.config.rollout.max_in_flight


NO_MEMORY = EngineMemoryError("actor-0: the engine ran out of memory (CUDA out of memory)")
SIGKILL = RoleDiedError("actor-0 died: process 7 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("error", "kills", "lowered"),
    [(NO_MEMORY, 3, True), (SIGKILL, 4, True), (SIGKILL, 3, False), (SIGKILL, None, False)],
)
def test_who_ran_out_of_memory_goes_on_with_fewer_samples_at_once(
    clock, kernel, error, kills, lowered
):
    fleet, events, _ = make("rollout.max_in_flight=3")
    config = fleet._config
    fleet._spec_of = lambda rank: RoleSpec(config, None)
    up(fleet, 0)
    expected, whys = [3, 1, 1] if lowered else [3, 3, 3], []
    for samples in expected[1:]:
        kernel[0] = kills
        fleet.ended(fleet.slots[0], fails(error))
        kernel[0] = 3
        if samples == 1:
            whys.append(fleet.slots[0].why)
        clock.now += MAX_BACKOFF_S
        fleet.tick(lambda slot: False)
        assert in_flight(fleet, 0) == samples
        up(fleet, 0)
    told = [fields for event, fields in events if event == "concurrency_lowered"]
    if lowered:
        assert told == [{"actor": "actor-0", "setting": "rollout.max_in_flight", "was": 3, "to": 1}]
        assert "goes on with rollout.max_in_flight=1" in whys[0]
    else:
        assert told == []


def test_no_memory_at_the_start_is_a_setting(clock):
    fleet, *_ = make()
    with pytest.raises(EngineMemoryError, match="out of memory"):
        fleet.ended(fleet.slots[0], fails(NO_MEMORY))
    assert NO_MEMORY.exit_code == 2
