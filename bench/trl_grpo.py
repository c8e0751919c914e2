"""One run of TRL's GRPOTrainer with what an asyncrl configuration says; a process of peers.py.

    asyncrl's Config ► prompts, reward, model, lengths, optimizer ► GRPOTrainer ► STEPS.jsonl

Each step appends {"step", "samples", "reward"} to the file, so that the reader sees it when it has
happened. It stops after `run.steps`, or when whoever reads has seen enough and ends it.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl import models, tasks
from asyncrl.actors.rewards import resolve_reward, reward_spec
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.types import Prompt

VARIANTS: dict[str, dict[str, Any]] = {
    "autocast": {"model": "float32", "bf16": True},
    "autocast-16": {"model": "float32", "bf16": True, "gradient_accumulation_steps": 4},
    "compiled": {"model": "float32", "bf16": True, "torch_compile": True},
    "bf16": {"model": "bfloat16", "bf16": True},
    "fp32": {"model": "float32", "bf16": False},
    "paged": {"model": "float32", "bf16": True, "use_transformers_continuous_batching": True},
    "vllm": {
        "model": "float32", "bf16": True, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_max_model_length": 128, "vllm_gpu_memory_utilization": 0.1,
    },
}  # fmt: skip
"""Settings of TRL that were tried (bench/README.md says how each does)."""


def rows_of(config: Config) -> list[dict[str, Any]]:
    """The prompts that asyncrl would train on, in its order: G a step."""
    prompts = islice(tasks.make_prompts(config), config.run.steps * config.groups_per_batch)
    return [{"prompt": p.messages, "answer": p.answer} for _, p in prompts]


def arguments_of(config: Config, variant: str, out: Path) -> dict[str, Any]:
    """GRPOConfig's arguments: the same optimizer, schedule, lengths and batch."""
    optim, chosen = config.learner.optim, dict(VARIANTS[variant])
    chosen.pop("model")
    accumulate = chosen.pop("gradient_accumulation_steps", 1)
    return chosen | {
        "output_dir": str(out.with_suffix(".trl")),
        "use_cpu": True,
        "max_steps": config.run.steps,
        "per_device_train_batch_size": config.learner.batch_size // accumulate,
        "gradient_accumulation_steps": accumulate,
        "num_generations": config.rollout.group_size,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "gradient_checkpointing": False,  # slower; TRL's default saves memory
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over the batch's tokens, as token-mean
        "scale_rewards": "group",
        "optim": "adamw_torch_fused",
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.grad_clip or 0.0,
        "lr_scheduler_type": optim.schedule,
        "warmup_steps": optim.warmup_steps,
        "shuffle_dataset": False,
        "seed": config.run.seed,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def train(config: Config, variant: str, out: Path) -> None:
    """Train and report each step."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    folder = str(models.resolve(config.model.name))
    score = resolve_reward(reward_spec(config.task))
    rewards: list[float] = []

    def reward(prompts: Any, completions: Any, answer: list[str], **_: Any) -> list[float]:
        """asyncrl's own function on TRL's completions."""
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        rewards[:] = [
            score(Prompt(text="", answer=a), text, "stop")
            for a, text in zip(answer, texts, strict=True)
        ]
        return list(rewards)

    class Report(TrainerCallback):  # type: ignore[misc]
        """A line a step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            line = {
                "step": state.global_step,
                "samples": len(rewards),
                "reward": sum(rewards) / len(rewards),
            }
            with out.open("a", encoding="utf-8") as f:
                f.write(json.dumps(line) + "\n")

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=VARIANTS[variant]["model"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**arguments_of(config, variant, out)),
        train_dataset=Dataset.from_list(rows_of(config)),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Report()],
    )
    trainer.train()


def main() -> None:
    """Read the command line that peers.py wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file of one JSON object a step")
    parser.add_argument("--config", required=True, help="asyncrl configuration")
    parser.add_argument("--variant", choices=VARIANTS, default="autocast")
    parser.add_argument("overrides", nargs="*", help="key=value")
    given = parser.parse_intermixed_args()
    train(load(given.config, given.overrides).config, given.variant, given.out)


if __name__ == "__main__":
    main()
