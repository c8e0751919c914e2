"""The ranks of a replay as processes: started, listened to, ended.

    job ──stdin──► rank r ──Told, a line each──► listen ─► rank 0's in order
                      └── stderr ──► replay-R.log

Waits for a line of any rank, by the deadline of the step; one that ends without "done" ends all.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

import asyncrl
from asyncrl import errors
from asyncrl.actors.vllm_setup import engine_environment
from asyncrl.errors import AsyncRLError, DeadlineError, RoleDiedError
from asyncrl.launch.folder import last_words
from asyncrl.launch.replay.job import Job, Told
from asyncrl.waits import Waits


def listen(job: Job, logs: Path, waits: Waits, patience_s: float) -> Iterator[Told]:
    """What rank 0 tells, until all ranks are done; no rank is left when it ends.

    Args:
        logs: folder for the ranks' logs.
        patience_s: between two lines of anybody; then all are ended.

    Raises:
        AsyncRLError: what a rank failed with.
        RoleDiedError: one ended without a word.
        DeadlineError: nobody said anything for so long.
    """
    ranks = [_Rank(job, rank, logs) for rank in range(job.world)]
    try:
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.out, selectors.EVENT_READ, rank)
            left = set(range(job.world))
            while left:
                with waits.on(
                    "a replayed step", ", ".join(f"replay-{r}" for r in sorted(left)), patience_s
                ):
                    ready = selector.select(patience_s)
                if not ready:
                    raise DeadlineError(
                        f"replay waited {patience_s:.0f} s for a step of ranks {sorted(left)}; "
                        f"see {ranks[min(left)].log}"
                    )
                for key, _ in ready:
                    for told in key.data.read():
                        if told.what == "done":
                            left.discard(told.rank)
                        if told.rank == 0:
                            yield told
                    if key.data.ended:
                        selector.unregister(key.fileobj)
                        if key.data.number in left:
                            key.data.died()
    finally:
        for rank in ranks:
            rank.close()


class _Rank:
    """One process."""

    def __init__(self, job: Job, rank: int, logs: Path) -> None:
        self.number, self.log = rank, logs / f"replay-{rank}.log"
        self.ended = False
        root = str(Path(asyncrl.__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        env |= engine_environment(device=job.device, threads=job.threads[rank], eager=True)
        if job.device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = str(rank)
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.launch.replay.rank", str(rank), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env,
                start_new_session=True,  # Ctrl-C is the parent's to hear
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.out = self._process.stdout
        os.set_blocking(self.out.fileno(), False)
        self._rest = b""
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(job))

    def read(self) -> Iterator[Told]:
        """The whole lines that are there now.

        Raises:
            AsyncRLError: it tells that it failed.
        """
        data = os.read(self.out.fileno(), 1 << 20)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line, type=Told)
            if told.what == "failed":
                kind = getattr(errors, told.error, AsyncRLError)
                raise kind(f"replay: {told.message}")
            yield told

    def died(self) -> None:
        """Raise what its end without a word means."""
        code = self._process.wait(10)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        words = last_words(str(self.log))
        raise RoleDiedError(f"replay-{self.number} {how}: {words or 'no last words'}")

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.ended:
                    self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self.out.close()


def alone(job: Job, waits: Waits) -> Iterator[Told]:
    """The only rank, in this process: a debugger stops in it."""
    from asyncrl.launch.replay.rank import train

    del waits  # nobody is waited for
    yield from train(job, 0)


def patience_s(tokens: int, ready_timeout_s: float) -> float:
    """How long a step of so many tokens may take; the set-up has `ready_timeout_s`."""
    return max(ready_timeout_s, tokens / SLOWEST_TOK_S)


SLOWEST_TOK_S = 10.0
"""Tokens per second of the slowest training that is waited for."""
