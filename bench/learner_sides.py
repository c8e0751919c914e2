"""The sides of bench/learner.py, each a process of its own that prints one line of JSON.

    python learner_sides.py SIDE SPEC_JSON

asyncrl is the real Trainer. padded is the ordinary loop: one right-padded batch, micro-batches of
as many of its rows as fit the budget, the model's logits, log_softmax over the vocabulary in
float32, the same loss, AdamW. trimmed is the same with every micro-batch cut to its longest row.
trl is in learner_trl.py. `prepare` makes the log-probabilities of the behaviour policy.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from learner_batch import Workload, make_part, make_samples
from learner_meter import Meter

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.types import INITIAL, Trajectory

NOISE = 0.1
"""Standard deviation of log mu around the model's own log-probability: weights near 1, not 1."""
LR = 1e-6


@dataclass(frozen=True, slots=True)
class Spec:
    """What every side is told."""

    model: str
    """Folder."""
    workload: Workload
    behaviour: str
    """File of log mu, which `prepare` writes."""
    dtype: str
    """bfloat16 (float32 weights, computed in bfloat16) or float32."""
    budget: int
    """Tokens of a micro-batch."""
    threads: int
    steps: int
    checkpointing: bool
    trl_variant: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read what `json.dumps(asdict(spec))` wrote."""
        fields = json.loads(text)
        workload: dict[str, Any] = fields["workload"]
        ranges = {k: tuple(v) for k, v in workload.items() if isinstance(v, list)}
        return cls(**fields | {"workload": Workload(**workload | ranges)})

    @property
    def config(self) -> Config:
        """The run that the step belongs to; what is not named here is at its default."""
        w = self.workload
        return load(
            None,
            [
                f"run.steps={self.steps}", f"rollout.group_size={w.group_size}",
                f"rollout.max_prompt_tokens={w.prompt[1]}", f"rollout.max_new_tokens={w.longest}",
                f"learner.batch_size={w.samples}", f"learner.dtype={self.dtype}",
                f"learner.max_tokens_per_microbatch={self.budget}", f"learner.optim.lr={LR}",
                f"learner.gradient_checkpointing={str(self.checkpointing).lower()}",
            ],
        ).config  # fmt: skip

    def samples(self) -> list[Trajectory]:
        """The batch."""
        return make_samples(self.workload, np.load(self.behaviour))


def asyncrl_side(spec: Spec, meter: Meter) -> None:
    """asyncrl's step, from the batch as it came by wire to new weights and metrics."""
    import torch.distributed as dist

    from asyncrl.learner.step import Trainer

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainer = Trainer(spec.config, spec.model, rank=0, world=1, device="cpu")
    samples = spec.samples()
    meter.start()
    for k in range(1, spec.steps + 1):
        part = make_part(samples, k)
        meter.begin()
        metrics = trainer.train(part, INITIAL).metrics
        meter.end()
        meter.saw(metrics["loss/policy"], metrics["loss/grad_norm"])
    dist.destroy_process_group()


def padded_side(spec: Spec, meter: Meter, trim: bool) -> None:
    """The ordinary loop."""
    import torch
    from transformers import AutoModelForCausalLM

    learner = spec.config.learner
    optim = learner.optim
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    if spec.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # or it would not checkpoint; the model has no dropout
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps,
        weight_decay=optim.weight_decay, fused=True,
    )  # fmt: skip
    samples = spec.samples()
    meter.start()
    for _ in range(spec.steps):
        meter.begin()
        batch = _right_padded(samples)
        rows = max(1, spec.budget // batch["ids"].shape[1])
        tokens = batch["loss"].sum()
        total = 0.0
        for start in range(0, len(samples), rows):
            part = {name: x[start : start + rows] for name, x in batch.items()}
            if trim:
                longest = int(part["attention"].sum(1).max())
                part = {n: x if n == "advantage" else x[:, :longest] for n, x in part.items()}
            loss = _loss(model, part, spec, learner.correction.bounds[1], learner.loss.clips)
            loss = loss / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.end()
        meter.saw(total, float(norm))


def _right_padded(samples: list[Trajectory]) -> dict[str, Any]:
    """The whole batch [B, T]: ids, attention, loss (1 on responses), log mu; and advantage [B]."""
    import torch

    longest = max(t.header.tokens for t in samples)
    shape = (len(samples), longest)
    ids, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    loss, log_mu = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for i, t in enumerate(samples):
        prompt, total = t.header.prompt_tokens, t.header.tokens
        ids[i, :prompt], ids[i, prompt:total] = t.prompt_ids, t.response_ids
        attention[i, :total] = 1
        loss[i, prompt:total] = 1
        log_mu[i, prompt:total] = t.behaviour_logprobs
    arrays = {"ids": ids, "attention": attention, "loss": loss, "log_mu": log_mu}
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    return tensors | {"advantage": torch.from_numpy(advantages_of(samples))}


def advantages_of(samples: list[Trajectory]) -> Any:
    """GRPO, [B] float32."""
    out = np.zeros(len(samples), np.float32)
    groups = np.array([t.header.id.index for t in samples])
    rewards = np.array([t.header.reward for t in samples])
    for g in np.unique(groups):
        of_group = rewards[groups == g]
        out[groups == g] = (of_group - of_group.mean()) / (of_group.std(ddof=1) + 1e-6)
    return out


def _loss(
    model: Any, part: dict[str, Any], spec: Spec, cap: float, clips: tuple[float, float]
) -> Any:
    """Sum over the micro-batch's tokens of -min(w, C) min(r A, clip(r) A)."""
    import torch

    ids = part["ids"]
    with torch.autocast("cpu", torch.bfloat16, enabled=spec.dtype == "bfloat16"):
        output = model(input_ids=ids, attention_mask=part["attention"], use_cache=False)
    everything = torch.log_softmax(output.logits[:, :-1], dim=-1, dtype=torch.float32)
    logprobs = everything.gather(-1, ids[:, 1:, None])[..., 0]
    prox, advantage = logprobs.detach(), part["advantage"][:, None]
    weight = (prox - part["log_mu"][:, 1:]).exp().clamp(max=cap)
    ratio = (logprobs - prox).exp()
    clipped = ratio.clamp(1 - clips[0], 1 + clips[1])
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    return -(weight * surrogate * part["loss"][:, 1:]).sum()


def prepare(spec: Spec) -> None:
    """Write log mu: the model's own log-probabilities in float32, and some noise."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    rng = np.random.default_rng(spec.workload.seed + 1)
    out = []
    for t in make_samples(spec.workload):
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0, t.header.prompt_tokens - 1 : -1]
            everything = torch.log_softmax(logits, dim=-1)
        own = everything.gather(-1, ids[t.header.prompt_tokens :, None])[:, 0].numpy()
        out.append(own + rng.normal(0.0, NOISE, len(own)))
    np.save(spec.behaviour, np.concatenate(out).astype(np.float32))


SIDES: dict[str, Callable[[Spec, Meter], None]] = {
    "asyncrl": asyncrl_side,
    "padded": partial(padded_side, trim=False),
    "trimmed": partial(padded_side, trim=True),
}


def main(side: str, spec: Spec) -> None:
    """Run a side in this process."""
    import torch

    torch.set_num_threads(spec.threads)
    if side == "prepare":
        prepare(spec)
        return
    meter = Meter()
    if side == "trl":
        from learner_trl import trl_side

        trl_side(spec, meter)
    else:
        SIDES[side](spec, meter)
    meter.say()


if __name__ == "__main__":
    main(sys.argv[1], Spec.parse(sys.argv[2]))
