"""What a call to a role in another process brings: its result, or what it failed with."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import AsyncRLError, RoleDiedError, RoleFailedError
from asyncrl.launch.folder import last_words


def result(ref: Any, name: str, log: str) -> Any:
    """The result of a call to a `RoleHost`, which has ended.

    Raises:
        AsyncRLError: what the role raised.
        RoleDiedError: its process or its host's is gone, with the last words of its log.
    """
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as e:
        cause = e.cause if isinstance(e.cause, BaseException) else e
        if not isinstance(cause, RoleDiedError):
            if isinstance(cause, AsyncRLError):
                words = str(cause).removeprefix(f"{name}: ")
                raise type(cause)(f"{name}: {words} (log: {log})") from None
            raise RoleFailedError(f"{name} failed: {str(cause).strip()} (log: {log})") from None
    except ray.exceptions.RayActorError:
        pass
    words = last_words(log) or "its log says nothing of why: killed, or out of memory?"
    raise RoleDiedError(f"{name} died: {words.removeprefix(f'{name}: ')} (log: {log})")
