"""TRL's GRPO training step on a given batch: its trainer, whose generation hands the batch out.

Everything else is TRL's own: rewards, advantages, padding, loss, AdamW. A step counts from
`on_step_begin` to `on_step_end`. The policy that sampled is taken for the one that is trained, as
TRL does unless its completions come from vLLM: one weight less a token than the other sides.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner_meter import Meter
from trl_grpo import VARIANTS, arguments_of

from asyncrl.types import Trajectory

if TYPE_CHECKING:
    from learner_sides import Spec


def rollout_of(samples: list[Trajectory]) -> Any:
    """TRL's `rollout_func`: for each prompt, which is the number of a group, its next sample."""

    def rollout(prompts: list[str], _: Any) -> dict[str, list[Any]]:
        left: dict[str, list[Trajectory]] = {}
        for t in samples:
            left.setdefault(str(t.header.id.index), []).append(t)
        chosen = [left[p].pop(0) for p in prompts]
        return {
            "prompt_ids": [t.prompt_ids.tolist() for t in chosen],
            "completion_ids": [t.response_ids.tolist() for t in chosen],
            "logprobs": None,  # type: ignore[dict-item]
            "score": [t.header.reward for t in chosen],
        }

    return rollout


def score(prompts: Any, completions: Any, score: list[float], **_: Any) -> list[float]:
    """The reward that came with the sample."""
    return score


def trl_side(spec: Spec, meter: Meter) -> None:
    """Train the batch `spec.steps` times."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    class Timed(TrainerCallback):  # type: ignore[misc]
        """Tells the meter of each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end()

    class Counting(GRPOTrainer):  # type: ignore[misc]
        """Keeps the loss of every micro-batch; the log rounds it."""

        losses: list[float] = []

        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            self.losses.append(loss.item())
            return loss

    samples, config = spec.samples(), spec.config
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(config, spec.trl_variant, Path(folder) / "out")
        arguments["gradient_checkpointing"] = spec.checkpointing
        rows = [{"prompt": str(g)} for g in range(spec.workload.groups)] * spec.steps
        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(
                spec.model, dtype=VARIANTS[spec.trl_variant]["model"]
            ),
            reward_funcs=score,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(spec.model, padding_side="left"),
            callbacks=[Timed()],
            rollout_func=rollout_of(samples),
        )
        meter.start()
        trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    per_step = len(trainer.losses) // spec.steps
    for k, norm in enumerate(norms):
        meter.saw(sum(trainer.losses[k * per_step : (k + 1) * per_step]), norm)
