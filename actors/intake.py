"""How an actor takes weights: as learner rank 0 sends them, or from its machine's relay.

    learner rank 0 ──requests──► WeightService ─┐
    the relay's offer ─────────► RelayWatch ────┴─► EngineWeights ──► engine
    Announcer ──name, version applied──► learner rank 0    in both cases

Nothing is taken before `introduce`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.actors.announce import Announcer
from asyncrl.actors.relay.watch import RelayWatch
from asyncrl.actors.weight_service import WeightService
from asyncrl.actors.weights import EngineWeights, UpdatableEngine
from asyncrl.config.schema import Config
from asyncrl.metrics import TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.types import Version
from asyncrl.waits import Waits

LEAVE_QUIET_S = 1.0
"""An actor that leaves is in no publication when its weight service had no request for so long."""
LOOK_S = 0.2


class WeightIntake:
    """Owns the parts; `on_applied` hears of each version, `on_failure` of one not loaded, and why
    (None: of a group that was not joined, before anybody said for which version)."""

    def __init__(
        self, config: Config, settings: RoleSettings, engine: UpdatableEngine, *,
        shares: TimeShares, on_applied: Callable[[Version], None],
        on_failure: Callable[[Version | None, str], None],
    ) -> None:  # fmt: skip
        s, weights = settings, config.weights
        self._engine, self._on_applied = engine, on_applied
        self._name, self._keys = s.name, s.keys
        self._workers = 0 if s.relay else config.engine.tensor_parallel
        self._limit_s = weights.timeout_s + weights.drain_s
        self.sender = Path(s.relay).stem if s.relay else "learner-0"
        """Whom versions come from."""
        self.subscriber = EngineWeights(
            engine, timeout_s=weights.timeout_s, staged=s.weight_backend == "gloo",
            drain_s=weights.drain_s, sender=self.sender, on_applied=self._applied,
            on_given_up=on_failure, shares=shares,
        )  # fmt: skip
        self.service = WeightService(
            self.subscriber, host=s.host, keys=s.keys, on_failure=on_failure
        )
        self._watch: RelayWatch | None = None
        if s.relay:
            self._watch = RelayWatch(
                s.relay, self.subscriber, applied=lambda: engine.applied, on_failure=on_failure
            )
        self._announcer: Announcer | None = None
        self._introduced = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, fleet: str) -> None:
        """Serve; `fleet` is where learner rank 0 will hear of this actor."""
        self.service.start()
        self._announcer = Announcer(
            fleet, self.service, name=self._name, workers=self._workers,
            applied=lambda: self._engine.applied, keys=self._keys,
        )  # fmt: skip
        parts = [self._announcer.run, *([self._watch.run] if self._watch is not None else [])]
        self._tasks = [asyncio.create_task(self._once_introduced(run)) for run in parts]

    def introduce(self) -> None:
        """Take versions from now on."""
        self._introduced.set()

    async def wait(self) -> None:
        """Wait until a part ends, which only `close`, a lost engine or a bug makes it do.

        Raises:
            Exception: what ended it.
        """
        serving = asyncio.create_task(self.service.wait())
        try:
            done, _ = await asyncio.wait(
                {serving, *self._tasks}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            serving.cancel()
        for task in done:
            task.result()

    async def leave(self, waits: Waits) -> None:
        """Take part in no further publication, and end the one under way: others are in it.

        Between two requests of a publication nothing tells that it goes on, so a little quiet is
        waited for. Who leaves all the same is cut out, which costs the others a second try.
        """
        assert self._announcer is not None, "start() comes first"
        self._announcer.leave()
        if self._watch is not None:
            self._watch.held = True
        now = quiet_since = time.monotonic()
        deadline = now + self._limit_s
        with waits.on("the end of a weight update", self.sender, self._limit_s):
            while now - quiet_since < LEAVE_QUIET_S and now < deadline:
                await asyncio.sleep(LOOK_S)
                now = time.monotonic()
                if self.subscriber.updating or not self.service.ready:
                    quiet_since = now

    def metrics(self) -> dict[str, float]:
        """`sync/*` of this engine, and who was not let in (docs/metrics.md)."""
        return self.subscriber.metrics() | dict(self.service.gate.metrics())

    async def close(self) -> None:
        """End the sockets; safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._announcer is not None:
            self._announcer.close()
        await self.service.close()

    async def _once_introduced(self, run: Callable[[], Awaitable[None]]) -> None:
        await self._introduced.wait()
        await run()

    def _applied(self, version: Version) -> None:
        if self._announcer is not None:
            self._announcer.look()  # what comes from the relay, the service knows nothing of
        self._on_applied(version)
