"""A learner's request for a copy of the ledger: begun at once, answered when it is on the disk.

save_ledger ─► state and samples of this moment ─► Copier (a thread) ─► saved, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl import wire
from asyncrl.buffer.copies import Copier, Written
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.refuse import refusal

Send = Callable[[bytes, Sequence[wire.Frame]], None]


class Saving:
    """The requests for copies, of which one can be under way.

    Args:
        run_id: written into the copies.
        below: the run's folder, which copies must lie in; None refuses all.
        send: sends a reply.
    """

    def __init__(self, ledger: Ledger, run_id: str, below: Path | None, send: Send) -> None:
        self._ledger, self._send = ledger, send
        self._copier = Copier(run_id, below)
        self._asked: tuple[bytes, int] = (b"", 0)  # client and number of the last request
        self._answer: list[wire.Frame] | None = None
        """Its reply, for the case that it is lost."""

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a copy."""
        return self._copier.busy

    def save(self, identity: bytes, message: wire.SaveLedger) -> None:
        """Begin a copy; a request that was sent again waits on, or is answered as before.

        Raises:
            LedgerError: the batch is not kept, the path is none for a copy, one is under way.
        """
        if (identity, message.req) == self._asked:
            if self._answer is not None:
                self._send(identity, self._answer)
            return
        state, samples = self._ledger.copy(message.batch)
        self._copier.start(message.path, state, samples)
        self._asked, self._answer = (identity, message.req), None

    def serve(self) -> None:
        """Answer who waits, if the copy is complete or has failed."""
        result = self._copier.take()
        if result is None:
            return
        identity, req = self._asked
        if isinstance(result, Written):
            reply = wire.Saved(req=req, samples=result.samples, nbytes=result.nbytes)
            self._answer = wire.encode(reply)
        else:
            self._answer = refusal(req, result, "SaveLedger")
        self._send(identity, self._answer)

    def close(self) -> None:
        """Wait for a copy under way, for a while."""
        self._copier.close()
