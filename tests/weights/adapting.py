"""A learner of adapters with a real engine, and what that engine must show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.learning import LoraConfig
from asyncrl.types import Version
from tests.helpers.engines import EngineHost, publisher
from tests.helpers.ranks import one_rank
from tests.learner.policies import make_policy, randomise
from tests.weights.load import Load, check_logprobs, next_version


class AdapterLearner:
    """A policy over the engine's own model folder, of which the adapters alone travel."""

    def __init__(
        self, host: EngineHost, path: str, lora: LoraConfig, relays: Path | None = None
    ) -> None:
        self.host = host
        self.policy = make_policy(Path(path), lora=lora)
        assert self.policy.base_is_elsewhere()
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        """With what was published merged into it."""
        self.pub = publisher(
            [host], lambda: self.model, layout=self.policy.layout("float32", adapters=True),
            source=lambda: self.policy.shards(adapters=True), relays=relays,
        )  # fmt: skip

    @property
    def share(self) -> float:
        """What travels, of what would have to without adapters."""
        snapshot = self.pub._snapshot
        return snapshot.plan.nbytes / snapshot.load_bytes

    @torch.no_grad()
    def publish(self) -> Version:
        """Other adapters than ever before, as the engine's next version."""
        version = next_version(self.host)
        randomise(self.policy.trainable.policy.values(), seed=version.version, scale=0.2)
        parameters = dict(self.model.named_parameters())
        for name, value in self.policy.full_parameters(torch.float32):
            parameters[name].copy_(value)
        self.pub.publish(version)
        self.pub.wait()
        return version

    def check(self, publications: int) -> None:
        """Under load, after each publication the engine's numbers are the learner's."""
        load = Load(self.host, 4, 120)
        for _ in range(publications):
            load.wait_for_tokens(8)
            version = self.publish()
            assert self.pub.take_events() == []
            check_logprobs(self.host, self.model, version)
        assert len(load.stop()) >= 4
        snapshot = self.pub._snapshot
        assert self.pub.take_timings()["sync/bytes"] == snapshot.plan.nbytes
        assert snapshot.load_bytes == 4 * sum(p.numel() for p in self.model.parameters())

    def check_a_damaged_copy(self) -> None:
        """It is refused, and the same version comes again."""
        buckets = self.pub._snapshot.buckets

        def damaged() -> Iterator[torch.Tensor]:
            vars(self.pub._snapshot).pop("buckets")
            for bucket in buckets():
                sent = bucket.clone()
                sent.view(torch.uint8)[-1] ^= 1
                yield sent

        self.pub._snapshot.buckets = damaged  # type: ignore[method-assign]
        version = self.publish()
        assert [e["event"] for e in self.pub.take_events()] == ["weights_damaged"]
        check_logprobs(self.host, self.model, version)

    def check_a_joiner(self) -> None:
        """Who was not there for a publication gets it by itself."""
        self.host.silence()
        self.pub.members._standings.clear()  # as if that had been a while ago
        version = self.publish()
        assert self.host.engine.applied < version
        self.host.announce(self.pub.members.endpoint, "actor-0")
        assert self.pub.members.wait_for(1, 30)
        assert self.pub.finish(60.0) == []
        check_logprobs(self.host, self.model, version)
        assert [e["event"] for e in self.pub.take_events()] == ["weights_joined"]

    def check_without_the_base(self, path: str) -> None:
        """The engine goes on as it was, says what it lacks, and takes the version when it can."""
        before, model = self.host.engine.applied, copy.deepcopy(self.model)
        weights = Path(path) / "model.safetensors"
        away = weights.rename(weights.with_suffix(".away"))
        version = self.publish()
        (cut,) = self.pub.take_events()
        assert (cut["event"], cut["phase"]) == ("weights_cut_out", "receive")
        assert "does not hold the weights" in cut["reason"]
        check_logprobs(self.host, model, before)
        away.rename(weights)
        assert self.pub.finish(60.0) == []
        check_logprobs(self.host, self.model, version)
        self.pub.take_events()

    def close(self) -> None:
        self.pub.close()


@contextmanager
def adapter_learner(
    host: EngineHost, path: str, lora: LoraConfig, relays: Path | None = None
) -> Iterator[AdapterLearner]:
    """A learner of one rank, gone at the end."""
    with one_rank():
        learner = AdapterLearner(host, path, lora, relays)
        try:
            yield learner
        finally:
            learner.close()
