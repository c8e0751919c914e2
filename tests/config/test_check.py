# ruff: noqa: E501  (tables of messages read best one case a line)
"""Refusals of settings that are well typed and cannot work: field, value, reason, fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.actors.rollout import LEASE_WAIT_S, PROGRESS_EVERY_S
from asyncrl.config.check import EVEN_DIGITS_PROMPTS, check
from asyncrl.config.load import load
from asyncrl.config.rules.fleet import MIN_LEASE_TIMEOUT_S, MIN_SILENT_S
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.even_digits import TEXTS

EXPLICIT = "cluster.placement=explicit cluster.actor_places=[local] cluster.learner_places=[local]"

REFUSED = [
    ("learner.batch_size=60", "learner.batch_size=60 (override) is not whole groups of rollout.group_size=8: set it to 56 or 64"),
    ("learner.batch_size=4", "set it to 8"),
    ("learner.batch_size=8 cluster.learners=9", "leaves some of cluster.learners=9 ranks without a sample: raise it to 16"),
    ("buffer.window=18", "window - 1 = 17 is over max_staleness x groups per batch x batches_per_publication = 2 x 8 x 1 = 16"),
    ("buffer.window=18", "lower it to 17 or raise buffer.max_staleness to 3"),
    ("buffer.window=2 buffer.max_staleness=0", "lower it to 1 or raise buffer.max_staleness to 1"),
    ("buffer.memory_gib=0.0001", "buffer.memory_gib=0.0001 (override) does not hold one batch at its longest (learner.batch_size=64 x 8448 bytes for rollout.max_prompt_tokens=512 and max_new_tokens=256 = 0.0005035 GiB), so no batch would be produced while another is trained: raise it to 0.001 or more"),
    ("buffer.durability=disk buffer.store_gib=0.0001", "buffer.store_gib=0.0001 (override) does not hold one batch"),
    ("buffer.store_gib=20", "buffer.store_gib=20.0 (override) has no effect with buffer.durability=none: remove it or set buffer.durability=process or disk"),
    ("replay.max_staleness=2", "replay.max_staleness=2 (override) has no effect with replay.fraction=0"),
    ("replay.by=fresh", "replay.by=fresh (override) has no effect with replay.fraction=0"),
    ("replay.fraction=0.3", "replay.fraction=0.3 (override) of 8 groups a batch (learner.batch_size / rollout.group_size) is 2.4, not whole groups: set it to 0.25 or 0.375"),
    ("replay.fraction=0.1", "set it to 0.125"),
    ("learner.batches_per_publication=101", "no weights would ever be published"),
    ("learner.max_tokens_per_microbatch=767", "learner.max_tokens_per_microbatch=767 (override) is smaller than the longest sample it can receive (prompt 512 + response 256 = 768 tokens): raise it to 768 or lower rollout.max_new_tokens"),
    ("engine.max_model_len=767", "engine.max_model_len=767 (override) is smaller than the longest sample"),
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
    ("cluster.device=cuda weights.strategy=relay weights.backend=nccl", "weights.backend=nccl (override) does not go with weights.strategy=relay, which receives into host memory: set weights.backend=auto"),
    ("buffer.max_staleness=0 weights.in_flight=wait", "weights.in_flight=wait (override) has no effect with buffer.max_staleness=0 (nothing is under way at a publication): remove it or raise buffer.max_staleness"),
    ("cluster.device=cuda engine.threads=2", "engine.threads=2 (override) has no effect on device cuda"),
    ("cluster.device=cuda learner.threads=2", "learner.threads=2 (override) has no effect on device cuda"),
    ("cluster.device=cuda engine.kv_cache_gib=1 engine.gpu_memory_utilization=0.5", "when engine.kv_cache_gib sets the cache"),
    ("run.name=a/b", "run.name=a/b (override) is not a folder name"),
    ("run.name=..", "is not a folder name"),
    ("run.name=", "is not a folder name"),
    ("log.wandb_project=x", "log.wandb_project=x (override) has no effect with log.wandb=off: remove it or set log.wandb=offline or online"),
    ("cluster.placement=spread", "cluster.placement=spread (override) has no effect without cluster.address (there is one machine): remove it or set cluster.address"),
    ("cluster.actor_places=[local]", "cluster.actor_places=('local',) (override) has no effect with cluster.placement=packed: remove it or set cluster.placement=explicit"),
    ("cluster.learner_places=[local]", "cluster.learner_places=('local',) (override) has no effect"),
    ("cluster.placement=explicit cluster.actor_places=[local]", "cluster.learner_places is not set: cluster.placement=explicit needs one NODE or NODE:GPU,GPU per learner"),
    ("cluster.placement=explicit cluster.learner_places=[]", "cluster.learner_places is not set"),
    ("cluster.placement=explicit cluster.learner_places=[a,b]", "cluster.learner_places has 2 entries and cluster.learners=1: give one per learner, or one NODE without GPUs for all"),
    (f"{EXPLICIT} cluster.actors=2 cluster.actor_places=[local:0]", "cluster.actor_places has 1 entries and cluster.actors=2"),
    (f"{EXPLICIT} cluster.actor_places=[local:x]", "cluster.actor_places: 'local:x' is no place: write NODE or NODE:GPU,GPU, e.g. local:0,1"),
    (f'{EXPLICIT} cluster.actor_places=["local:0,1"]', "cluster.actor_places: local:0,1 (actor-0) lists 2 GPUs and engine.tensor_parallel=1: list 1"),
    (f'{EXPLICIT} cluster.learner_places=["local:0,1"]', "lists 2 GPUs and a rank has 1: list 1"),
    (f"{EXPLICIT} cluster.actors=2 cluster.actor_places=[a:0,a:0]", "cluster.actor_places: a:0 (actor-1): GPU 0 of a is listed twice (for actor-0): give another"),
    (f"{EXPLICIT} cluster.actor_places=[a:0] cluster.learner_places=[a:00]", "cluster.learner_places: a:0 (learner-0): GPU 0 of a is listed twice (for actor-0)"),
    (f'{EXPLICIT} engine.tensor_parallel=2 cluster.actor_places=["a:1,1"]', "GPU 1 of a is listed twice"),
    (f"{EXPLICIT} cluster.device=cpu cluster.actor_places=[a:0]", "cluster.actor_places: a:0 (actor-0) names GPUs and runs on device cpu: write a"),
    ("cluster.address=local", "cluster.address=local (override): expected HOST:PORT of a running Ray cluster"),
    ("cluster.address=ray://a:10001", "expected HOST:PORT of a running Ray cluster"),
    ("cluster.actors=4097", "cluster.actors=4097 (override) is over 4096"),
    ("cluster.learners=5000 learner.batch_size=8000", "cluster.learners=5000 (override) is over 4096"),
    ("cluster.silent_after_s=5.9", "cluster.silent_after_s=5.9 (override) would give up healthy actors: one without work speaks every 5 s: raise it to 6"),
    ("rollout.lease_timeout_s=3", "rollout.lease_timeout_s=3.0 (override) would expire before it can be renewed: progress is reported every 2 s: raise it to 4"),
    ("cluster.max_restarts=0 cluster.restart_backoff_s=2", "cluster.restart_backoff_s=2.0 (override) has no effect with cluster.max_restarts=0"),
    ("stop.reward_batches=5", "stop.reward_batches=5 (override) has no effect without stop.reward: remove it or set stop.reward"),
    ("stop.reward=1.5", "stop.reward=1.5 (override): task.reward=auto lies between 0 and 1, so this is never reached: set it between 0 and 1"),
    ("stop.reward=0", "so this is reached at once"),
    ("stop.reward=.5 run.steps=9", "stop.reward_batches=10 is over run.steps=9: stop.reward could never be judged: lower it"),
    ("buffer.max_filtered_in_a_row=9", "buffer.max_filtered_in_a_row=9 (override) has no effect with buffer.filter_zero_variance=false"),
    ("rollout.group_size=2 rollout.failed_member=drop", "rollout.failed_member=drop (override) has no effect with rollout.group_size=2"),
    ("stop.epochs=1 rollout.quarantine_after=2", "rollout.quarantine_after=2 (override) has no effect with stop.epochs=1 (no prompt comes again): remove it or raise stop.epochs"),
    ("record.trajectories=false record.max_gib=2", "record.max_gib=2.0 (override) has no effect with record.trajectories=false: remove it or set record.trajectories=true"),
    ("checkpoint.every=null checkpoint.keep=3", "checkpoint.keep=3 (override) has no effect with checkpoint.every=null: remove it or set checkpoint.every, e.g. to 20"),
    ("checkpoint.every=null checkpoint.at_end=false", "checkpoint.at_end=false (override) has no effect with checkpoint.every=null"),
    ("checkpoint.score=eval/mean", "checkpoint.score=eval/mean (override) is no metric of the learner"),
    ("task.reward_workers=1025", "task.reward_workers=1025 (override) is that many processes per actor: lower it to 1024"),
    ("learner.optim.lr=11", "learner.optim.lr=11.0 (override) destroys the weights in one step"),
    ("learner.optim.weight_decay=1e9", "takes all of a weight away in one step"),
    ("security.keys=k", "security.keys=k (override) has no effect with security.curve=false: remove it or set security.curve=true"),
    ("security.allow_plaintext=true", "security.allow_plaintext=true (override) has no effect without cluster.address (every socket binds loopback): remove it or set cluster.address"),
    ("security.allow_plaintext=true security.curve=true cluster.address=auto", "security.allow_plaintext=true (override) has no effect with security.curve=true: remove it or set security.curve=false"),
    ("model.trust_remote_code=true", "has no effect with the built-in model smollm2-135m"),
]  # fmt: skip

ALLOWED = [
    "rollout.max_in_flight=1",
    "buffer.window=17",
    "buffer.max_staleness=0",
    "weights.in_flight=keep_kv",
    "cluster.device=cuda weights.strategy=relay",
    "buffer.filter_zero_variance=true",
    "buffer.durability=process buffer.store_gib=1 buffer.memory_gib=0.001",
    "checkpoint.every=null",
    "checkpoint.score=null checkpoint.max_gib=null checkpoint.background=false",
    "replay.fraction=0.375 replay.by=fresh replay.max_staleness=9",
    "replay.fraction=1",
    "replay.fraction=0",
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
    EXPLICIT,
    f'{EXPLICIT} cluster.actors=2 engine.tensor_parallel=2 cluster.actor_places=["a:0,1","b:0,1"]',
    f"{EXPLICIT} cluster.actors=2 cluster.actor_places=[a:0,b:0] cluster.learner_places=[a:1]",
    "cluster.placement=spread cluster.address=auto",
    "cluster.address=10.0.0.1:6379",
    "security.curve=true security.keys=k",
    "security.curve=true security.allow_plaintext=false",
    "security.allow_plaintext=true cluster.address=auto",
    "cluster.placement=packed",
    "cluster.actors=4096",
    "cluster.silent_after_s=6 rollout.lease_timeout_s=4",
    "cluster.max_restarts=0",
    "stop.reward=1 stop.reward_batches=100",
    "stop.reward=-3 task.reward=m:f",
    "buffer.filter_zero_variance=true buffer.max_filtered_in_a_row=9",
    "rollout.group_size=2",
    "rollout.failed_member=drop",
    "stop.epochs=2 rollout.quarantine_after=2",
    "record.trajectories=false",
    "task.reward_workers=1024 learner.optim.lr=10",
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
    path.write_text("learner: {kl: {estimator: k3}}\neval: {at_start: true}\n")
    load(str(path))
    path.write_text("learner: {kl: {estimator: k2}}\n")
    with pytest.raises(ConfigError, match=r"estimator=k2 \(.*x.yaml:1\) has no effect"):
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


def test_least_silence_leaves_room_for_what_a_healthy_actor_says() -> None:
    assert LEASE_WAIT_S < MIN_SILENT_S <= Config().cluster.silent_after_s
    assert 2 * PROGRESS_EVERY_S <= MIN_LEASE_TIMEOUT_S <= Config().rollout.lease_timeout_s


def test_the_number_of_toy_prompts() -> None:
    assert len(set(TEXTS)) == EVEN_DIGITS_PROMPTS


def test_lines_of_a_shipped_file_do_not_count_as_set() -> None:
    """Else nobody could start from one with another task."""
    overrides = ["task.kind=jsonl", "task.path=x.jsonl", "eval.samples=0"]
    assert load("quickstart", overrides).config.task.kind == "jsonl"
    with pytest.raises(ConfigError, match=r"task.max_operand=20 \(override\) has no effect"):
        load("quickstart", [*overrides, "task.max_operand=20"])
