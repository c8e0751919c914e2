"""`asyncrl scale` as the launcher does it: actors join and leave while training goes on.

    Scale(4) ──► room for them? ──► fleet: who starts, who leaves ──► Scaled, event `scaled`
                    └── no: ConfigError, nothing has changed   └──► the buffer: who gets no leases

The buffer is told again whenever those who leave change, and after its restart.
"""

from __future__ import annotations

import time
from contextlib import suppress

from asyncrl import wire
from asyncrl.errors import AsyncRLError, UserError, WireError
from asyncrl.launch.control import Control
from asyncrl.launch.crew import Crew
from asyncrl.launch.desk import Desk
from asyncrl.launch.fleet import Slot
from asyncrl.launch.placement import launcher_address

TELL_AGAIN_S = 1.0
"""A buffer that did not take it is told again after so long."""


class Scaling:
    """Serves the control socket and carries out what is asked there."""

    def __init__(self, crew: Crew, desk: Desk) -> None:
        self._crew, self._desk, config = crew, desk, desk.config
        self._control = Control(launcher_address(config.cluster.address), desk.keys)
        self._tell_at = 0.0
        self._leaving: list[Slot] = []
        self.buffer_is_new()
        desk.serves(self._control.endpoint)

    def look(self, ending: bool) -> None:
        """Answer requests, unless the run is `ending`, and keep the buffer informed."""
        self._ending = ending
        self._control.serve(self._answer)
        self._tell_who_left()
        self._tell_buffer()

    def buffer_is_new(self) -> None:
        """A buffer that has just started takes the run for what it was at its launch."""
        self._told: tuple[int, list[str]] = (self._desk.config.cluster.actors, [])

    def close(self) -> None:
        """End the socket."""
        self._control.close()

    def _answer(self, message: wire.Message) -> wire.Message:
        if not isinstance(message, wire.Scale):
            raise WireError(f"{type(message).__name__} is not a request to the launcher")
        if message.run_id != self._desk.run_id:
            raise UserError(f"this is run {self._desk.run_id}, asked for is {message.run_id}")
        if self._ending:
            raise UserError(f"{self._desk.folder.name} is ending: its actors stay as they are")
        return self.scale(message.actors)

    def scale(self, actors: int) -> wire.Scaled:
        """Have so many actors.

        Raises:
            UserError: fewer than one, or more than there is room for; nothing has changed.
        """
        if actors < 1:
            raise UserError(
                f"--actors={actors}: a run without actors stands still: ask for 1 or more, or end "
                "it with Ctrl-C"
            )
        fleet = self._crew.fleet
        before = fleet.wanted
        self._crew.cluster.scale(actors)
        joining, leaving = fleet.scale(actors)
        scaled = wire.Scaled(
            before=before, actors=actors, starting=tuple(s.name for s in joining),
            leaving=tuple(s.name for s in leaving),
        )  # fmt: skip
        self._desk.board.fleet.actors = actors
        self._crew.placed(scaled.starting)
        if before != actors or joining:
            self._desk.event(
                "scaled", starting=scaled.starting, leaving=scaled.leaving,
                **{"from": before, "to": actors},
            )  # fmt: skip
            self._desk.view.say(told(scaled))
        self._tell_at = 0.0
        return scaled

    def _tell_who_left(self) -> None:
        leaving = self._crew.fleet.in_state("leaving")
        for slot in self._leaving:
            if slot.state != "leaving":
                why = f": {slot.why}" if slot.why else ""
                self._desk.view.say(f"{slot.name} has left{why}")
        self._leaving = leaving

    def _tell_buffer(self) -> None:
        fleet, now = self._crew.fleet, time.monotonic()
        state = (fleet.wanted, [s.name for s in fleet.in_state("leaving")])
        client, serving = self._crew.client, self._crew.buffer.state == "serving"
        if state == self._told or client is None or not serving or now < self._tell_at:
            return
        self._tell_at = now + TELL_AGAIN_S
        with suppress(AsyncRLError):
            client.scale(*state)
            self._told, self._tell_at = state, 0.0


def told(scaled: wire.Scaled) -> str:
    """What happens now, in words.

    >>> told(wire.Scaled(before=2, actors=3, starting=("actor-2",)))
    'actors 2 -> 3: actor-2 starts, and takes work once it runs the current version'
    >>> told(wire.Scaled(before=2, actors=2))
    'actors 2 -> 2: nothing to do'
    """
    parts = []
    if names := ", ".join(scaled.starting):
        one = len(scaled.starting) == 1
        verbs = ("starts, and takes", "it runs") if one else ("start, and take", "they run")
        parts.append(f"{names} {verbs[0]} work once {verbs[1]} the current version")
    if names := ", ".join(scaled.leaving):
        one = len(scaled.leaving) == 1
        verbs = ("takes", "ends with what it has") if one else ("take", "end with what they have")
        parts.append(f"{names} {verbs[0]} no more work and {verbs[1]}")
    return f"actors {scaled.before} -> {scaled.actors}: {'; '.join(parts) or 'nothing to do'}"
