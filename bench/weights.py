"""What a publication costs the learner and the actors: SmolLM2-135M in bfloat16 to 1, 2 and 4.

    learner (this process)  publish ──gloo──► 1 vLLM engine, or 2 or 4 stand-ins   ─┐ in turns
    memcpy                  the learner's float32 shards into other memory           │
    raw                     the same bytes by one bare gloo broadcast, and a barrier ─┘
    step                    one training step, alone and while a publication travels

A stand-in receives as an engine does, checksums included, and loads by copying.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import BenchError, Report, in_turns, parser, ratios, run_bench
from learner_batch import Workload, make_part, make_samples
from weights_receiver import TIMEOUT_S, raw_group, raw_options
from weights_receiver import main as receiver

MODEL = "smollm2-135m"
START_S = 400.0
REPLY_S = 120.0
IN_FLIGHT = 4
"""Requests of the engine while its pause is measured."""
WORKLOAD = Workload(groups=2, group_size=4, longest=64)


class Timing(NamedTuple):
    """One publication, in seconds."""

    blocked: float
    total: float
    transfer: float
    pause: float
    """As the learner sees it."""


class Receivers:
    """The processes of one count, told what to do over pipes."""

    def __init__(self, kinds: list[str], endpoint: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number, kind in enumerate(kinds):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=receiver, args=(theirs, kind, endpoint, f"actor-{number}", model)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait(self, seconds: float = REPLY_S) -> list[Any]:
        """The reply of each.

        Raises:
            BenchError: one failed, or said nothing.
        """
        replies = []
        for pipe in self._pipes:
            try:
                reply = pipe.recv() if pipe.poll(seconds) else TimeoutError(f"{seconds:.0f} s")
            except EOFError as e:
                reply = e
            if isinstance(reply, Exception):
                raise BenchError(f"a receiver: {type(reply).__name__}: {reply}")
            replies.append(reply)
        return replies

    def ask(
        self, *command: Any, each: Callable[[int], tuple[Any, ...]] = lambda _: ()
    ) -> list[Any]:
        """Have all do something."""
        for number, pipe in enumerate(self._pipes):
            pipe.send((*command, *each(number)))
        return self.wait()

    def end(self) -> None:
        """End them, by force if need be."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.terminate()
                process.join()


class Raw:
    """A bare gloo broadcast of so many bytes to the receivers."""

    def __init__(self, receivers: Receivers, count: int, nbytes: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port, world = listener.getsockname()[1], count + 1
        for number, pipe in enumerate(receivers._pipes):
            pipe.send(("raw_join", "127.0.0.1", port, number + 1, world, nbytes))
        self._group = raw_group("127.0.0.1", port, 0, world, listener)
        receivers.wait()
        self._receivers = receivers
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def __call__(self) -> float:
        """Seconds until all have it."""
        self._receivers.ask("raw_receive")
        began = time.monotonic()
        self._group.broadcast([self._buffer], raw_options()).wait()
        self._group.barrier().wait()
        return time.monotonic() - began

    def close(self) -> None:
        """Leave the group."""
        self._receivers.ask("raw_leave")
        self._group = None


class Learner:
    """The trainer and, for some receivers, its publisher."""

    def __init__(self, model: str, threads: int) -> None:
        from asyncrl.config.load import load
        from asyncrl.learner.step import Trainer

        self.config = load(
            None,
            [
                f"rollout.group_size={WORKLOAD.group_size}", "engine.dtype=bfloat16",
                f"rollout.max_prompt_tokens={WORKLOAD.prompt[1]}",
                f"rollout.max_new_tokens={WORKLOAD.longest}",
                f"learner.batch_size={WORKLOAD.samples}", f"weights.timeout_s={TIMEOUT_S}",
            ],
        ).config  # fmt: skip
        torch.set_num_threads(threads)
        self.trainer = Trainer(self.config, model, rank=0, world=1, device="cpu")
        self._samples = make_samples(WORKLOAD)
        self._batches = self._versions = 0
        shards = [tensor for _, tensor in self.trainer.policy.shards()]
        self.elsewhere = [torch.zeros_like(s) for s in shards]
        self.shard_bytes = sum(s.nbytes for s in shards)

    def memcpy(self) -> float:
        """Seconds of copying the shards as they are."""
        shards = [tensor for _, tensor in self.trainer.policy.shards()]
        began = time.monotonic()
        for target, shard in zip(self.elsewhere, shards, strict=True):
            target.copy_(shard)
        return time.monotonic() - began

    def step(self) -> float:
        """Seconds of one training step."""
        from asyncrl.types import INITIAL

        self._batches += 1
        part = make_part(self._samples, self._batches)
        began = time.monotonic()
        self.trainer.train(part, INITIAL)
        return time.monotonic() - began

    def overlapped_step(self) -> float:
        """The same right behind a publication."""
        self.send()
        seconds = self.step()
        self.publisher.wait()
        self.publisher.take_timings()
        return seconds

    def publish(self) -> Timing:
        """One publication, with nothing else going on."""
        self.send()
        self.publisher.wait()
        if events := [e for e in self.publisher.take_events() if e["event"] != "weights_joined"]:
            raise BenchError(f"a receiver failed: {events[0]}")
        t = self.publisher.take_timings()
        return Timing(*(t[f"sync/{n}_s"] for n in ("blocked", "total", "transfer", "pause")))

    def send(self) -> None:
        """Publish the next version."""
        from asyncrl.types import Version

        self._versions += 1
        self.publisher.publish(Version(1, self._versions))

    @contextlib.contextmanager
    def publishing(self, kinds: list[str], model: str) -> Iterator[Receivers]:
        """Receivers that stand ready to take versions."""
        from asyncrl.learner.publication.make import make_publisher
        from asyncrl.learner.publication.members import Members
        from asyncrl.roles import RoleSettings

        members = Members()
        receivers = Receivers(kinds, members.endpoint, model)
        settings = RoleSettings(
            role="learner", rank=0, world=1, model_path=model, device="cpu", threads=1,
            weight_backend="gloo", run_id="bench", hub_endpoint="", run_dir="",
        )  # fmt: skip
        try:
            receivers.wait(START_S)
            if not members.wait_for(len(kinds), REPLY_S):
                raise BenchError("the receivers have not announced themselves")
            policy = self.trainer.policy
            self.publisher: Any = make_publisher(
                policy.layout("bfloat16"), policy.shards, self.trainer.device, self.config,
                settings, members,
            )  # fmt: skip
            try:
                yield receivers
            finally:
                self.publisher.close()
        finally:
            receivers.end()
            members.close()


def measure(report: Report, given: argparse.Namespace) -> None:
    """One count of receivers after the other, its sides in turns."""
    from asyncrl import models
    from asyncrl.weights import TransferPlan

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    repeats = given.repeats or (2 if given.quick else 9)
    threads = given.threads or len(os.sched_getaffinity(0))
    model = str(models.resolve(MODEL))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        learner = Learner(model, threads)
        nbytes = TransferPlan(learner.trainer.policy.layout("bfloat16").params).nbytes
        report.note(f"{nbytes / 1e6:.0f} MB travel, {learner.shard_bytes / 1e6:.0f} MB of shards")
        report.row("receivers", "", "memcpy s", "blocked s", "raw s", "transfer s", "total s",
                   "step s", "overlapped s")  # fmt: skip
        for count in (1, 2, 4):
            kinds = ["engine"] if count == 1 else ["stand-in"] * count
            with learner.publishing(kinds, model) as receivers:
                one_count(report, learner, receivers, kinds, nbytes, repeats)
    finally:
        dist.destroy_process_group()


def one_count(
    report: Report, learner: Learner, receivers: Receivers, kinds: list[str], nbytes: int,
    repeats: int,
) -> None:  # fmt: skip
    """All sides for some receivers; the first repeat is warm-up."""
    count = len(kinds)
    raw = Raw(receivers, count, nbytes)
    sides: dict[str, Callable[[], Any]] = {
        "memcpy": learner.memcpy, "publish": learner.publish, "raw": raw,
        "step": learner.step, "overlapped step": learner.overlapped_step,
    }  # fmt: skip
    runs = {name: each[1:] for name, each in in_turns(sides, repeats + 1).items()}
    raw.close()
    add = partial(report.add, receivers=count, kind=kinds[0], bytes=nbytes)
    suffix = "" if count == 1 else f"_{count}"
    published: list[Timing] = runs["publish"]
    blocked, total = [t.blocked for t in published], [t.total for t in published]
    add(f"blocked_vs_memcpy{suffix}", ratios(blocked, runs["memcpy"]), "ratio", "lower",
        blocked_s=blocked, memcpy_s=runs["memcpy"], shard_bytes=learner.shard_bytes)  # fmt: skip
    add(f"total_vs_raw{suffix}", ratios(total, runs["raw"]), "ratio", "lower",
        total_s=total, raw_s=runs["raw"])  # fmt: skip
    transfer = [t.transfer for t in published]
    add(f"transfer_vs_raw{suffix}", ratios(transfer, runs["raw"]), "ratio", "lower")
    slower = ratios(runs["overlapped step"], runs["step"])
    add(f"overlapped_step{suffix}", slower, "ratio", "lower", step_s=runs["step"])
    medians = [runs["memcpy"], blocked, runs["raw"], transfer, total, runs["step"],
               runs["overlapped step"]]  # fmt: skip
    report.row(count, kinds[0], *(statistics.median(m) for m in medians))
    if kinds == ["engine"]:
        receivers.ask("load", IN_FLIGHT)
        receivers.ask("pauses")
        seen = [learner.publish().pause for _ in range(repeats)]
        (pauses,) = receivers.ask("pauses")
        receivers.ask("unload")
        report.add("pause_s", pauses, "s", "lower", in_flight=IN_FLIGHT, seen_by_learner_s=seen)


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument("--threads", type=int, metavar="N", help="of the learner (default: all cores)")
    return run_bench("weights", p, measure)


if __name__ == "__main__":
    sys.exit(main())
