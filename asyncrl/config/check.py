"""Refuses settings that are well typed and cannot work: inactive, half set, or deadlocking.

Nothing is imported, opened or probed. Every message has the field, its value, the
reason and the fix. `asyncrl.preflight` checks what needs the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config import fields
from asyncrl.config.schema import Config
from asyncrl.config.sources import shipped
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import ConfigError

REWARDS = ("auto", "last_number", "even_digits")
"""The names that `task.reward` knows besides a user's `module:function`."""
EVEN_DIGITS_PROMPTS = 256
"""Prompts of `task.kind: even_digits`."""
BUILT_IN_MODELS = ("smollm2-135m", "tiny")
_DEFAULTS = fields.flatten(Config())


@dataclass(frozen=True, slots=True)
class _Context:
    """What the rules look at."""

    config: Config
    sources: Mapping[str, str]
    flat: Mapping[str, object]
    device: str
    shipped: frozenset[str]
    """File names of the shipped configurations."""

    def given(self, key: str) -> bool:
        """True if somebody set the field, to something else than null.

        In a file the default value does not count: a run's config.yaml holds every field. What
        a shipped file sets does not count either.
        """
        source, value = self.sources.get(key, "default"), self.flat[key]
        file, is_file, _ = source.partition(":")
        if source == "default" or value is None:
            return False
        # Whoever starts from a shipped file may turn off what its other lines are for.
        return not is_file or (value != _DEFAULTS[key] and file not in self.shipped)

    def named(self, key: str) -> str:
        """`key=value (where)`."""
        value = self.flat[key]
        text = str(value).lower() if isinstance(value, bool) else value
        source = self.sources.get(key, "default")
        return f"{key}={text}" + ("" if source == "default" else f" ({source})")

    def inactive(self, *keys: str, why: str, fix: str) -> Iterator[str]:
        """A refusal for each key that is set although it has no effect."""
        for key in keys:
            if self.given(key):
                yield f"{self.named(key)} has no effect {why}: remove it or {fix}"


def check(
    config: Config, sources: Mapping[str, str] | None = None, device: str | None = None
) -> None:
    """Refuse a configuration that cannot work.

    Args:
        config: the configuration.
        sources: where each value came from; without it no field counts as set by somebody.
        device: cpu or cuda when `cluster.device: auto` has been resolved.

    Raises:
        ConfigError: every refusal (at most ten), one a line.
    """
    context = _Context(
        config, sources or {}, fields.flatten(config), device or config.cluster.device,
        frozenset(path.name for path in shipped().values()),
    )  # fmt: skip
    problems = [text for rule in _RULES for text in rule(context)]
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ConfigError("\n".join(problems[:10] + more))


def _text(c: _Context) -> Iterator[str]:
    for key, value in c.flat.items():
        if not isinstance(value, str):
            continue
        one_line = key.startswith("run.") or key.endswith((".path", ".name"))
        if "\0" in value or (one_line and not value.isprintable()):
            yield f"{key}={value!r} holds a character that is not printable: remove it"
    if not c.config.run.dir:
        yield "run.dir is empty: name a folder, or remove it for the default"


def _batch(c: _Context) -> Iterator[str]:
    batch, n = c.config.learner.batch_size, c.config.rollout.group_size
    if batch % n:
        low, high = batch // n * n, (batch // n + 1) * n
        fix = f"{low} or {high}" if low else f"{high}"
        yield (
            f"{c.named('learner.batch_size')} is not whole groups of "
            f"rollout.group_size={n}: set it to {fix}"
        )
    learners = c.config.cluster.learners
    if batch < learners:
        yield (
            f"{c.named('learner.batch_size')} leaves some of cluster.learners={learners} ranks "
            f"without a sample: raise it to {-(-learners // n) * n} or lower cluster.learners"
        )
    if n == 1:
        yield (
            f"{c.named('rollout.group_size')}: the advantage is relative to the group "
            f"(learner.loss.advantage={c.config.learner.loss.advantage}) and always 0 in a group "
            "of one, so nothing is learned: raise it to 2 or more"
        )


def _admission(c: _Context) -> Iterator[str]:
    """docs/architecture.md: position p is leased iff p + W <= (v_a + S + 1) * G * n."""
    s, w = c.config.buffer.max_staleness, c.config.buffer.window
    n = c.config.learner.batches_per_publication
    per_version = max(1, c.config.groups_per_batch) * n
    if w - 1 > s * per_version:
        yield (
            f"{c.named('buffer.window')} deadlocks: window - 1 = {w - 1} is over max_staleness x "
            f"groups per batch x batches_per_publication = {s} x {c.config.groups_per_batch} x "
            f"{n} = {s * per_version}, so the last groups of a batch could never be leased: "
            f"lower it to {s * per_version + 1} or raise buffer.max_staleness to "
            f"{-(-(w - 1) // per_version)}"
        )
    if n > c.config.run.steps:
        yield (
            f"{c.named('learner.batches_per_publication')} is over run.steps="
            f"{c.config.run.steps}: no weights would ever be published: lower it"
        )


def _lengths(c: _Context) -> Iterator[str]:
    r = c.config.rollout
    longest = r.max_prompt_tokens + r.max_new_tokens
    parts = f"(prompt {r.max_prompt_tokens} + response {r.max_new_tokens} = {longest} tokens)"
    if c.config.learner.max_tokens_per_microbatch < longest:
        yield (
            f"{c.named('learner.max_tokens_per_microbatch')} is smaller than the longest sample "
            f"it can receive {parts}: raise it to {longest} or lower rollout.max_new_tokens"
        )
    length = c.config.engine.max_model_len
    if length is not None and length < longest:
        yield (
            f"{c.named('engine.max_model_len')} is smaller than the longest sample {parts}: "
            f"raise it to {longest}, remove it, or lower rollout.max_new_tokens"
        )


def _loss(c: _Context) -> Iterator[str]:
    if c.config.learner.epochs == 1:
        yield from c.inactive(
            "learner.loss.clip_low", "learner.loss.clip_high", "learner.loss.dual_clip",
            why="with learner.epochs=1 (the ratio to the policy before the update is 1)",
            fix="set learner.epochs=2 or more",
        )  # fmt: skip
    optim = c.config.learner.optim
    if optim.warmup_steps > c.config.run.steps:
        yield (
            f"{c.named('learner.optim.warmup_steps')} is over run.steps={c.config.run.steps}: "
            "the peak learning rate would never be reached: lower it"
        )


def _task(c: _Context) -> Iterator[str]:
    t = c.config.task
    kind = f"with task.kind={t.kind}"
    if t.kind != "jsonl":
        yield from c.inactive(
            "task.path", "task.prompt_field", "task.answer_field", why=kind,
            fix="set task.kind=jsonl",
        )  # fmt: skip
    elif not t.path:
        yield "task.path is not set: task.kind=jsonl needs the file of prompts, task.path=FILE"
    if t.kind != "arithmetic":
        yield from c.inactive("task.max_operand", why=kind, fix="set task.kind=arithmetic")
    if "{prompt}" not in t.prompt_template:
        yield (
            f"{c.named('task.prompt_template')} does not hold {{prompt}}, which stands for the "
            "prompt: all prompts would be the same: put it in"
        )
    if not t.chat:
        yield from c.inactive(
            "task.system_prompt", why="with task.chat=false (plain text has no turns)",
            fix="set task.chat=true",
        )  # fmt: skip
    yield from _reward(c)


def _reward(c: _Context) -> Iterator[str]:
    t = c.config.task
    module, colon, function = t.reward.partition(":")
    if t.reward not in REWARDS:
        names = all(p.isidentifier() for p in (*module.split("."), *function.split(".")))
        if not colon or not names:
            yield (
                f"{c.named('task.reward')}: expected {', '.join(REWARDS)} or "
                f"module:function{did_you_mean(t.reward, REWARDS)}"
            )
        return
    compares = t.reward == "last_number" or (t.reward == "auto" and t.kind != "even_digits")
    if compares and (t.kind == "even_digits" or (t.kind == "jsonl" and t.answer_field is None)):
        yield (
            f"{c.named('task.reward')} compares with a ground truth, and there is none "
            f"(task.kind={t.kind}, task.answer_field=null): set task.answer_field or another reward"
            if t.kind == "jsonl"
            else f"{c.named('task.reward')} compares with a ground truth, and task.kind="
            "even_digits has none: set task.reward=auto"
        )


def _eval(c: _Context) -> Iterator[str]:
    e, t = c.config.eval, c.config.task
    if t.kind != "jsonl":
        yield from c.inactive(
            "eval.path", why=f"with task.kind={t.kind} (it holds out prompts of its own)",
            fix="set task.kind=jsonl",
        )  # fmt: skip
    if e.samples == 0:
        keys = [k for k in ("eval.at_start", "eval.at_end") if c.flat[k]]
        keys += ["eval.path"] if t.kind == "jsonl" else []
        yield from c.inactive(*keys, why="with eval.samples=0", fix="set eval.samples")
        return
    if not (e.at_start or e.at_end):
        yield (
            f"{c.named('eval.samples')} has no effect with eval.at_start=false and "
            "eval.at_end=false: set one of them, or eval.samples=0"
        )
    if t.kind == "jsonl" and not e.path:
        yield (
            f"{c.named('eval.samples')} needs eval.path=FILE with task.kind=jsonl: give the "
            "file of held-out prompts, or set eval.samples=0"
        )
    sums = t.max_operand**2
    if t.kind == "arithmetic" and e.samples > sums * 2 // 3:
        yield (
            f"{c.named('eval.samples')} leaves less than a third of the {sums} sums up to "
            f"task.max_operand={t.max_operand} to train on: lower it to {sums * 2 // 3} or raise "
            "task.max_operand"
        )
    if t.kind == "even_digits" and e.samples > EVEN_DIGITS_PROMPTS // 2:
        yield (
            f"{c.named('eval.samples')} is more than half of the {EVEN_DIGITS_PROMPTS} prompts of "
            f"task.kind=even_digits: lower it to {EVEN_DIGITS_PROMPTS // 2}"
        )


def _devices(c: _Context) -> Iterator[str]:
    auto = " (cluster.device=auto)" if c.config.cluster.device == "auto" else ""
    if c.device == "cpu":
        on = f"on device cpu{auto}"
        yield from c.inactive("engine.gpu_memory_utilization", why=on, fix="use a GPU")
        if c.config.engine.tensor_parallel > 1:
            yield f"{c.named('engine.tensor_parallel')} needs GPUs and runs {on}: set it to 1"
        if c.config.weights.backend == "nccl":
            yield (
                f"{c.named('weights.backend')} needs GPUs and runs {on}: set weights.backend=auto"
            )
    if c.device == "cuda":
        yield from c.inactive(
            "engine.threads", "learner.threads", why=f"on device cuda{auto}",
            fix="set cluster.device=cpu",
        )  # fmt: skip
        if c.config.engine.kv_cache_gib is not None:
            yield from c.inactive(
                "engine.gpu_memory_utilization", why="when engine.kv_cache_gib sets the cache",
                fix="remove engine.kv_cache_gib",
            )  # fmt: skip


def _names(c: _Context) -> Iterator[str]:
    name = c.config.run.name
    if name is not None and (
        name in ("", ".", "..") or len(name.encode(errors="replace")) > 200
        or any(ch in "/\\" or not ch.isprintable() for ch in name)
    ):  # fmt: skip
        yield (
            f"{c.named('run.name')!s} is not a folder name: use letters, digits, '-' and '_' "
            "(the folder above it is run.dir)"
        )
    if c.config.log.wandb == "off":
        yield from c.inactive(
            "log.wandb_project", why="with log.wandb=off", fix="set log.wandb=offline or online"
        )
    if c.config.model.name in BUILT_IN_MODELS and c.config.model.trust_remote_code:
        yield from c.inactive(
            "model.trust_remote_code", why=f"with the built-in model {c.config.model.name}",
            fix="name another model",
        )  # fmt: skip


_RULES: tuple[Callable[[_Context], Iterator[str]], ...] = (
    _text, _batch, _admission, _lengths, _loss, _task, _eval, _devices, _names,
)  # fmt: skip
