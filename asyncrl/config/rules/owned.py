"""Settings that belong to some choices of another setting, and do nothing with the rest."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import fields
from asyncrl.config.rules.context import Context, Rule

_POLICY, _ESTIMATOR = "learner.loss.policy", "learner.advantage.estimator"
_CRITICS = ("gae", "vtrace")

OWNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "learner.loss.clip_low": (_POLICY, ("ppo", "gspo", "cispo", "dppo-tv", "dppo-kl")),
    "learner.loss.clip_high": (_POLICY, ("ppo", "gspo", "cispo", "dppo-tv", "dppo-kl")),
    "learner.loss.dual_clip": (_POLICY, ("ppo",)),
    "learner.loss.cap": (_POLICY, ("aipo",)),
    "learner.loss.norm_tokens": ("learner.loss.aggregation", ("seq-mean-token-sum-norm",)),
    "learner.advantage.gamma": (_ESTIMATOR, ("reinforce++", *_CRITICS)),
    "learner.advantage.lam": (_ESTIMATOR, _CRITICS),
    "learner.advantage.whiten": (_ESTIMATOR, _CRITICS),
    "learner.advantage.rho_bar": (_ESTIMATOR, ("vtrace",)),
    "learner.advantage.c_bar": (_ESTIMATOR, ("vtrace",)),
    "learner.advantage.rho_bar_pg": (_ESTIMATOR, ("vtrace",)),
    **{k: (_ESTIMATOR, _CRITICS) for k in fields.leaves() if k.startswith("learner.critic.")},
    "task.path": ("task.kind", ("jsonl",)),
    "task.prompt_field": ("task.kind", ("jsonl",)),
    "task.answer_field": ("task.kind", ("jsonl",)),
    "task.max_operand": ("task.kind", ("arithmetic",)),
    "eval.path": ("task.kind", ("jsonl",)),
}
"""From a setting to the choice that it belongs to, and the values with which it has an effect."""
_NOTES = {
    "learner.loss.clip_low": " (it clips no ratio)",
    "learner.loss.clip_high": " (it clips no ratio)",
    "eval.path": " (it holds out prompts of its own)",
}


def _owned(c: Context) -> Iterator[str]:
    for key, (choice, values) in OWNERS.items():
        chosen = c.flat[choice]
        if chosen not in values:
            fix = " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
            yield from c.inactive(
                key, why=f"with {choice}={chosen}{_NOTES.get(key, '')}", fix=f"set {choice}={fix}"
            )


RULES: tuple[Rule, ...] = (_owned,)
