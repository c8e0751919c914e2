"""A critic with a model of its own: the policy's initial weights, a value head, its own shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from asyncrl.learner.policy.loading import decoder_layers
from asyncrl.learner.policy.logprobs import PackTensors
from asyncrl.learner.policy.packed import PackedCritic
from asyncrl.learner.policy.sharding import Sharder, reshard


class Critic:
    """V of the state before each token. Collective, as `Policy`.

    Args:
        model: a causal LM, not sharded; its head is dropped.
        sharder: shared with the policy.
        prepare: called with its decoder layers before they are sharded.
    """

    def __init__(
        self, model: Any, sharder: Sharder, prepare: Callable[[list[nn.Module]], None]
    ) -> None:
        self.module = PackedCritic(model)
        layers = decoder_layers(model)
        prepare(layers)
        sharder.shard(self.module, layers, in_float32=[self.module.value_head])

    def values(self, pack: PackTensors) -> Tensor:
        """Value [N] of the state before each token of the pack; differentiable."""
        values: Tensor = self.module(pack)
        return values

    def parameters(self) -> dict[str, nn.Parameter]:
        """What trains, by name."""
        return {f"critic.{n}": p for n, p in self.module.named_parameters() if p.requires_grad}

    def reshard(self) -> None:
        """See `Policy.reshard`."""
        reshard(self.module)
