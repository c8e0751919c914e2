"""The role "relay": a machine's receiver as a process of its own.

run: its weight service and its announcements, until the process is ended
"""

from __future__ import annotations

import asyncio

from asyncrl.actors.announce import Announcer
from asyncrl.actors.relay.receiver import RelayReceiver
from asyncrl.actors.weight_service import WeightService
from asyncrl.config.schema import Config
from asyncrl.hub import HubClient
from asyncrl.metrics import TimeShares, process_began
from asyncrl.pulse import Pulse
from asyncrl.roles import RoleSettings
from asyncrl.types import Version
from asyncrl.waits import Waits


class RelayWorker:
    """Owns everything that a receiver holds."""

    def __init__(self, config: Config, settings: RoleSettings) -> None:
        self.config, self.settings = config, settings

    async def run(self, fleet: str) -> None:
        """Serve learner rank 0, which is told of it at `fleet`, until cancelled."""
        s = self.settings
        spans = s.span_log(self.config.trace.kept_mib)
        shares = TimeShares(since=process_began(), spans=spans)
        receiver = RelayReceiver(s.relay, shares)
        hub = HubClient(s.hub_endpoint, "relay", s.rank, keys=s.keys)

        def on_failure(version: Version | None, reason: str) -> None:
            at, failed = receiver.applied, str(version or "")
            hub.emit(
                step=0, version=at.version, incarnation=at.incarnation,
                event={"event": "weights_not_loaded", "not_loaded": failed, "reason": reason},
            )  # fmt: skip

        service = WeightService(receiver, host=s.host, keys=s.keys, on_failure=on_failure)
        pulse = Pulse(
            hub, waits=Waits(s.name, self.config.log.wait_warn_s), children=False,
            metrics=[receiver.metrics, service.gate.metrics, shares.metrics, spans.flush],
            position=lambda: (0, receiver.applied),
        )  # fmt: skip
        announcer = Announcer(
            fleet, service, name=s.name, workers=1, applied=lambda: receiver.applied, keys=s.keys
        )
        service.start()
        announcing = asyncio.create_task(announcer.run())
        try:
            await service.wait()
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            announcer.close()
            await service.close()
            receiver.close()
            pulse.close()
            hub.close()
