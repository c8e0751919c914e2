"""What is sharded as a whole: trunk and heads over one pack, inside the forward of FSDP's root.

    pack ─► trunk ─► hidden states of the predicting rows ─┬─► chunked head ─► log p, entropy
                                                           └─► value head   ─► values

The heads' weights are whole only there, hence no caller ever touches them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.learner.policy.attention import LAYOUT
from asyncrl.learner.policy.logprobs import PackTensors, head_spec, pack_scores, trunk_of


class Scores(NamedTuple):
    """What one forward pass says of a pack's tokens; [N] each, float32."""

    logprobs: Tensor
    """log pi of the token, in nats, at its sampling temperature."""
    entropy: Tensor
    """Of the distribution that the token was drawn from."""
    values: Tensor | None
    """Value of the state before the token, whatever the temperature; None without a value head."""


class ValueHead(nn.Linear):
    """[R, H] -> [R, 1]: one number for each hidden state; 0 until it is trained.

    Sharding keeps it in float32 and casts the hidden states to that.
    """

    def __init__(self, hidden: int):
        super().__init__(hidden, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PackedPolicy(nn.Module):
    """A Hugging Face causal LM over packs, with an optional value head on its last hidden state."""

    def __init__(self, model: Any, *, value_head: bool = False):
        super().__init__()
        self.model = model
        self.value_head = ValueHead(hidden_size(model)) if value_head else None

    def forward(
        self, pack: PackTensors, *, values: bool = False, detach_trunk: bool = False
    ) -> Scores:
        """See `Policy.score`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_trunk):
            logprobs, entropy, hidden = pack_scores(
                trunk_of(self.model), head_spec(self.model), pack
            )
        if not values:
            return Scores(logprobs, entropy, None)
        assert self.value_head is not None, "no value head: the estimator needs no critic"
        return Scores(logprobs, entropy, self.value_head(hidden)[:, 0][pack.row])


class PackedCritic(nn.Module):
    """A trunk of its own with a value head; the causal LM's other head is dropped."""

    def __init__(self, model: Any):
        super().__init__()
        self.trunk = trunk_of(model)
        self.value_head = ValueHead(hidden_size(model))

    def forward(self, pack: PackTensors) -> Tensor:
        """Values [N]; see `Critic.values`."""
        output = self.trunk(
            input_ids=pack.input_ids[None],
            position_ids=pack.position_ids[None],
            use_cache=False,
            **{LAYOUT: pack.layout},
        )
        hidden = output.last_hidden_state[0].index_select(0, pack.rows)
        values: Tensor = self.value_head(hidden)[:, 0][pack.row]
        return values


def hidden_size(model: Any) -> int:
    """H of a Hugging Face model."""
    return int(model.config.get_text_config().hidden_size)
