"""Refusals: from an error to the reply that carries it."""

from __future__ import annotations

from asyncrl import wire
from asyncrl.errors import AsyncRLError, LedgerError

MAX_MESSAGE = 1000
"""Characters of a refusal: it quotes what came, which may be 64 MiB of anything."""


def refusal(req: int, error: Exception, what: str) -> list[wire.Frame]:
    """The Error reply to request `req` (a `what`) that raised `error`.

    It names the closest class of asyncrl.errors, so that the client can raise the same.
    """
    if not isinstance(error, AsyncRLError):
        error = LedgerError(f"internal error on {what}: {type(error).__name__}: {error}")
    name = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "asyncrl.errors")
    return wire.encode(wire.Error(req=req, error=name, message=str(error)[:MAX_MESSAGE]))
