"""A whole, unsharded Hugging Face model whose attention reads packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner.packing import Pack
from asyncrl.learner.policy.attention import NAME
from asyncrl.learner.policy.logprobs import PackTensors, head_spec, pack_scores, trunk_of

CPU = torch.device("cpu")


def load_packed(folder: Path, name: str = NAME) -> Any:
    """The model of a folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=name
    )
    return model.eval()


def scores_of(model: Any, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [N] of a pack's tokens."""
    tensors = PackTensors.of(pack, model.device)
    logprobs, entropy, hidden = pack_scores(trunk_of(model), head_spec(model), tensors)
    assert hidden.shape == (len(pack.rows), model.config.hidden_size)
    return logprobs, entropy
