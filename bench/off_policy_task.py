"""The task of bench/off_policy.py, the model that learns it, and its sampler.

    prompt  [BOS, step d, digit s]     response  y_1 .. y_T, T from 4 to 12
    reward  share of the y_t that are y_{t-1} + d modulo 10, where y_0 = s

Dense, and far from solved at the start: the model has seen the rule with RIGHT of the steps right,
as a pretrained model has seen a task. Behaviour log-probabilities are those of the very
distribution that was sampled, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from learner_batch import make_trajectory
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.types import Trajectory, Version

DIGITS = 10
STEPS = (1, 2, 3, 4)
"""d; token DIGITS + d - 1."""
BOS = DIGITS + len(STEPS)
VOCAB = BOS + 2
SHORTEST, LONGEST = 4, 12
RIGHT = 0.15
"""Share of right steps in what the model saw before; chance is one in VOCAB."""
_SHOWN_STEPS, _SHOWN_BATCH, _SHOWN_LR = 300, 64, 3e-3
Ints = npt.NDArray[np.int64]


def make_model(folder: Path) -> None:
    """Write the model that every run starts from; always the same."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=32,
            tie_word_embeddings=False, bos_token_id=BOS, eos_token_id=BOS + 1,
            pad_token_id=BOS + 1, dtype="float32",
        )
    )  # fmt: skip
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_SHOWN_LR)
    for _ in range(_SHOWN_STEPS):
        ids = torch.from_numpy(_shown(rng))
        logits = model(input_ids=ids).logits[:, 2:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 3:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _shown(rng: np.random.Generator) -> Ints:
    """Sequences [_SHOWN_BATCH, 3 + LONGEST] whose steps are right with probability RIGHT."""
    ids = np.zeros((_SHOWN_BATCH, 3 + LONGEST), np.int64)
    ids[:, :3] = make_prompts(rng, _SHOWN_BATCH)
    for t in range(3, ids.shape[1]):
        right = (ids[:, t - 1] + ids[:, 1] - DIGITS + 1) % DIGITS
        other = rng.integers(0, DIGITS, _SHOWN_BATCH)
        ids[:, t] = np.where(rng.random(_SHOWN_BATCH) < RIGHT, right, other)
    return ids


def make_prompts(rng: np.random.Generator, count: int) -> Ints:
    """[count, 3] token ids."""
    step = DIGITS + rng.integers(0, len(STEPS), count)
    digit = rng.integers(0, DIGITS, count)
    return np.stack([np.full(count, BOS), step, digit], axis=1)


def rewards(prompts: Ints, responses: Ints, lengths: Ints) -> npt.NDArray[np.float64]:
    """Share of right steps among the first `lengths` [B] tokens of `responses` [B, T].

    >>> rewards(np.array([[14, 11, 3]]), np.array([[5, 7, 8, 0]]), np.array([4])).tolist()
    [0.75]
    """
    before = np.concatenate([prompts[:, 2:3], responses[:, :-1]], axis=1)
    step = prompts[:, 1:2] - DIGITS + 1
    right = (before < DIGITS) & (responses == (before + step) % DIGITS)
    counted = np.arange(responses.shape[1]) < lengths[:, None]
    return (right & counted).sum(1) / lengths  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Responses [B, LONGEST], of which the first `lengths` [B] tokens count."""

    prompts: Ints
    responses: Ints
    logprobs: npt.NDArray[np.float32]
    lengths: Ints
    rewards: npt.NDArray[np.float64]

    def trajectories(self, group_size: int, first: int, version: Version) -> list[Trajectory]:
        """As the learner gets them; groups are numbered from `first`."""
        out = []
        for i, n in enumerate(self.lengths):
            out.append(
                make_trajectory(
                    first + i // group_size, i % group_size, self.prompts[i],
                    self.responses[i, :n], self.logprobs[i, :n], float(self.rewards[i]), version,
                )
            )  # fmt: skip
        return out


class BrokenPolicy(Exception):
    """A policy whose log-probabilities are not finite."""


class Sampler:
    """Samples from any weights of the model, as a batch."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from these from now on."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])

    def sample(self, groups: int, group_size: int) -> Sampled:
        """`group_size` responses to each of `groups` new prompts, at temperature 1.

        Raises:
            BrokenPolicy: there is nothing to sample from.
        """
        prompts = np.repeat(make_prompts(self._rng, groups), group_size, axis=0)
        lengths = np.repeat(self._rng.integers(SHORTEST, LONGEST + 1, groups), group_size)
        tokens, logprobs = self._responses(torch.from_numpy(prompts))
        responses = tokens.numpy()
        return Sampled(
            prompts, responses, logprobs.numpy(), lengths, rewards(prompts, responses, lengths)
        )

    @torch.inference_mode()
    def _responses(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, both [B, LONGEST]."""
        cache, ids, tokens, chosen = None, prompts, [], []
        for _ in range(LONGEST):
            output = self._model(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1], dim=-1)
            if not bool(logprobs.isfinite().all()):
                raise BrokenPolicy
            ids = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            tokens.append(ids)
            chosen.append(logprobs.gather(1, ids))
        return torch.cat(tokens, 1), torch.cat(chosen, 1)
