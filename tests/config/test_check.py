# ruff: noqa: E501  (tables of messages read best one case a line)
"""Refusals of settings that are well typed and cannot work: field, value, reason, fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.check import EVEN_DIGITS_PROMPTS, check
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.even_digits import TEXTS

REFUSED = [
    ("learner.batch_size=60", "learner.batch_size=60 (override) is not whole groups of rollout.group_size=8: set it to 56 or 64"),
    ("learner.batch_size=4", "set it to 8"),
    ("learner.batch_size=8 cluster.learners=9", "leaves some of cluster.learners=9 ranks without a sample: raise it to 16"),
    ("rollout.group_size=1", "always 0 in a group of one"),
    ("buffer.window=18", "window - 1 = 17 is over max_staleness x groups per batch x batches_per_publication = 2 x 8 x 1 = 16"),
    ("buffer.window=18", "lower it to 17 or raise buffer.max_staleness to 3"),
    ("buffer.window=2 buffer.max_staleness=0", "lower it to 1 or raise buffer.max_staleness to 1"),
    ("learner.batches_per_publication=101", "no weights would ever be published"),
    ("learner.max_tokens_per_microbatch=767", "learner.max_tokens_per_microbatch=767 (override) is smaller than the longest sample it can receive (prompt 512 + response 256 = 768 tokens): raise it to 768 or lower rollout.max_new_tokens"),
    ("engine.max_model_len=767", "engine.max_model_len=767 (override) is smaller than the longest sample"),
    ("learner.loss.clip_low=0.1", "learner.loss.clip_low=0.1 (override) has no effect with learner.epochs=1"),
    ("learner.loss.clip_high=0.1", "learner.loss.clip_high=0.1"),
    ("learner.loss.dual_clip=3", "learner.loss.dual_clip=3.0 (override) has no effect with learner.epochs=1"),
    ("learner.optim.warmup_steps=101", "is over run.steps=100"),
    ("task.path=x", "task.path=x (override) has no effect with task.kind=arithmetic: remove it or set task.kind=jsonl"),
    ("task.prompt_field=q", "task.prompt_field=q (override) has no effect"),
    ("task.kind=jsonl", "task.path is not set"),
    ("task.kind=even_digits task.max_operand=9", "task.max_operand=9 (override) has no effect with task.kind=even_digits"),
    ("task.prompt_template=hello", "does not hold {prompt}"),
    ("task.chat=false task.system_prompt=x", "has no effect with task.chat=false"),
    ("task.reward=last_numbr", "expected auto, last_number, even_digits or module:function (did you mean last_number?)"),
    ("task.reward=:f", "or module:function"),
    ("task.reward=mod:", "or module:function"),
    ("task.kind=even_digits task.reward=last_number", "has none: set task.reward=auto"),
    ("task.kind=jsonl task.path=x task.answer_field=null", "compares with a ground truth, and there is none"),
    ("eval.path=x eval.samples=3", "eval.path=x (override) has no effect with task.kind=arithmetic"),
    ("eval.at_start=true", "eval.at_start=true (override) has no effect with eval.samples=0"),
    ("eval.samples=3 eval.at_start=false eval.at_end=false", "eval.samples=3 (override) has no effect"),
    ("task.kind=jsonl task.path=x eval.samples=3", "needs eval.path=FILE"),
    ("task.kind=jsonl task.path=x eval.path=y", "eval.path=y (override) has no effect with eval.samples=0"),
    ("task.max_operand=3 eval.samples=7", "leaves less than a third of the 9 sums up to task.max_operand=3 to train on: lower it to 6"),
    ("task.kind=even_digits eval.samples=129", "lower it to 128"),
    ("cluster.device=cpu engine.gpu_memory_utilization=0.5", "has no effect on device cpu"),
    ("cluster.device=cpu engine.tensor_parallel=2", "engine.tensor_parallel=2 (override) needs GPUs and runs on device cpu: set it to 1"),
    ("cluster.device=cpu weights.backend=nccl", "set weights.backend=auto"),
    ("cluster.device=cuda engine.threads=2", "engine.threads=2 (override) has no effect on device cuda"),
    ("cluster.device=cuda learner.threads=2", "learner.threads=2 (override) has no effect on device cuda"),
    ("cluster.device=cuda engine.kv_cache_gib=1 engine.gpu_memory_utilization=0.5", "when engine.kv_cache_gib sets the cache"),
    ("run.name=a/b", "run.name=a/b (override) is not a folder name"),
    ("run.name=..", "is not a folder name"),
    ("run.name=", "is not a folder name"),
    ("log.wandb_project=x", "log.wandb_project=x (override) has no effect with log.wandb=off: remove it or set log.wandb=offline or online"),
    ("model.trust_remote_code=true", "has no effect with the built-in model smollm2-135m"),
]  # fmt: skip

ALLOWED = [
    "rollout.max_in_flight=1",
    "buffer.window=17",
    "buffer.max_staleness=0",
    "buffer.filter_zero_variance=true",
    "learner.epochs=2 learner.loss.clip_low=0.1 learner.loss.dual_clip=3",
    "learner.loss.dual_clip=null",
    "learner.optim.warmup_steps=100",
    "eval.at_start=false",
    "eval.samples=2475",
    "task.reward=my.module:Some.function",
    "task.reward_timeout_s=500",
    "rollout.temperature=0.01",
    "task.kind=jsonl task.path=x eval.samples=3 eval.path=x",
    "task.kind=jsonl task.path=x task.answer_field=null task.reward=m:f",
    "task.chat=false",
    "engine.max_model_len=768 learner.max_tokens_per_microbatch=768",
    "cluster.device=cuda engine.tensor_parallel=2 weights.backend=nccl",
    "log.wandb=offline log.wandb_project=x",
]


@pytest.mark.parametrize(("overrides", "expected"), REFUSED)
def test_refused(overrides: str, expected: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(None, overrides.split())
    assert expected in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed(overrides: str) -> None:
    load(None, overrides.split())


@pytest.mark.parametrize(("steps", "n"), [(1, 1), (7, 1), (8, 4), (9, 4), (11, 4), (3, 3)])
def test_the_last_version_counts_the_publications(steps: int, n: int) -> None:
    config = load(None, [f"run.steps={steps}", f"learner.batches_per_publication={n}"]).config
    published = [k for k in range(1, steps + 1) if k % n == 0 or k == steps]
    assert config.last_version == len(published)


def test_device_found_later_is_checked_too() -> None:
    resolved = load(None, ["engine.threads=2"])
    check(resolved.config, resolved.sources, "cpu")
    with pytest.raises(ConfigError, match=r"engine.threads=2 .* on device cuda .*device=auto"):
        check(resolved.config, resolved.sources, "cuda")


def test_fields_nobody_set_are_not_called_inactive() -> None:
    check(Config(), None, "cpu")
    check(Config(), None, "cuda")


def test_a_default_written_in_a_file_is_not_called_inactive(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("learner: {loss: {clip_low: 0.2}}\neval: {at_start: true}\n")
    load(str(path))
    path.write_text("learner: {loss: {clip_low: 0.3}}\n")
    with pytest.raises(ConfigError, match=r"clip_low=0.3 \(.*x.yaml:1\) has no effect"):
        load(str(path))


def test_at_most_ten_refusals() -> None:
    keys = (
        "learner.batch_size=60 buffer.window=99 engine.max_model_len=1 run.name=.. task.path=x "
        "learner.max_tokens_per_microbatch=1 learner.loss.clip_low=.1 learner.loss.clip_high=.1 "
        "learner.loss.dual_clip=2 eval.at_start=true task.prompt_template=x log.wandb_project=x"
    )
    with pytest.raises(ConfigError) as e:
        load(None, keys.split())
    assert str(e.value).splitlines()[-1] == "and 2 more"


def test_the_number_of_toy_prompts() -> None:
    assert len(set(TEXTS)) == EVEN_DIGITS_PROMPTS


def test_lines_of_a_shipped_file_do_not_count_as_set() -> None:
    """Else nobody could start from one with another task."""
    overrides = ["task.kind=jsonl", "task.path=x.jsonl", "eval.samples=0"]
    assert load("quickstart", overrides).config.task.kind == "jsonl"
    with pytest.raises(ConfigError, match=r"task.max_operand=20 \(override\) has no effect"):
        load("quickstart", [*overrides, "task.max_operand=20"])
