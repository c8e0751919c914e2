"""What the launcher is asked by `asyncrl scale`: its socket, and what it does then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from asyncrl import wire
from asyncrl.config.load import load
from asyncrl.errors import ConfigError, DeadlineError, UserError, WireError
from asyncrl.launch.control import Answer, Control, ask
from asyncrl.launch.fleet import Fleet
from asyncrl.launch.scaling import Scaling
from asyncrl.monitor.board import Board
from asyncrl.security import Keys, new_keys
from tests.launch.test_fleet import FakeCluster, good, up

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a control socket as the launcher's loop does, until the test ends."""
    over, threads = threading.Event(), []

    def start(answer: Answer, keys: Keys | None = None) -> str:
        control = Control("127.0.0.1", keys)

        def loop() -> None:
            while not over.is_set():
                control.serve(answer)
                over.wait(0.01)
            control.close()
            control.close()

        threads.append(threading.Thread(target=loop))
        threads[-1].start()
        return control.endpoint

    yield start
    over.set()
    for thread in threads:
        thread.join(30)


SCALE = wire.Scale(req=7, run_id="r", actors=3)


def test_the_answer_comes_back_with_the_number_of_the_request(serve: Serve) -> None:
    endpoint = serve(lambda message: wire.Scaled(before=1, actors=message.actors))  # type: ignore[attr-defined]
    assert ask(endpoint, SCALE, timeout_s=30) == wire.Scaled(req=7, before=1, actors=3)


@pytest.mark.parametrize("error", [ConfigError("no room"), UserError("no"), WireError("what?")])
def test_a_refusal_is_raised_as_its_class(serve: Serve, error: Exception) -> None:
    def refuse(message: wire.Message) -> wire.Message:
        raise error

    with pytest.raises(type(error)) as raised:
        ask(serve(refuse), SCALE, timeout_s=30)
    assert (type(raised.value), str(raised.value)) == (type(error), str(error))


def test_neither_a_bug_nor_nonsense_ends_the_service(serve: Serve) -> None:
    def broken(message: wire.Message) -> wire.Message:
        if isinstance(message, wire.StatsRequest):
            raise RuntimeError("a bug")
        return wire.Ok()

    endpoint = serve(broken)
    with pytest.raises(Exception, match="RuntimeError: a bug"):
        ask(endpoint, wire.StatsRequest(), timeout_s=30)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 30_000
        socket.connect(endpoint)
        socket.send_multipart([b"\xc1", b"x"])
        assert isinstance(wire.decode(socket.recv_multipart())[0], wire.Error)
    assert isinstance(ask(endpoint, SCALE, timeout_s=30), wire.Ok)


def test_a_launcher_that_does_not_answer_has_a_deadline() -> None:
    control = Control("127.0.0.1")
    try:
        with pytest.raises(DeadlineError, match=r"no answer of the launcher .* within 0.05 s"):
            ask(control.endpoint, SCALE, timeout_s=0.05)
    finally:
        control.close()


def test_with_curve_only_who_has_the_keys_is_answered(serve: Serve) -> None:
    keys = new_keys()
    endpoint = serve(lambda message: wire.Ok(), keys)
    assert isinstance(ask(endpoint, SCALE, timeout_s=30, keys=keys.client()), wire.Ok)
    for wrong in (None, new_keys().client()):
        with pytest.raises(DeadlineError, match="does not take our keys"):
            ask(endpoint, SCALE, timeout_s=0.5, keys=wrong)


# --- what is done ------------------------------------------------------------------------------


class Ctl:
    """A run's parts, as far as scaling asks them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        config = load("tiny", ("cluster.actors=2", *overrides), {}).config
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.placed: list[str] = []
        self.told: list[tuple[int, list[str]]] = []
        self.cluster = FakeCluster()  # type: ignore[no-untyped-call]
        self.room = 4
        self.cluster.scale = self.seats
        self.fleet = Fleet(
            config, self.cluster, spec_of=lambda rank: rank, log_of=str,  # type: ignore[arg-type,return-value]
            tell=lambda what, **fields: None, gone=lambda name, why: None,
        )  # fmt: skip
        self.fleet.start()
        self.buffer = SimpleNamespace(state="serving")
        crew: Any = SimpleNamespace(
            fleet=self.fleet, cluster=self.cluster, buffer=self.buffer,
            client=SimpleNamespace(scale=self.tell), placed=self.placed.extend,
        )  # fmt: skip
        desk: Any = SimpleNamespace(
            config=config, keys=None, run_id="r", folder=SimpleNamespace(name="tiny-1"),
            board=Board(config), serves=lambda endpoint: None,
            event=lambda what, **fields: self.events.append((what, fields)),
            view=SimpleNamespace(say=self.said.append),
        )  # fmt: skip
        self.desk, self.fails = desk, 0
        self.scaling = Scaling(crew, desk)

    def seats(self, actors: int) -> None:
        if actors > self.room:
            raise ConfigError(f"no room for {actors}")

    def tell(self, actors: int, leaving: list[str]) -> None:
        if self.fails:
            self.fails -= 1
            raise DeadlineError("the buffer hangs")
        self.told.append((actors, leaving))

    def ask(self, actors: int = 3, run_id: str = "r", ending: bool = False) -> wire.Message:
        self.scaling.look(ending)
        reply = self.scaling._answer(wire.Scale(run_id=run_id, actors=actors))
        self.scaling.look(ending)
        return reply


@pytest.fixture
def ctl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ctl]:
    made = Ctl(monkeypatch)
    yield made
    made.scaling.close()


def test_more_actors(ctl: Ctl) -> None:
    names = ("actor-2", "actor-3")
    assert ctl.ask(4) == wire.Scaled(before=2, actors=4, starting=names)
    assert ctl.events == [("scaled", {"from": 2, "to": 4, "starting": names, "leaving": ()})]
    expected = "actors 2 -> 4: actor-2, actor-3 start, and take work once they run the current"
    assert ctl.said == [f"{expected} version"]
    assert ctl.told == [(4, [])]
    assert ctl.placed == list(names)
    assert ctl.desk.board.fleet.actors == 4


def test_fewer_actors_and_the_buffer_hears_who_leaves_and_that_it_has_left(ctl: Ctl) -> None:
    for rank in range(2):
        up(ctl.fleet, rank)  # type: ignore[no-untyped-call]
    assert ctl.ask(1) == wire.Scaled(before=2, actors=1, leaving=("actor-1",))
    assert ctl.told == [(1, ["actor-1"])]
    ctl.scaling.look(False)
    assert len(ctl.told) == 1, "nothing is told twice"
    ctl.scaling.buffer_is_new()
    ctl.scaling.look(False)
    assert ctl.told == [(1, ["actor-1"])] * 2
    ctl.fleet.ended(ctl.fleet.slots[1], good)
    ctl.scaling.look(False)
    assert ctl.told[2:] == [(1, [])]
    assert ctl.said[1:] == ["actor-1 has left"]


def test_a_buffer_that_hangs_or_is_away_is_told_later(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("asyncrl.launch.scaling.time", SimpleNamespace(monotonic=lambda: now))
    ctl.buffer.state = "backoff"
    ctl.ask(3)
    assert ctl.told == []
    ctl.buffer.state, ctl.fails = "serving", 1
    ctl.scaling.look(False)
    ctl.scaling.look(False)
    assert (ctl.told, ctl.fails) == ([], 0), "a hanging buffer holds the launcher up: not each turn"
    now += 1.1
    ctl.scaling.look(False)
    assert ctl.told == [(3, [])]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"actors": 0}, "a run without actors stands still"),
        ({"actors": -1}, "a run without actors stands still"),
        ({"actors": 5}, "no room for 5"),
        ({"run_id": "other"}, "this is run r, asked for is other"),
        ({"ending": True}, "tiny-1 is ending: its actors stay as they are"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    ctl: Ctl, request_: dict[str, Any], message: str
) -> None:
    before = [s.state for s in ctl.fleet.slots]
    with pytest.raises(UserError, match=message):
        ctl.ask(**request_)
    assert [s.state for s in ctl.fleet.slots] == before
    assert (ctl.fleet.wanted, ctl.events, ctl.told, ctl.said) == (2, [], [], [])


def test_what_is_no_request_to_the_launcher(ctl: Ctl) -> None:
    ctl.scaling.look(False)
    with pytest.raises(WireError, match="StatsRequest is not a request to the launcher"):
        ctl.scaling._answer(wire.StatsRequest())


def test_the_same_number_again_changes_nothing(ctl: Ctl) -> None:
    assert ctl.ask(2) == wire.Scaled(before=2, actors=2)
    assert (ctl.events, ctl.said, ctl.told) == ([], [], [])
