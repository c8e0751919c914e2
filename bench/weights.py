"""What a publication costs the learner and the actors: SmolLM2-135M in bfloat16 to 1, 2 and 4.

    learner (this process)  publish ──gloo──► 1 vLLM engine, or 2 or 4 stand-ins   ─┐ in turns
    memcpy                  the learner's float32 shards into other memory           │
    raw                     the same bytes by one bare gloo broadcast, and a barrier │
    relay                   publish ──gloo──► a relay ──shared memory──► the engine  │
    disk                    safetensors written, reloaded by vLLM itself            ─┘
    step                    one training step, alone and while a publication travels

A stand-in receives as an engine does, checksums included, and loads by copying. Relay and disk are
measured with the engine alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import BenchError, Report, in_turns, parser, ratios, run_bench
from learner_batch import Workload, make_part, make_samples
from weights_peers import REPLY_S, Raw, Receivers, Relayed, Timing
from weights_receiver import TIMEOUT_S

MODEL = "smollm2-135m"
START_S = 400.0
IN_FLIGHT = 4
"""Requests of the engine while its pause is measured."""
WORKLOAD = Workload(groups=2, group_size=4, longest=64)


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
        began = time.monotonic()
        self.send()
        self.publisher.wait()
        wall = time.monotonic() - began
        if events := [e for e in self.publisher.take_events() if e["event"] != "weights_joined"]:
            raise BenchError(f"a receiver failed: {events[0]}")
        t = self.publisher.take_timings()
        return Timing(*(t[f"sync/{n}_s"] for n in ("blocked", "total", "transfer", "pause")), wall)

    def relay(self) -> Relayed:
        """One publication to the relay, until the engine runs it."""
        began = time.monotonic()
        version = self.send(self.relayed)
        self.receivers.ask("applied", version)
        wall = time.monotonic() - began
        self.relayed.wait()
        if events := [e for e in self.relayed.take_events() if e["event"] != "weights_joined"]:
            raise BenchError(f"the relay failed: {events[0]}")
        t = self.relayed.take_timings()
        return Relayed(wall, t["sync/total_s"], t["sync/transfer_s"])

    def disk(self) -> float:
        """Seconds of writing the weights to files and loading them by vLLM's own reload."""
        from safetensors.torch import save_file

        began = time.monotonic()
        weights = dict(self.trainer.policy.full_parameters(torch.bfloat16))
        save_file(weights, self.folder / "model.safetensors")
        self._versions += 1
        self.receivers.ask("reload", str(self.folder), self._versions)
        return time.monotonic() - began

    def send(self, publisher: Any = None) -> Any:
        """Publish the next version, by default to all receivers."""
        from asyncrl.types import Version

        self._versions += 1
        version = Version(1, self._versions)
        (publisher or self.publisher).publish(version)
        return version

    @contextlib.contextmanager
    def publishing(self, kinds: list[str], model: str) -> Iterator[Receivers]:
        """Receivers that stand ready to take versions; an engine has a relay as well."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            self.folder, offer = Path(folder), f"{folder}/relay-0.json"
            for name in ("config.json", "tokenizer.json"):
                if (Path(model) / name).exists():
                    (self.folder / name).symlink_to(Path(model) / name)
            self.receivers, self.publisher = stack.enter_context(
                self._peers(kinds, model, offer, "broadcast")
            )
            if kinds == ["engine"]:
                _, self.relayed = stack.enter_context(self._peers(["relay"], model, offer, "relay"))
            yield self.receivers

    @contextlib.contextmanager
    def _peers(
        self, kinds: list[str], model: str, offer: str, strategy: str
    ) -> Iterator[tuple[Receivers, Any]]:
        """Processes and the publisher that sends to them."""
        from asyncrl.learner.publication.make import make_publisher
        from asyncrl.learner.publication.members import Members
        from asyncrl.roles import RoleSettings

        members = Members()
        receivers = Receivers(kinds, members.endpoint, model, offer)
        settings = RoleSettings(
            role="learner", rank=0, world=1, model_path=model, device="cpu", threads=1,
            weight_backend="gloo", run_id="bench", hub_endpoint="", run_dir="",
        )  # fmt: skip
        weights = self.config.weights.model_copy(update={"strategy": strategy})
        try:
            receivers.wait(START_S)
            if not members.wait_for(len(kinds), REPLY_S):
                raise BenchError("the receivers have not announced themselves")
            policy = self.trainer.policy
            publisher: Any = make_publisher(
                policy.layout("bfloat16"), policy.shards, self.trainer.device,
                self.config.model_copy(update={"weights": weights}), settings, members,
            )  # fmt: skip
            try:
                yield receivers, publisher
            finally:
                publisher.close()
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
        for count in given.receivers:
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
    if kinds == ["engine"]:
        sides |= {"relay": learner.relay, "disk": learner.disk}
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
        relayed: list[Relayed] = runs["relay"]
        wall, relay = [t.wall for t in published], [t.wall for t in relayed]
        add("relay_vs_gloo", ratios(relay, wall), "ratio", "lower", relay_s=relay, gloo_s=wall)
        offered = [t.total for t in relayed]
        add("relay_total_vs_raw", ratios(offered, runs["raw"]), "ratio", "lower", total_s=offered)
        carried = [t.transfer for t in relayed]
        add("relay_transfer_vs_raw", ratios(carried, runs["raw"]), "ratio", "lower")
        add("relay_vs_disk", ratios(relay, runs["disk"]), "ratio", "lower",
            disk_s=runs["disk"])  # fmt: skip
        add("gloo_vs_disk", ratios(wall, runs["disk"]), "ratio", "lower")
        pauses_under_load(report, learner, receivers, repeats)


def pauses_under_load(
    report: Report, learner: Learner, receivers: Receivers, repeats: int
) -> None:  # fmt: skip
    """For how long an engine with requests stands still, by broadcast and by relay."""
    receivers.ask("load", IN_FLIGHT)
    receivers.ask("pauses")
    seen = [learner.publish().pause for _ in range(repeats)]
    (broadcast,) = receivers.ask("pauses")
    for _ in range(repeats):
        learner.relay()
    (relay,) = receivers.ask("pauses")
    receivers.ask("unload")
    report.add("pause_s", [p for p, _ in broadcast], "s", "lower", in_flight=IN_FLIGHT,
               load_s=[load for _, load in broadcast], seen_by_learner_s=seen)  # fmt: skip
    report.add("relay_pause_s", [p for p, _ in relay], "s", "lower", in_flight=IN_FLIGHT,
               load_s=[load for _, load in relay])  # fmt: skip
    report.add("relay_pause_over_load_s", [p - load for p, load in relay], "s", "lower",
               in_flight=IN_FLIGHT)  # fmt: skip


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument("--threads", type=int, metavar="N", help="of the learner (default: all cores)")
    p.add_argument(
        "--receivers", type=int, nargs="+", default=[1, 2, 4], metavar="N",
        help="one count after the other; 1 is an engine, and has relay and disk (default: 1 2 4)",
    )  # fmt: skip
    return run_bench("weights", p, measure)


if __name__ == "__main__":
    sys.exit(main())
