"""Policies over tiny models, plain Hugging Face passes to compare with, and the two-rank case.

Run by test_model.py as a process per rank, with arguments RANK STORE MODEL OUT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.learning import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
)
from asyncrl.learner.packing import Pack, dummy_pack, make_packs
from asyncrl.learner.policy.logprobs import PackTensors
from asyncrl.learner.policy.model import Policy
from asyncrl.learner.policy.optim import apply_gradient, make_optimizer
from asyncrl.types import Trajectory
from tests.helpers.ranks import rank_of_two
from tests.helpers.tiny_model import make_batch

CPU = torch.device("cpu")
GAE = AdvantageConfig(estimator="gae")
LORA = LoraConfig(rank=4)


def make_policy(
    model: Path,
    *,
    dtype: torch.dtype = torch.float32,
    world: int = 1,
    seed: int = 0,
    **learner: Any,
) -> Policy:
    torch.manual_seed(seed)
    config = LearnerConfig(**learner)
    return Policy(model, world=world, device=CPU, dtype=dtype, learner=config)


def one_pack(batch: list[Trajectory], share: bool = True) -> tuple[Pack, PackTensors]:
    (pack,) = make_packs(batch, range(len(batch)), 4096, share)
    return pack, PackTensors.of(pack, CPU)


def randomise(parameters: Any, seed: int = 1, scale: float = 0.05) -> None:
    """As if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            local = p.to_local()
            local.copy_(torch.randn(local.shape, generator=generator) * scale)


def plain_scores(
    model: Any, batch: list[Trajectory], pack: Pack
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy, and hidden state before each token, by one pass per sample."""
    logprobs, entropy, hidden = [], [], []
    for i, o in zip(pack.sample.tolist(), pack.offset.tolist(), strict=True):
        t = batch[i]
        ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        at = len(t.prompt_ids) + o - 1
        row = torch.log_softmax(out.logits[0, at] / t.header.temperature, -1)
        logprobs.append(row[int(t.response_ids[o])])
        entropy.append(-(row.exp() * row).sum())
        hidden.append(out.hidden_states[-1][0, at])
    return torch.stack(logprobs), torch.stack(entropy), torch.stack(hidden)


CASES: dict[str, dict[str, Any]] = {
    "full": {"kl": KLConfig(coefficient=0.1)},
    "value head": {"advantage": GAE, "gradient_checkpointing": True},
    "warm-up": {"advantage": GAE},
    "own critic": {"advantage": GAE, "critic": CriticConfig(trunk="own")},
    "adapters": {"lora": LORA, "advantage": GAE, "kl": KLConfig(coefficient=0.1)},
    "offload": {"cpu_offload": True},
}
"""What must not depend on the number of ranks."""


def train_once(model: Path, case: str, rank: int, world: int) -> dict[str, np.ndarray[Any, Any]]:
    """One optimizer step on packs of which rank 0 has most; gradients, weights and reference."""
    optim = OptimConfig(lr=1e-2, eps=1e-3)
    policy = make_policy(model, world=world, seed=3, optim=optim, **CASES[case])
    optimizer = make_optimizer(policy, LearnerConfig(optim=optim))
    batch = make_batch(5, groups=4, group_size=2, prefix=9)
    packs = make_packs(batch, range(8), 40, share_prompt=True)
    mine = packs[-1:] if rank else packs[: len(packs) - (world > 1)]
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for number in range(len(packs)):
        pack = mine[number] if number < len(mine) else dummy_pack()
        tensors = PackTensors.of(pack, CPU)
        weight = torch.from_numpy(np.cos(pack.sample + 0.3 * pack.offset)).float()
        values = "gae" in str(CASES[case]) and policy.critic is None
        with torch.no_grad():
            policy.score(tensors, values=values)
        if "kl" in CASES[case]:
            reference = policy.reference(tensors).numpy()
            arrays |= {f"reference/{k}": v for k, v in _by_token(pack, reference).items()}
        scores = policy.score(tensors, values=values, detach_trunk=case == "warm-up")
        loss = (weight * scores.logprobs).sum() + 0.1 * (weight * scores.entropy).sum()
        given = scores.values if policy.critic is None else policy.critic.values(tensors)
        if given is not None:
            loss = loss + (weight - given).square().sum()
        (loss * world / 8).backward()  # type: ignore[no-untyped-call]
    for name, p in {**policy.trainable.policy, **policy.trainable.critic}.items():
        assert (p.grad is None) == (case == "warm-up" and name in policy.trainable.policy), name
        if p.grad is not None:
            arrays[f"grad/{name}"] = p.grad.full_tensor().numpy().copy()  # type: ignore[attr-defined]
    arrays["norm"] = np.array(apply_gradient(optimizer, 1.0, 0.5).grad_norm)
    for name, value in policy.full_parameters(torch.float32):
        arrays[f"full/{name}"] = value.numpy().copy()
    for name, p in {**policy.trainable.policy, **policy.trainable.critic}.items():
        arrays[f"param/{name}"] = p.full_tensor().detach().numpy().copy()  # type: ignore[attr-defined]
    return arrays


def _by_token(pack: Pack, values: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    tokens = zip(pack.sample, pack.offset, values, strict=True)
    return {f"{s}.{o}": np.array(v) for s, o, v in tokens}


def main() -> None:
    with rank_of_two() as (rank, (model, out)):
        for number, case in enumerate(CASES):
            np.savez(f"{out}.{number}.{rank}.npz", **train_once(Path(model), case, rank, 2))
