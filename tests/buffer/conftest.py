"""A buffer server in a thread of its own, on uvloop, as it runs in its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.server import BufferServer
from tests.buffer.samples import prompts


class Running:
    """A server that runs until the test's end; `ledger` is to be read only when it waits."""

    def __init__(self, ledger: Ledger, **options: Any) -> None:
        self.ledger = ledger
        self.records: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._options = {"run_id": "r", "emit": self._emit} | options
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run, name="buffer server")
        self.thread.start()
        assert self._ready.wait(30)

    def _emit(self, metrics: Any = None, *, event: Any = None, **fields: int) -> None:
        self.records.append({"metrics": metrics, "event": event, **fields})

    def _run(self) -> None:
        async def main() -> None:
            self.server = BufferServer(self.ledger, **self._options)
            self.endpoint = await self.server.start()
            self.task = asyncio.current_task()
            self.loop = asyncio.get_running_loop()
            self._ready.set()
            await self.server.run()

        try:
            uvloop.run(main())
        except asyncio.CancelledError:
            pass
        except Exception as e:  # looked at by the test
            self.error = e

    def close(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.task.cancel)  # type: ignore[union-attr]
        self.thread.join(30)
        assert not self.thread.is_alive()


def small_ledger(**changes: Any) -> Ledger:
    values: dict[str, Any] = {
        "prompts": prompts(), "group_size": 2, "groups_per_batch": 2, "max_staleness": 1,
        "lease_timeout_s": 60.0,
    }  # fmt: skip
    return Ledger(**(values | changes))


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Start servers: `serve(ledger keyword arguments, server={...})`."""
    running: list[Running] = []

    def start(server: dict[str, Any] | None = None, **changes: Any) -> Running:
        running.append(Running(small_ledger(**changes), **(server or {})))
        return running[-1]

    yield start
    for one in running:
        one.close()
        assert one.error is None
