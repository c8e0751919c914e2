"""What to say of a checkpoint that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.disk import too_large
from asyncrl.learner.checkpointing.state import reason

FULL_BYTES = 64 * 2**20
"""With less left, a failure without a number of the system is taken for lack of room."""


def explain(error: BaseException, folder: Path, step: int) -> str:
    """Folder, reason and fix, in one line."""
    what, parent = f"the checkpoint of batch {step} cannot be written to {folder.parent}", folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    number, text = _errno(error), reason(error)
    free = shutil.disk_usage(parent).free
    if number is None and free < FULL_BYTES:
        number = errno.ENOSPC
    if number == errno.EFBIG:
        why, fix = too_large()
        return f"{what} ({why}): {fix}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        why = os.strerror(number).lower()
        fix = "make room there, or lower checkpoint.keep or checkpoint.max_gib"
        return f"{what} ({why}, {free / 2**30:.2f} GiB are free): {fix}"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what} ({os.strerror(number).lower()}): let this user write there"
    return f"{what} ({type(_inner(error)).__name__}: {text}): see the logs of the learners"


def _inner(error: BaseException) -> BaseException:
    """Of a failure on several ranks, that of the lowest."""
    if isinstance(error, CheckpointException) and error.failures:
        return _inner(min(error.failures.items())[1][0])
    return error


def _errno(error: BaseException) -> int | None:
    """The system's number, also when a library raised its own error because of it."""
    seen: BaseException | None = _inner(error)
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        seen = seen.__cause__ or seen.__context__
    return None
