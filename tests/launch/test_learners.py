"""The learner's ranks: which deaths are survived, from where, how often, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.checkpoints import ResumePoint
from asyncrl.config.load import load
from asyncrl.errors import (
    AsyncRLError,
    DataError,
    DeadlineError,
    RoleDiedError,
    RoleFailedError,
)
from asyncrl.launch.learners import Learners, Rank

BOUND = ("127.0.0.1", 99, "tcp://127.0.0.1:4711")


class Processes:
    """Stands in for the cluster: its calls are their method, arguments and a number."""

    def __init__(self) -> None:
        self.started: list[tuple[str, ResumePoint | None]] = []
        self.killed: list[Any] = []
        self.calls = 0

    def start(self, spec: tuple[str, ResumePoint | None], _log: str) -> Any:
        self.started.append(spec)

        def remote(*call: Any) -> Any:
            self.calls += 1
            return (self.calls, *call)

        return SimpleNamespace(call=SimpleNamespace(remote=remote), name=spec[0])

    def kill(self, host: Any) -> None:
        self.killed.append(host.name)

    def kill_role(self, name: str) -> None:
        self.killed.append(f"role {name}")


class Ranks:
    """Two ranks that train, with a checkpoint of batch 20."""

    def __init__(self, *overrides: str) -> None:
        config = load(
            None, ["cluster.learners=2", "cluster.restart_backoff_s=1e-6", *overrides]
        ).config
        self.processes = Processes()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.incarnation = 0
        self.learners = Learners(
            config, self.processes, resume=None,  # type: ignore[arg-type]
            spec_of=lambda name, resume: (name, resume),  # type: ignore[arg-type,return-value]
            log_of=lambda name: f"{name}.log",
            tell=lambda what, **fields: self.events.append((what, fields)), go_back=self.go_back,
        )  # fmt: skip
        self.learners.start()
        self.set_up()

    def go_back(self) -> ResumePoint:
        self.incarnation += 1
        return ResumePoint("checkpoints/step-000020", self.incarnation, 20, 20)

    def set_up(self) -> None:
        learners = self.learners
        (bind,) = learners.calls
        self.bound_to = bind[2]
        learners.ended(bind, lambda: BOUND)
        for ref in list(learners.calls):
            assert ref[1:] == ("setup", "127.0.0.1", 99)
            learners.ended(ref, lambda: None)
        assert learners.state == "ready"
        learners.train("tcp://buffer")
        assert {ref[1:] for ref in learners.calls} == {("run", "tcp://buffer")}

    def fail(self, name: str, error: AsyncRLError) -> None:
        (ref,) = [ref for ref, whose in self.learners.calls.items() if whose == name]
        self.learners.ended(ref, failing(error))

    def tick(self, step: int, ending: bool = False, silent: str = "") -> str:
        def is_silent(rank: Rank) -> bool:
            return rank.name == silent

        return self.learners.tick(step, is_silent, ending=ending)

    def die(self, step: int) -> str:
        """Rank 1 is killed, and rank 0 meets its end."""
        self.fail("learner-0", RoleFailedError("learner-0 failed: connection closed by peer"))
        assert self.tick(step) == "", "it waits for what the other one has to say"
        self.fail("learner-1", RoleDiedError("learner-1 died: killed (log: x)"))
        return self.tick(step)


def failing(error: Exception) -> Callable[[], Any]:
    def result() -> Any:
        raise error

    return result


def test_all_ranks_are_restarted_from_the_checkpoint_at_the_same_endpoint() -> None:
    ranks = Ranks()
    learners = ranks.learners
    assert (ranks.bound_to, learners.late) == (0, [])
    told = ranks.die(step=25)
    assert told == (
        "learner-1 died: killed (log: x); restarting from batch 20, as incarnation 1"
    )  # fmt: skip
    both = ["learner-0", "role learner-0", "learner-1", "role learner-1"]
    assert ranks.processes.killed == both
    assert (learners.state, learners.calls) == ("backoff", {})
    assert ranks.tick(20) == ""
    assert learners.state == "starting"
    assert [point.step for _, point in ranks.processes.started[2:] if point] == [20, 20]
    ranks.set_up()
    assert ranks.bound_to == 4711
    for ref in list(learners.calls):
        learners.ended(ref, lambda: "stopped early")
    assert (learners.state, learners.reason, learners.restarts) == ("done", "stopped early", 1)
    assert [what for what, _ in ranks.events] == ["learner_died", "learner_restarted"]
    assert ranks.events[0][1]["next_incarnation"] == 1


def test_restarts_in_a_row_are_limited_and_a_batch_in_between_starts_afresh() -> None:
    ranks = Ranks("cluster.max_restarts=2")
    for step in (25, 21, 20):  # a batch after each of the first two
        ranks.die(step)
        ranks.tick(20)
        ranks.set_up()
    with pytest.raises(RoleDiedError, match="learner-1 died.*; more than cluster.max_restarts=2 t"):
        ranks.die(step=20)


def test_what_would_come_again_ends_the_run() -> None:
    ranks = Ranks()
    with pytest.raises(DataError, match="no file"):
        ranks.fail("learner-0", DataError("no file"))
    ranks = Ranks("checkpoint.every=null")
    with pytest.raises(RoleDiedError, match="learner-1 died"):
        ranks.die(step=25)
    ranks = Ranks()
    ranks.fail("learner-0", RoleDiedError("learner-0 died"))
    ranks.fail("learner-1", RoleFailedError("learner-1 failed"))
    with pytest.raises(RoleDiedError, match="learner-0 died"):
        ranks.tick(25, ending=True)
    assert ranks.processes.killed == []


def test_a_rank_that_stands_still_is_killed_and_the_learner_restarted() -> None:
    ranks = Ranks()
    assert ranks.tick(25, silent="learner-1") == ""
    assert ranks.processes.killed == ["role learner-1"]
    ranks.fail("learner-1", RoleDiedError("learner-1 died: killed"))
    ranks.fail("learner-0", RoleFailedError("learner-0 failed"))
    assert ranks.tick(25).startswith("learner-1 stood still: no sign of life of it; restarting")


def test_a_restarted_learner_is_not_waited_for_without_end() -> None:
    ranks = Ranks("cluster.ready_timeout_s=60.0")
    ranks.die(25)
    ranks.tick(20)
    ranks.tick(20)
    ranks.learners._until = 0.0
    with pytest.raises(DeadlineError, match="not back within cluster.ready_timeout_s=60; see lea"):
        ranks.tick(20)


def test_a_failure_before_it_ever_trained_is_told_at_once() -> None:
    ranks = Ranks()
    ranks.learners._ever_trained = False
    ranks.fail("learner-0", RoleFailedError("learner-0 failed: no memory"))
    ranks.fail("learner-1", RoleFailedError("learner-1 failed: no memory"))
    with pytest.raises(RoleFailedError, match="learner-0 failed: no memory"):
        ranks.tick(0)
