"""What a side of bench/learner.py tells of its steps: seconds, memory, loss; one line of JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import time
from dataclasses import asdict, dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one process, the first of which is warm-up. Memory in bytes of resident set."""

    seconds: list[float]
    loss: list[float]
    grad_norm: list[float]
    """Before clipping."""
    before: int
    """Model loaded, no step done yet."""
    rest: int
    """After the first step: the optimizer's moments have come to stay."""
    peak: int
    """The most, of any time."""


@dataclass(slots=True)
class Meter:
    """Call `start`, then for each step `begin`, `end` and `saw`."""

    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    before: int = 0
    rest: int = 0
    _loaded_peak: int = 0
    _began: float = 0.0

    def start(self) -> None:
        """The model is loaded: what comes now is the steps' own."""
        gc.collect()
        _trim()
        self.before, self._loaded_peak = resident(), peak()

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """It has ended."""
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == 1:
            self.rest = resident()

    def saw(self, loss: float, grad_norm: float) -> None:
        """What it computed."""
        self.loss.append(loss)
        self.grad_norm.append(grad_norm)

    def say(self) -> None:
        """Print the result as the last line.

        Raises:
            RuntimeError: loading took more memory than any step, which hides the steps' peak.
        """
        if peak() <= self._loaded_peak:
            raise RuntimeError("loading the model took more memory than a step: no peak to tell")
        done = Measured(
            seconds=self.seconds, loss=self.loss, grad_norm=self.grad_norm, before=self.before,
            rest=self.rest, peak=peak(),
        )  # fmt: skip
        print(json.dumps(asdict(done)), flush=True)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most that `resident` ever was."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trim() -> None:
    """Give freed memory back, so that a step that uses it again counts it (glibc alone)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
