"""The yardsticks of bench/buffer.py without asyncrl: bare ZeroMQ, and a queue in a Ray actor.

raw:    PUSH x n ──► PULL                  the same two frames, sent as the lean producers do
relay:  PUSH x n ──► PULL, PUSH ──► PULL   as many hops as through the buffer
actor:  put.remote x n ──► Ray actor ──► get(many).remote
queue:  ray.util.queue.Queue, put x n ──► get

python bench/buffer_raw.py raw|relay|actor|queue '{...}'   prints one line: {"samples_s": ...}
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from tests.helpers.lean_peers import (
    Load,
    Push,
    encode,
    header_of,
    look_at,
    payload_of,
    send_sample,
    tokens_of,
)

BATCH = 128
"""Items that are fetched at a time from a Ray actor, as a learner's pull does."""
OUTSTANDING = 64
"""Calls of a producer to a Ray actor that may be under way."""
ROOM = 2048
"""Items that a queue in a Ray actor holds."""
WAIT_MS = 30_000


class Clock:
    """Counts what arrives in the counted time, from the first item on."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._began = self._warm = 0.0
        self._at_warm = self._count = 0
        self.rate = 0.0

    def add(self, items: int) -> bool:
        """Items came; whether it goes on."""
        now = time.perf_counter()
        self._count += items
        self._began = self._began or now
        if not self._warm and now - self._began >= self._load.warm_s:
            self._warm, self._at_warm = now, self._count
        elif self._warm and now - self._warm >= self._load.seconds:
            self.rate = (self._count - self._at_warm) / (now - self._warm)
        return not self.rate


# --- ZeroMQ -----------------------------------------------------------------------------------


def frames_of(load: Load) -> tuple[bytes, bytes]:
    """The frames of a push, made once."""
    h = header_of(("p", 0, 12345, 3), 12345, "actor-0", tokens_of(load.payload_bytes), (0, 100))
    return encode(Push(12345, h)), payload_of(load.payload_bytes)


def push_forever(tell: Connection, load: Load) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(tell.recv())
    header, payload = frames_of(load)
    while True:
        send_sample(socket, header, payload)


def relay_forever(tell: Connection) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    tell.send((_bound(pull), _bound(push)))
    while True:
        header = pull.recv()
        payload = pull.recv(copy=False)
        push.send(header, zmq.SNDMORE)
        push.send(payload, copy=False)


def _bound(socket: Any) -> str:
    socket.bind("tcp://127.0.0.1:0")
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def zeromq(load: Load, kind: str) -> float:
    """Samples/s from some producers to this process."""
    fork = multiprocessing.get_context("fork")  # before this process has a ZeroMQ context
    processes, pipes, relayed = [], [], kind == "relay"
    for _ in range(load.producers):
        here, there = fork.Pipe()
        pipes.append(here)
        processes.append(fork.Process(target=push_forever, args=(there, load)))
    here, there = fork.Pipe()
    processes += [fork.Process(target=relay_forever, args=(there,))] if relayed else []
    for process in processes:
        process.daemon = True
        process.start()
    pull = zmq.Context().socket(zmq.PULL)
    pull.rcvtimeo = WAIT_MS
    try:
        if relayed:
            entry, exit_ = here.recv()
            pull.connect(exit_)
        else:
            entry = _bound(pull)
        for pipe in pipes:
            pipe.send(entry)
        clock = Clock(load)
        while clock.add(_take(pull)):
            pass
        return clock.rate
    finally:
        for process in processes:
            process.kill()
            process.join()


def _take(pull: Any, many: int = 32) -> int:
    for _ in range(many):
        header = pull.recv()
        look_at([header, pull.recv(copy=False).buffer])
    return many


# --- Ray ----------------------------------------------------------------------------------------


class Box:
    """A queue in an actor, as lean as one can be."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ROOM)

    async def put(self, item: Any) -> None:
        await self._queue.put(item)

    async def get(self, most: int) -> list[Any]:
        """At least one item."""
        items = [await self._queue.get()]
        while len(items) < most and not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items


def put_forever(box: Any, item: tuple[bytes, bytes]) -> None:
    """Many calls under way."""
    import ray

    waiting: list[Any] = []
    while True:
        waiting.append(box.put.remote(item))
        if len(waiting) >= OUTSTANDING:
            done, waiting = ray.wait(waiting, num_returns=OUTSTANDING // 2)
            ray.get(done)


def put_in_queue_forever(queue: Any, item: tuple[bytes, bytes]) -> None:
    while True:
        queue.put(item)


def in_ray(load: Load, kind: str) -> float:
    """Samples/s from tasks through a queue in an actor to this process."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join((here, str(Path(here).parent)))
    import ray
    from ray.util.queue import Queue

    clock, item = Clock(load), frames_of(load)
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        ray.init(
            address="local", num_cpus=load.producers + 2, object_store_memory=200 << 20,
            include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            _temp_dir=scratch,
        )  # fmt: skip
        try:
            if kind == "queue":
                queue = Queue(maxsize=ROOM)
                produce = ray.remote(put_in_queue_forever)
                tasks = [produce.remote(queue, item) for _ in range(load.producers)]
                while clock.add(look_at_items([queue.get(timeout=30)])):
                    pass
            else:
                box = ray.remote(Box).options(num_cpus=1).remote()
                produce = ray.remote(put_forever)
                tasks = [produce.remote(box, item) for _ in range(load.producers)]
                asked = [box.get.remote(BATCH), box.get.remote(BATCH)]
                while clock.add(look_at_items(ray.get(asked.pop(0), timeout=30))):
                    asked.append(box.get.remote(BATCH))
            for task in tasks:
                ray.cancel(task, force=True)
        finally:
            ray.shutdown()
    return clock.rate


def look_at_items(items: list[Any]) -> int:
    for item in items:
        look_at(list(item))
    return len(items)


def main() -> None:
    kind, load = sys.argv[1], Load(**json.loads(sys.argv[2]))
    side = {"raw": zeromq, "relay": zeromq, "actor": in_ray, "queue": in_ray}[kind]
    print(json.dumps({"samples_s": side(load, kind)}))


if __name__ == "__main__":
    main()
