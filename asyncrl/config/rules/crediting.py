"""From rewards to advantages: shaping, estimators, the critic, the reference."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule
from asyncrl.config.rules.data import names_function

_ESTIMATOR = "learner.advantage.estimator"


def _vtrace(c: Context) -> Iterator[str]:
    advantage = c.config.learner.advantage
    if advantage.estimator == "vtrace" and advantage.c_bar > advantage.rho_bar:
        yield (
            f"{c.named('learner.advantage.c_bar')} is over rho_bar={advantage.rho_bar:g}: V-trace "
            "need not converge then: lower it, or raise learner.advantage.rho_bar"
        )


def _group(c: Context) -> Iterator[str]:
    """What only makes sense, or does not, where a group's rewards are compared."""
    if c.config.rollout.group_size == 1:
        yield from c.inactive(
            "learner.shaping.length_normalise",
            why="with rollout.group_size=1 (each length is its group's mean)",
            fix="raise rollout.group_size",
        )
        if c.relative:
            yield (
                f"{c.named('rollout.group_size')}: the advantage is relative to the group "
                f"({_ESTIMATOR}={c.flat[_ESTIMATOR]}) and always 0 in a group of one, so nothing "
                f"is learned: raise it to 2 or more, or set {_ESTIMATOR}=reinforce++, gae or vtrace"
            )
    if c.relative:
        return
    chosen = c.named(_ESTIMATOR)
    if c.config.buffer.filter_zero_variance:
        yield (
            f"{c.named('buffer.filter_zero_variance')} would leave out prompts that do carry an "
            f"advantage: {chosen} is not relative to the group: set it to false"
        )
    if c.config.replay.fraction and c.config.replay.by == "advantage":
        yield (
            f"{c.named('replay.by')} weighs by the distance from the group's mean, and {chosen} is "
            "not relative to the group: set replay.by=uniform or fresh"
        )


def _critic(c: Context) -> Iterator[str]:
    if not c.critic:
        return
    critic, steps = c.config.learner.critic, c.config.run.steps
    if critic.warmup_steps >= steps:
        yield (
            f"{c.named('learner.critic.warmup_steps')} is not below run.steps={steps}: the policy "
            "would never be trained: lower it"
        )
    if c.one_update:
        yield from c.inactive(
            "learner.critic.clip",
            why="with learner.epochs=1 and learner.minibatches=1 (values are those before the "
            "update)",
            fix="set learner.minibatches=2 or more",
        )


def _kl(c: Context) -> Iterator[str]:
    kl = c.config.learner.kl
    keys = [f"learner.kl.{name}" for name in ("estimator", "apply", "clamp")]
    if not kl.coefficient:
        yield from c.inactive(
            *keys, why="with learner.kl.coefficient=0", fix="set learner.kl.coefficient"
        )
        return
    estimator, apply = (c.named(key) for key in keys[:2])
    if kl.apply == "loss" and kl.estimator == "k1":
        yield (
            f"{estimator} in the loss pulls nowhere: the gradient of log pi_theta/pi_ref has "
            "expectation 0: set learner.kl.estimator=k2 or k3, or learner.kl.apply=reward"
        )
    if kl.apply == "reward" and c.relative:
        yield (
            f"{apply} takes KL from each token's reward, and {c.named(_ESTIMATOR)} has one reward "
            f"per sequence: set learner.kl.apply=loss, or {_ESTIMATOR}=reinforce++, gae or vtrace"
        )
    if kl.apply == "reward" and kl.estimator == "k3-unbiased":
        yield (
            f"{estimator} weighs by pi_theta/mu, and a reward is weighed by it already, with the "
            "advantage: set learner.kl.estimator=k1, k2 or k3"
        )


def _shaping(c: Context) -> Iterator[str]:
    shaping, longest = c.config.learner.shaping, c.config.rollout.max_new_tokens
    if shaping.overlong_tokens is None:
        yield from c.inactive(
            "learner.shaping.overlong_penalty", why="without learner.shaping.overlong_tokens",
            fix="set learner.shaping.overlong_tokens",
        )  # fmt: skip
    elif shaping.overlong_tokens > longest:
        yield (
            f"{c.named('learner.shaping.overlong_tokens')} is over rollout.max_new_tokens="
            f"{longest}: a response of no length would be penalised: lower it"
        )
    names = ("function", "overlong_tokens", "length_normalise")
    shaped = [f"learner.shaping.{name}" for name in names if getattr(shaping, name)]
    if shaped and c.config.buffer.filter_zero_variance and c.relative:
        yield (
            f"{c.named('buffer.filter_zero_variance')} looks at rewards before shaping, and would "
            f"leave out prompts that carry an advantage with {' and '.join(map(c.named, shaped))}: "
            "set it to false"
        )
    if shaping.function is not None and not names_function(shaping.function):
        yield (
            f"{c.named('learner.shaping.function')}: expected module:function, called with "
            "(SampleHeader, reward)"
        )


RULES: tuple[Rule, ...] = (_group, _vtrace, _critic, _kl, _shaping)
