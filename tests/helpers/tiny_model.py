"""Tiny random Hugging Face models and made-up batches for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.types import BatchPart, FinishReason, SampleHeader, SampleId, Trajectory, Version
from asyncrl.wire import pack_trajectory

VOCAB = 97
INITIAL = Version(0, 0)

_KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}


def save_tiny_model(folder: Path, kind: str = "llama", *, tied: bool = False, **extra: Any) -> Path:
    """Write a random model with grouped-query attention of some ten thousand parameters."""
    config_class, model_class = _KINDS[kind]
    settings: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        settings |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    else:
        settings |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "initializer_range": 0.3,
            "pad_token_id": 2,
        }
    torch.manual_seed(0)
    model_class(config_class(**(settings | extra))).save_pretrained(folder)
    return folder


def make_trajectory(
    rng: np.random.Generator,
    group: int,
    sample: int,
    prompt_ids: Sequence[int],
    response_tokens: int,
    *,
    reward: float = 0.0,
    version: Version = INITIAL,
    temperature: float = 1.0,
    behaviour: np.ndarray[Any, Any] | None = None,
    loss_mask: Sequence[int] | None = None,
) -> Trajectory:
    """A sample with random response tokens, all of one version."""
    n = response_tokens
    mask = np.ones(n, np.uint8) if loss_mask is None else np.array(loss_mask, np.uint8)
    mu = rng.normal(-4.5, 0.5, n) if behaviour is None else behaviour
    header = SampleHeader(
        id=SampleId("tiny", 0, group, sample),
        lease=group,
        actor="actor-0",
        prompt_tokens=len(prompt_ids),
        response_tokens=n,
        policy_tokens=int(mask.sum()),
        version_min=version,
        version_max=version,
        version_dispatch=version,
        version_finish=version,
        reward=reward,
        finish_reason=FinishReason.STOP,
        temperature=temperature,
    )
    return Trajectory(
        header=header,
        prompt_ids=np.array(prompt_ids, np.int32),
        response_ids=rng.integers(3, VOCAB, n).astype(np.int32),
        behaviour_logprobs=np.asarray(mu, np.float32),
        versions=np.full(n, version.version, np.int32),
        incarnations=np.full(n, version.incarnation, np.int32),
        loss_mask=mask,
    )


def make_batch(
    seed: int,
    groups: int,
    group_size: int,
    *,
    prefix: int = 0,
    prompt: tuple[int, int] = (3, 9),
    response: tuple[int, int] = (1, 12),
    **fields: Any,
) -> list[Trajectory]:
    """Groups with random lengths and 0/1 rewards; all prompts begin with `prefix` tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, prefix).tolist()
    out = []
    for g in range(groups):
        prompt_ids = common + rng.integers(3, VOCAB, rng.integers(*prompt)).tolist()
        for k in range(group_size):
            length = int(rng.integers(*response))
            reward = float(rng.integers(0, 2))
            out.append(make_trajectory(rng, g, k, prompt_ids, length, reward=reward, **fields))
    return out


def make_part(batch: Sequence[Trajectory], rank: int = 0, world: int = 1, k: int = 1) -> BatchPart:
    """A rank's part of the batch; rank 0 has most of it, so that the ranks' work differs."""
    mine = tuple(i for i in range(len(batch)) if max(0, i % 5 - 3) % world == rank)
    return BatchPart(
        batch=k,
        rank=rank,
        manifest=tuple(t.header for t in batch),
        mine=mine,
        envelopes=tuple(pack_trajectory(batch[i]) for i in mine),
        fresh=len(batch),
    )
