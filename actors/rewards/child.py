"""The process that runs a reward function; it may hang or crash without harm.

    python -m asyncrl.actors.rewards.child SPEC PARENT_PID

stdin and stdout carry frames (frames.py): Ready once, then one Scored for each Score. What the
user's function prints goes to stderr. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import BinaryIO

from asyncrl.actors.rewards.frames import Ready, Score, Scored, pack, read, request_decoder
from asyncrl.actors.rewards.registry import resolve_reward
from asyncrl.errors import UserError
from asyncrl.protocols import Reward
from asyncrl.user_function import as_number, describe

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere EOF must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off fds 0 and 1, which the user's function may print to or read."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing


def _score(function: Reward, request: Score) -> Scored:
    try:
        value = function(request.prompt, request.response, request.finish_reason)
    except BaseException as e:  # whatever it raises, SystemExit included, is its failure
        return Scored(error=describe(e))
    try:
        return Scored(as_number(value))
    except (TypeError, ValueError) as e:
        return Scored(error=describe(e), no_number=True)


def main(spec: str, parent: int) -> None:
    """Serve until the parent closes the pipe."""
    _die_with_parent(parent)
    incoming, outgoing = _private_streams()
    try:
        function = resolve_reward(spec)
    except UserError as e:
        outgoing.write(pack(Ready(error=str(e))))
        outgoing.flush()
        return
    outgoing.write(pack(Ready()))
    outgoing.flush()
    while (body := read(incoming)) is not None:
        outgoing.write(pack(_score(function, request_decoder.decode(body))))
        outgoing.flush()
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
