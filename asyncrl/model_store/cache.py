"""The folder where built-in models are kept; made once, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.errors import ModelError
from asyncrl.model_store.folder import missing_parts

LOCK_TIMEOUT_S = 1800.0
"""How long to wait for another process that makes the same model."""


def cache_dir() -> Path:
    """$ASYNCRL_CACHE/models, by default ~/.cache/asyncrl/models."""
    root = os.environ.get("ASYNCRL_CACHE")
    base = Path(root) if root else Path.home() / ".cache" / "asyncrl"
    return base.expanduser().absolute() / "models"


def make_once(name: str, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """The folder of a model in the cache, made by `make(folder)` if it is not there.

    Safe for processes that ask at the same time: one makes it under a lock, beside its place,
    and renames it when it is whole.

    Raises:
        ModelError: the cache cannot be written, or another process held the lock too long.
    """
    root = cache_dir()
    target = root / name
    if target.is_dir() and not missing_parts(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{name}.lock", say):
            if target.is_dir() and not missing_parts(target):
                return target
            for old in (*root.glob(f".{name}-*"), target):  # left by a process that was killed
                shutil.rmtree(old, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                make(work)
                work.chmod(0o755)  # mkdtemp and save_pretrained leave them to the owner alone
                for file in work.iterdir():
                    file.chmod(0o644)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise ModelError(
            f"model {name}: cannot be kept in {root}: {e.strerror or e}; set ASYNCRL_CACHE to a "
            "folder that can be written and has room"
        ) from e
    return target


@contextlib.contextmanager
def _lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as f:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"another process prepares this model: waiting for it ({path})")
                    told = True
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"{path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s: "
                        "end that process or wait for it"
                    ) from None
                time.sleep(0.2)
        yield
