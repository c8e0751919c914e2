"""Refusals: from an error to the reply that carries it, and back to a request's number."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl import wire
from asyncrl.errors import AsyncRLError, LedgerError


class ConservationError(LedgerError):
    """The ledger's counts disagree: a bug. Ends the server."""


def refusal(req: int, error: Exception, what: str) -> list[wire.Frame]:
    """The Error reply to request `req` (a `what`) that raised `error`.

    It names the closest class of asyncrl.errors, so that the client can raise the same.
    """
    if not isinstance(error, AsyncRLError):
        error = LedgerError(f"internal error on {what}: {type(error).__name__}: {error}")
    name = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "asyncrl.errors")
    return wire.encode(wire.Error(req=req, error=name, message=str(error)))


def request_number(frames: Sequence[wire.Frame]) -> int:
    """The `req` of a message that did not decode, or 0, so that its client can match the reply."""
    try:
        req = msgspec.msgpack.decode(frames[0])["req"]
    except (IndexError, KeyError, TypeError, ValueError, msgspec.DecodeError, RecursionError):
        return 0
    return req if isinstance(req, int) and 0 <= req < 1 << 63 else 0
