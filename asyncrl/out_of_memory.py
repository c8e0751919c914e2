"""Whether something failed for lack of memory: by what it said, or by who killed it."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.errors import EngineMemoryError

SIGNS = re.compile(
    r"out of memory|not enough (GPU )?memory|cannot allocate memory|can't allocate memory"
    r"|No available memory for the cache|larger than the available KV cache|\bMemoryError\b"
    r"|OutOfMemoryError|std::bad_alloc",
    re.IGNORECASE,
)
"""What vLLM, torch, CUDA, glibc and Python say."""
MAX_TEXT = 300
SETTINGS = (
    "lower rollout.max_in_flight, engine.kv_cache_gib (on a GPU engine.gpu_memory_utilization) or "
    "engine.max_model_len"
)
"""Of an engine: what takes its memory."""
_CACHE = re.compile(r"memory for the cache|larger than the available KV cache", re.IGNORECASE)
_CACHE_SETTINGS = (
    "raise engine.kv_cache_gib (on a GPU engine.gpu_memory_utilization), or lower "
    "rollout.max_new_tokens or engine.max_model_len"
)


def said(text: str) -> str:
    """The last line that speaks of a lack of memory; "" if none does.

    >>> said("loading\\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\\nbye")
    'RuntimeError: CUDA out of memory. Tried to allocate 2 GiB'
    """
    found = [line.strip() for line in text.splitlines() if SIGNS.search(line)]
    return found[-1][:MAX_TEXT] if found else ""


def kills(path: str = "/proc/vmstat") -> int | None:
    """Processes that this machine's kernel has killed for lack of memory; None: it does not say."""
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def killed(before: int | None, after: int | None) -> bool:
    """Whether a process that died of SIGKILL may have been killed for memory.

    Where the kernel does not count its kills, it may have been: nobody of asyncrl kills so without
    saying why.

    >>> killed(0, 1), killed(3, 3), killed(None, None)
    (True, False, True)
    """
    return before is None or after is None or after > before


def at_start(why: str) -> EngineMemoryError:
    """The error of an engine that does not start for lack of memory."""
    fix = _CACHE_SETTINGS if _CACHE.search(why) else SETTINGS
    return EngineMemoryError(f"the engine finds no memory at its start ({why}): {fix}")
