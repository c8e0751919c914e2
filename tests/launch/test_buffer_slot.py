"""The buffer's slot: which deaths are survived, on which port, and how long one is waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.load import load
from asyncrl.errors import DeadlineError, RoleDiedError, StoreError
from asyncrl.launch.buffer_slot import BufferSlot

ENDPOINT = "tcp://127.0.0.1:4711"


class Processes:
    """Stands in for the cluster: notes the ports that processes are started with, and kills."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.killed = 0

    def start(self, port: int, _log: str) -> Any:
        self.started.append(port)
        return SimpleNamespace(call=SimpleNamespace(remote=lambda method: method))

    def kill(self, _host: Any) -> None:
        self.killed += 1

    def kill_role(self, name: str) -> None:
        assert name == "buffer-0"
        self.killed += 1


def serving(*overrides: str) -> tuple[BufferSlot, Processes]:
    config = load(None, ["cluster.restart_backoff_s=0.000001", *overrides]).config
    processes = Processes()
    slot = BufferSlot(
        config, processes, spec_of=lambda port: port, log="log",  # type: ignore[arg-type,return-value]
        tell=lambda *_, **__: None,
    )  # fmt: skip
    slot.start()
    slot.bind()
    slot.serve(ENDPOINT)
    return slot, processes


def failing(error: Exception) -> Callable[[], Any]:
    def result() -> Any:
        raise error

    return result


DIED = failing(RoleDiedError("buffer-0 died"))


def test_a_buffer_with_a_store_comes_back_on_its_port() -> None:
    slot, processes = serving("buffer.durability=process")
    assert "restarting" in slot.ended(DIED, step=3)
    assert slot.state == "backoff"
    slot.tick(step=4)
    assert (slot.state, slot.ref, processes.started) == ("starting", "start", [0, 4711])
    assert slot.ended(lambda: ENDPOINT, step=3) == "buffer-0 is back"
    assert (slot.state, slot.restarts, processes.killed) == ("serving", 1, 1)


def test_without_a_store_its_death_ends_the_run() -> None:
    slot, _ = serving("buffer.durability=none")
    with pytest.raises(RoleDiedError, match="with buffer.durability=process it would"):
        slot.ended(DIED, step=3)


def test_deaths_in_a_row_are_limited_and_a_batch_in_between_starts_afresh() -> None:
    slot, _ = serving("buffer.durability=process", "cluster.max_restarts=1")
    for step in (3, 4):
        slot.ended(DIED, step)
        slot._until = 0.0
        slot.tick(step=4)
    with pytest.raises(RoleDiedError, match="more than cluster.max_restarts=1 times in a row"):
        slot.ended(DIED, 4)


def test_what_a_restart_would_meet_again_ends_the_run() -> None:
    slot, _ = serving("buffer.durability=process")
    slot.ended(DIED, 3)
    slot.tick(step=4)
    with pytest.raises(StoreError, match="gone"):
        slot.ended(failing(StoreError("gone")), 3)


def test_a_restarted_buffer_is_not_waited_for_without_end() -> None:
    slot, _ = serving("buffer.durability=process", "cluster.ready_timeout_s=60.0")
    slot.ended(DIED, 3)
    slot.tick(step=4)
    slot.tick(step=4)
    assert slot.state == "starting"
    slot._until = 0.0
    with pytest.raises(DeadlineError, match="not back within cluster.ready_timeout_s=60; see log"):
        slot.tick(step=4)


def test_a_buffer_that_is_stuck_is_killed_and_restarted() -> None:
    slot, processes = serving("buffer.durability=process")
    assert slot.tick(step=3) == ""
    slot.heard -= 200
    assert slot.tick(step=3).startswith("buffer-0 stood still: no answer for 120 s; see log")
    assert (slot.state, processes.killed) == ("backoff", 2)
    slot, _ = serving("buffer.durability=none")
    slot.heard -= 200
    with pytest.raises(RoleDiedError, match="with buffer.durability=process it would"):
        slot.tick(step=3)
