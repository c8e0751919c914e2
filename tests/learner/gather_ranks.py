"""A process per rank for test_gather.py.

Arguments: RANK STORE equal MODEL...
or: RANK STORE broken VICTIM SIGNAL

`equal`: each model, with and without adapters, is published twice while training goes on; rank 0
compares what came together, or what an engine makes of adapters that came alone, with
`full_parameters` at that moment.
`broken`: VICTIM gets the signal in the middle of a gather; the other prints what `wait` says.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from asyncrl.actors.loading import Base, merged
from asyncrl.adapters import A, B
from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout, Part
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.publish import BroadcastPublisher
from asyncrl.learner.publication.shard_publisher import ShardPublisher
from asyncrl.types import Version
from asyncrl.weights import ParamSpec
from tests.helpers.ranks import rank_of_two

CPU = torch.device("cpu")
BUCKET_BYTES = 1 << 10
"""Smaller than the larger shards: these travel in pieces."""
CASES: dict[str, list[tuple[int | None, str, bool]]] = {
    "qwen3": [(None, "float32", False), (1, "bfloat16", True)],
    "llama": [(None, "bfloat16", False), (3, "float32", False), (3, "float32", True)],
    "gpt2": [(3, "bfloat16", False), (3, "bfloat16", True)],
}
"""Adapters' rank, wire type and whether adapters travel alone, by model. With adapters what is
frozen is bfloat16, in the model's file it is float32."""
BROKEN_S = 6.0
"""Deadline of the gather that breaks."""

Publisher = BroadcastPublisher | ShardPublisher


def make_publisher(members: Members | None, gather: Gather, layout: Layout, source: Any) -> Any:
    if members is None:
        return ShardPublisher(source=source, layout=layout, gather=gather, pinned=False)
    return BroadcastPublisher(
        members, source=source, layout=layout, gather=gather, backend="gloo", device=CPU,
        timeout_s=60.0,
    )  # fmt: skip


# --- equal ------------------------------------------------------------------------------------


class Held:
    """A gather that begins only when the gate is opened."""

    def __init__(self, gather: Gather) -> None:
        self.gate = threading.Event()
        self._gather = gather
        self._run = gather.run
        gather.run = self.run  # type: ignore[method-assign]

    def run(self, *given: Any) -> None:
        assert self.gate.wait(120)
        self._run(*given)

    def release(self) -> None:
        self._gather.run = self._run  # type: ignore[method-assign]


def check_case(
    model: Path, case: tuple[int | None, str, bool], gather: Gather, members: Members | None
) -> None:
    """Publish, train while one rank has begun to gather and the other has not, compare."""
    from asyncrl.config.learning import LoraConfig
    from tests.learner.policies import make_policy, randomise

    lora, dtype, alone = case
    compute = torch.bfloat16 if lora else torch.float32
    policy = make_policy(model, world=gather.world, dtype=compute, lora=LoraConfig(rank=lora))
    wire = getattr(torch, dtype)
    layout = policy.layout(dtype, adapters=alone)
    publisher = make_publisher(members, gather, layout, lambda: policy.shards(adapters=alone))
    assert policy.base_is_elsewhere() == (lora is not None)
    seen = []
    for number in (1, 2):
        held = Held(gather)
        if gather.rank == number % 2:  # each rank is once the one that others wait for
            held.gate.set()
        # Something other than zero for B, another one for each rank.
        randomise(policy.trainable.policy.values(), seed=10 * number + gather.rank)
        want = {n: p.clone() for n, p in policy.full_parameters(wire)}
        publisher.publish(Version(0, number))
        train(policy)
        now = {n: p.clone() for n, p in policy.full_parameters(wire)}
        held.gate.set()
        publisher.wait()
        held.release()
        assert any(not torch.equal(now[n], want[n]) for n in want), "training changed nothing"
        if isinstance(publisher, BroadcastPublisher):
            got = dict(publisher._snapshot.tensors())
            if alone:
                assert layout.adapters is not None
                assert all(name.endswith((A, B)) for name in got)
                got = dict(merged(Base(model), got, layout.adapters, want))
            assert list(got) == list(want), case
            for name, tensor in got.items():
                assert tensor.dtype == wire
                assert torch.equal(tensor, want[name]), f"{model.name} {case} {number}: {name}"
            seen.append(publisher._snapshot.checksums)
            timings = publisher.take_timings()
            assert timings["sync/gather_s"] > 0
            assert timings["sync/blocked_s"] < timings["sync/total_s"]
    assert len({tuple(s) for s in seen}) == len(seen), case
    publisher.close()


def train(policy: Any) -> None:
    """An optimizer step: collectives of the default group, beside the gather."""
    from asyncrl.config.learning import LearnerConfig, OptimConfig
    from asyncrl.learner.policy.optim import apply_gradient, make_optimizer
    from tests.helpers.tiny_model import make_batch
    from tests.learner.policies import one_pack

    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    policy.score(tensors).logprobs.sum().backward()
    apply_gradient(make_optimizer(policy, LearnerConfig(optim=OptimConfig(lr=0.1))), 1.0, None)


def equal(rank: int, world: int, models: list[str]) -> None:
    gather = Gather(
        rank=rank, world=world, timeout_s=120.0, patience_s=1.0, bucket_bytes=BUCKET_BYTES
    )
    for model in models:
        for case in CASES[Path(model).name]:
            members = Members() if rank == 0 else None
            check_case(Path(model), case, gather, members)
            if members is not None:
                members.close()


# --- broken -----------------------------------------------------------------------------------


def broken(rank: int, world: int, victim: int, how: signal.Signals) -> None:
    specs = [ParamSpec(f"w{i}", "float32", (64, 64)) for i in range(8)]
    layout = Layout(tuple(specs), tuple(Part(s, sharded=True) for s in specs), {})
    gather = Gather(
        rank=rank, world=world, timeout_s=BROKEN_S, patience_s=0.5, bucket_bytes=BUCKET_BYTES
    )
    if rank == victim:
        buckets = gather._buckets

        def end_midway(pieces: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
            for number, bucket in enumerate(buckets(pieces)):
                if number == 5:
                    os.kill(os.getpid(), how)
                yield bucket

        gather._buckets = end_midway  # type: ignore[method-assign]
    members = Members() if rank == 0 else None
    rows = torch.full((64 // world, 64), float(rank))
    publisher = make_publisher(members, gather, layout, lambda: [(s.name, rows) for s in specs])
    began = time.monotonic()
    publisher.publish(Version(0, 1))
    said = []
    for ask in (publisher.wait, lambda: publisher.publish(Version(0, 2))):
        try:
            ask()
        except WeightSyncError as e:
            said.append(str(e))
    print(f"{time.monotonic() - began:.1f}\n" + "\n".join(said), flush=True)
    publisher.close()
    if members is not None:
        members.close()


def main() -> None:
    with rank_of_two() as (rank, (what, *rest)):
        if what == "equal":
            equal(rank, 2, rest)
        else:
            broken(rank, 2, int(rest[0]), signal.Signals(int(rest[1])))
