"""A machine's receiver: what learner rank 0 sends goes to shared memory, for all engines here.

    learner rank 0 ──WeightsInit──► join      the gloo group, as one member of it
                   ──WeightsBegin─► begin     nobody is paused
                   ──WeightsReceive► receive  into memory that is ready, compared as it comes
                   ──WeightsCommit► commit    offered to the engines, in place of the last one;
                                              memory for the next is made

To the learner it is a member like an actor. What fails leaves the last version on offer. The steps
are bounded by the deadlines that come with them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.actors.gloo_receiver import GlooReceiver
from asyncrl.actors.relay.memory import Draft, Offer
from asyncrl.actors.relay.spare import Spare
from asyncrl.errors import AlreadyAppliedError, WeightSyncError
from asyncrl.metrics import TimeShares
from asyncrl.types import INITIAL, Version
from asyncrl.weights import TransferPlan, refuse_damaged


class RelayReceiver:
    """`WeightSubscriber` of a machine; `offer_path` is where its engines look."""

    def __init__(self, offer_path: str, shares: TimeShares | None = None) -> None:
        """A receiver; `shares` gets the time of its steps, as `sync`."""
        self._path = Path(offer_path)
        self._shares = shares or TimeShares()
        self._path.unlink(missing_ok=True)  # of a receiver that has died, and its memory with it
        self.gloo = GlooReceiver()
        self._spare = Spare()
        self._version: Version | None = None
        self._info: dict[str, Any] = {}
        self._draft: Draft | None = None
        self._held: Draft | None = None
        self.applied = INITIAL
        """The version on offer; at first nothing is, and engines run the initial model."""

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join the transfer group described by the publisher; leaves an earlier one."""
        self._drop()
        with self._step("join"):
            await asyncio.to_thread(self.gloo.join, info)

    async def begin(self, version: Version) -> None:
        """Get ready to receive.

        Raises:
            AlreadyAppliedError: `version` or a newer one is on offer.
        """
        if version <= self.applied:
            raise AlreadyAppliedError(f"version {version} is not above {self.applied}")
        self._drop()
        self._version = version

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Take part in the collective; afterwards the whole version is there, and sealed.

        Raises:
            DamagedWeightsError: a tensor did not arrive as it was sent.
            WeightSyncError: a peer left, the deadline passed, or no memory is left.
        """
        if self._version is None or self._draft is not None:
            raise WeightSyncError("receive without begin")
        with self._step("receive"):
            loop = asyncio.get_running_loop()
            filling = loop.run_in_executor(None, self._fill, self._version, info)
            try:
                self._draft = await asyncio.shield(filling)
            except BaseException:
                filling.add_done_callback(_close)  # its thread may go on, and owns it until then
                raise
            finally:
                del filling  # its error refers to this frame: a cycle would keep the group open
        self._info = dict(info)

    async def commit(self, version: Version) -> None:
        """Offer what was received to the engines."""
        if self._draft is None or version != self._version:
            raise WeightSyncError(f"commit of {version}, received is {self._version}")
        with self._step("commit"):
            await asyncio.to_thread(Offer.of(self._draft, self._info).write, self._path)
        last, self._held, self._draft = self._held, self._draft, None
        self.applied, self._version, self._info = version, None, {}
        self._spare.prepare(self._held.nbytes, last.pages if last is not None else None)

    def close(self) -> None:
        """Leave the group and offer nothing any more; engines that load go on."""
        self._drop()
        self.gloo.leave()
        self._path.unlink(missing_ok=True)
        if self._held is not None:
            self._held.close()
            self._held = None
        self._spare.close()

    def metrics(self) -> dict[str, float]:
        """What it holds (docs/metrics.md)."""
        return {"sync/held_bytes": float(self._held.nbytes if self._held is not None else 0)}

    def _fill(self, version: Version, info: Mapping[str, Any]) -> Draft:
        """The whole version, sealed. In a thread of its own."""
        plan = TransferPlan.from_info(info)
        draft = Draft(version, plan, info["checksums"], self._spare)
        try:
            self.gloo.receive(
                plan, draft, bucket_bytes=info["bucket_bytes"], timeout_s=info["timeout_s"]
            )
            refuse_damaged([draft.seal()])
        except BaseException:
            draft.close()
            raise
        return draft

    def _drop(self) -> None:
        """Forget what was begun."""
        if self._draft is not None:
            self._draft.close()
        self._draft, self._version = None, None

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Whatever fails is a refusal: the last version is still on offer."""
        try:
            with self._shares.state("sync"), self._shares.spans.span("weights", name):
                yield
        except WeightSyncError:
            raise
        except (RuntimeError, OSError, KeyError) as e:
            raise WeightSyncError(f"relay: {name} failed: {type(e).__name__}: {e}") from e


def _close(filling: asyncio.Future[Draft]) -> None:
    """Of what nobody waits for any more."""
    if not filling.cancelled() and filling.exception() is None:
        filling.result().close()
