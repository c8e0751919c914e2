"""Runs the reward function in child processes that are killed past their deadline.

score() ─► a free child (waiting here costs no deadline) ─► Score ─► child ─► Scored
                ▲                                             │
                └── another is started ◄── killed ◄── deadline, crash, cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

import asyncrl
from asyncrl.actors.rewards.frames import (
    LENGTH,
    MAX_BYTES,
    Ready,
    Score,
    Scored,
    pack,
    reply_decoder,
)
from asyncrl.actors.rewards.registry import reward_spec
from asyncrl.config.schema import TaskConfig
from asyncrl.errors import RewardError, RewardTimeout, RewardValueError, UserError
from asyncrl.types import Prompt

START_TIMEOUT_S = 60.0
"""A child that has not imported the function by then is given up."""
END_TIMEOUT_S = 10.0
REAP_S = 1.0


class RewardWorker:
    """A pool of `task.reward_workers` children; `score` may be called from many tasks of one loop.

    Attributes:
        timeouts: calls that passed `task.reward_timeout_s`.
        errors: calls that failed otherwise (raised, crashed, no finite number).
        no_number: those of them that returned no finite number.
        restarts: children started beyond the first of each place in the pool.
    """

    def __init__(self, task: TaskConfig) -> None:
        self.spec = reward_spec(task)
        self.timeout_s = task.reward_timeout_s
        self.timeouts = 0
        self.errors = 0
        self.no_number = 0
        self.restarts = 0
        self._children = [_Child(self.spec) for _ in range(task.reward_workers)]
        self._free: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._free.put_nowait(child)
        self._closed = False

    async def start(self) -> None:
        """Start the children now rather than at the first score.

        Raises:
            UserError: the function cannot be imported.
        """
        await asyncio.gather(*(child.start() for child in self._children))

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """The reward of a response. The deadline runs from when a child takes it up.

        Raises:
            RewardTimeout: the function took longer than `task.reward_timeout_s`; it was killed.
            RewardError: it raised, crashed, or returned no finite number.
        """
        self._check_open()
        child = await self._free.get()
        try:
            return await self._score(child, Score(prompt, response, finish_reason))
        except RewardTimeout:
            self.timeouts += 1
            raise
        except RewardError as e:
            self.errors += 1
            self.no_number += isinstance(e, RewardValueError)
            raise
        finally:
            self._free.put_nowait(child)

    async def _score(self, child: _Child, request: Score) -> float:
        self._check_open()
        try:
            if not child.alive:
                self.restarts += child.started > 0
                await child.start()
            async with asyncio.timeout(self.timeout_s):
                reply = await child.ask(request)
        except TimeoutError as e:
            raise RewardTimeout(
                f"reward {self.spec} took longer than task.reward_timeout_s={self.timeout_s:g} s "
                "and was killed"
            ) from e
        except UserError as e:  # it could be imported before and cannot now
            raise RewardError(str(e)) from e
        except (EOFError, OSError, msgspec.MsgspecError) as e:
            how = await child.kill(grace_s=REAP_S)
            if self._closed:
                how = "was ended with the reward worker"
            raise RewardError(f"reward {self.spec}: its process {how}") from e
        finally:
            if child.busy:  # its answer is still to come: deadline, crash, or we were cancelled
                await child.kill()
        if reply.error:
            kind = RewardValueError if reply.no_number else RewardError
            raise kind(f"reward {self.spec}: {reply.error}")
        return reply.reward

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the reward worker is closed")

    async def close(self) -> None:
        """Kill every child; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(child.kill() for child in self._children))
        async with asyncio.timeout(END_TIMEOUT_S):  # calls under way fail and give theirs back
            for _ in self._children:
                await (await self._free.get()).kill()
        for child in self._children:
            self._free.put_nowait(child)  # calls that still wait find the worker closed


class _Child:
    """One child process and its pipes."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._named = f"task.reward={spec}"
        self._process: asyncio.subprocess.Process | None = None
        self.busy = False
        self.started = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it has imported the function."""
        if self.alive:
            return
        root = str(Path(asyncrl.__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        self.started += 1
        self.busy, ready = True, False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "asyncrl.actors.rewards.child",
                    self._spec, str(os.getpid()),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": path}, start_new_session=True,
                )  # fmt: skip
                reply = await self._read()
            if not isinstance(reply, Ready) or reply.error:
                raise UserError(reply.error or f"{self._named}: no answer from its process")
            ready = True
        except TimeoutError as e:
            raise UserError(
                f"{self._named}: importing it took longer than {START_TIMEOUT_S:g} s"
            ) from e
        except EOFError as e:
            how = await self.kill(grace_s=REAP_S)
            raise UserError(f"{self._named}: its process {how} on import") from e
        except OSError as e:
            raise UserError(f"{self._named}: no process can be started: {e.strerror or e}") from e
        finally:
            if not ready:
                await self.kill()
        self.busy = False

    async def ask(self, request: Score) -> Scored:
        """Send a request and wait for its answer (no deadline here)."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.busy = True
        self._process.stdin.write(pack(request))
        await self._process.stdin.drain()
        reply = await self._read()
        self.busy = False
        if not isinstance(reply, Scored):
            raise EOFError("out of turn")
        return reply

    async def _read(self) -> Ready | Scored:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(LENGTH.size)
        (size,) = LENGTH.unpack(head)
        if size > MAX_BYTES:
            raise EOFError(f"frame of {size} bytes")
        return reply_decoder.decode(await self._process.stdout.readexactly(size))

    async def kill(self, grace_s: float = 0.0) -> str:
        """End the process and what it started; how it ended, in words.

        With `grace_s`, one that crashed has that long to be reaped, so that it can tell how.
        """
        process, self._process, self.busy = self._process, None, False
        if process is None:
            return "was not running"
        try:
            if grace_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await process.wait()
        finally:
            crashed = process.returncode is not None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # pipes too; there is no public way
        code = process.returncode
        if not crashed or code is None:
            return "was killed"
        if code < 0:
            return f"died of signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"
