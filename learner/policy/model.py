"""The policy and what is kept beside it: reference, critic, adapters; sharded over the ranks.

    folder ─► causal LM (float32) ─┬─► [adapters] ─► PackedPolicy [+ value head] ─► FSDP2
                                   ├─► reference: frozen, in the compute type
                                   └─► critic of its own: trunk + value head

Each is loaded on its own, and only where the configuration asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.learning import LearnerConfig
from asyncrl.learner.collectives import sum_over_ranks
from asyncrl.learner.layout import Layout
from asyncrl.learner.policy.critic import Critic
from asyncrl.learner.policy.export import write_hf
from asyncrl.learner.policy.loading import (
    cast_frozen,
    checkpoint_layers,
    decoder_layers,
    holds_plainly,
    load_causal_lm,
    set_attention,
)
from asyncrl.learner.policy.logprobs import PackTensors, check_head
from asyncrl.learner.policy.lora import add_adapters, hf_parameters, merged, without_adapters
from asyncrl.learner.policy.optim import Trainable
from asyncrl.learner.policy.packed import PackedPolicy, Scores
from asyncrl.learner.policy.sharding import Sharder, compile_layers, reshard, whole
from asyncrl.learner.policy.shards import (
    adapter_layout,
    adapter_shards,
    layout_of,
    shards_of,
)
from asyncrl.model_store.tensors import fingerprint


class Policy:
    """The model being trained. All methods are collective: every rank calls them alike.

    Weights that train are float32 (all of them; with LoRA the adapters), frozen ones are kept in
    the compute type, gradients are float32. Adapters are drawn from torch's default generator,
    which the caller seeds alike on every rank.

    Args:
        path: folder of the Hugging Face model.
        world: ranks that share its shards; their process group must stand.
        device: where this rank computes.
        dtype: compute type of forward and backward.
        learner: what to build; the sections `lora`, `critic`, `kl` and `advantage`, and how to
            compute.
        trust_remote_code: run code that the folder ships.

    Raises:
        ModelError: no model there, or one that cannot be trained as asked.
        MissingExtraError: LoRA without peft.
    """

    critic: Critic | None
    """Set when the configuration asks for values from a model of their own."""

    def __init__(
        self,
        path: str | Path,
        *,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
        learner: LearnerConfig,
        trust_remote_code: bool = False,
    ):
        self.path = Path(path)
        self.trust_remote_code = trust_remote_code
        self._learner, self._device = learner, device
        self._sharder = Sharder(world, device, dtype, cpu_offload=learner.cpu_offload)
        lora = learner.lora.rank is not None
        needs_values = learner.advantage.critic
        shared = needs_values and learner.critic.trunk == "shared"
        model = self._load(train=True, check=True)
        self.generation_config = model.generation_config
        self.module = PackedPolicy(model, value_head=shared)
        heads = [] if self.module.value_head is None else [self.module.value_head]
        self._shard(self.module, in_float32=heads)
        self.critic = None
        if needs_values and not shared:
            self.critic = Critic(self._load(train=True), self._sharder, self._prepare)
        self._reference = None
        if learner.kl.coefficient and not lora:
            self._reference = PackedPolicy(self._load(train=False))
            self._shard(self._reference, frozen=True)

    def score(
        self, pack: PackTensors, *, values: bool = False, detach_trunk: bool = False
    ) -> Scores:
        """Log-probability, entropy and, if asked for, value of each token of a pack.

        Differentiable under grad mode.

        Args:
            pack: on this rank's device; a dummy one keeps step with the other ranks.
            values: also the values of the shared trunk's head.
            detach_trunk: nothing of the policy gets a gradient, only the value head does (while a
                critic warms up).
        """
        scores: Scores = self.module(pack, values=values, detach_trunk=detach_trunk)
        return scores

    @torch.no_grad()
    def reference(self, pack: PackTensors) -> Tensor:
        """Log-probability [N] of each token under the model that the run started from.

        With LoRA that is the policy without its adapters, else a frozen copy in the compute type.
        """
        if self._reference is not None:
            copied: Tensor = self._reference(pack).logprobs
            return copied
        with without_adapters(self.module.model):
            return self.score(pack).logprobs

    @property
    def trainable(self) -> Trainable:
        """The sharded parameters that train, by name; adapters and heads under their own names."""
        self.reshard()
        policy = {n: p for n, p in self.module.model.named_parameters() if p.requires_grad}
        if self.module.value_head is None:
            return Trainable(policy, {} if self.critic is None else self.critic.parameters())
        head = self.module.value_head.named_parameters(prefix="value_head")
        return Trainable(policy, dict(head))

    def full_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of the policy whole, under its Hugging Face name, in `dtype`; tied ones
        once, adapters merged, no value head.

        A collective per parameter: every rank must iterate to the end. A tensor may share memory
        with the parameter: copy what must outlive the next step.
        """
        self.reshard()
        for name, parameter, adapted in hf_parameters(self.module.model):
            if adapted is None:
                yield name, whole(parameter, dtype)
            else:
                yield name, merged(parameter, adapted, dtype)

    def base_is_elsewhere(self) -> bool:
        """Whether adapters alone train and all else can be read from the model's folder, on every
        rank: engines, which started from it, then need nothing but the adapters.
        """
        if self._learner.lora.rank is None:
            return False
        parameters = hf_parameters(self.module.model)
        here = holds_plainly(self.path, {n: tuple(p.shape) for n, p, _ in parameters})
        return bool(sum_over_ranks(np.array([int(not here)]), self._device)[0] == 0)

    def layout(self, dtype: str, *, adapters: bool = False) -> Layout:
        """How the parameters lie on the ranks, and travel, in `dtype`, as `full_parameters`.

        `adapters`: what trains alone, since `base_is_elsewhere`.
        """
        self.reshard()
        held = hf_parameters(self.module.model)
        if adapters:
            return adapter_layout(held, dtype, fingerprint(self.path))
        return layout_of(held, dtype)

    def shards(self, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of each part of the layout; no collective, unlike all else here.

        They share memory with the parameters: copy what must outlive the next step.
        """
        self.reshard()
        held = hf_parameters(self.module.model)
        yield from adapter_shards(held) if adapters else shards_of(held)

    def save_hf(
        self, folder: str | Path, dtype: torch.dtype = torch.float32, *, replace: bool = False
    ) -> None:
        """Write an ordinary Hugging Face folder, with the tokenizer; rank 0 writes.

        Under a temporary name beside it, renamed when whole: `folder` never is half a model. With
        `replace` it may hold an older one.

        Raises:
            OSError: the disk failed, or `folder` exists and is not empty.
        """
        write = dist.get_rank() == 0
        state = {}
        for name, value in self.full_parameters(dtype):
            if write:
                state[name] = value.cpu()
        if write:
            write_hf(
                Path(folder), self._skeleton(dtype), self.path, state=state,
                trust_remote_code=self.trust_remote_code, replace=replace,
            )  # fmt: skip

    def reshard(self) -> None:
        """Put the shards back in the place of gathered copies, as a backward pass does.

        After passes without gradient: it frees memory, and no stale copy outlives an optimizer
        step.
        """
        reshard(self.module)
        if self._reference is not None:
            reshard(self._reference)
        if self.critic is not None:
            self.critic.reshard()

    def _load(self, *, train: bool, check: bool = False) -> Any:
        """The folder's model, ready to be sharded."""
        learner, dtype = self._learner, self._sharder.dtype
        model = load_causal_lm(self.path, trust_remote_code=self.trust_remote_code)
        if check:
            check_head(model)
        set_attention(model, learner.attention, self._device, dtype)
        if not train:
            model.requires_grad_(False)
        elif learner.lora.rank is not None:
            add_adapters(model, learner.lora)
        cast_frozen(model, dtype)
        if train and learner.gradient_checkpointing:
            checkpoint_layers(model)
        return model

    def _prepare(self, layers: list[nn.Module]) -> None:
        if self._learner.compile:
            compile_layers(layers)

    def _shard(
        self, packed: PackedPolicy, *, in_float32: list[Any] | None = None, frozen: bool = False
    ) -> None:
        layers = decoder_layers(packed.model)
        self._prepare(layers)
        self._sharder.shard(packed, layers, in_float32=in_float32 or [], frozen=frozen)

    def _skeleton(self, dtype: torch.dtype) -> Any:
        """The model without weights, which knows how to save them."""
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=self.trust_remote_code
            )
        skeleton.generation_config = self.generation_config
        return skeleton
