"""Policy losses, behaviour weights and masks: which of them go together (docs/corrections.md).

The behaviour policy mu may enter a gradient once: as the weight w = pi_prox/mu, in the loss (rho of
aipo, topr and dppo; r where pi_prox is mu), or in V-trace's advantages.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule

CLIP_R = ("ppo", "gspo", "cispo")
"""Losses with r = pi_theta/pi_prox."""
BY_RHO = ("aipo", "topr", "dppo-tv", "dppo-kl")
"""Losses that weigh by rho = pi_theta/mu."""
MAX_ENTROPY = 1.0
"""A coefficient from here on makes entropy the task: rewards are about 1."""

_CLIPS = ("learner.loss.clip_low", "learner.loss.clip_high")
_POLICY = "learner.loss.policy"
_PROX = "learner.correction.prox"
_LEVEL = "learner.correction.level"


def _ratio(c: Context) -> Iterator[str]:
    """Clips, where there is a ratio that they could clip."""
    policy, with_policy = c.config.learner.loss.policy, f"with {_POLICY}={c.flat[_POLICY]}"
    clips: tuple[str, ...] = _CLIPS if policy in CLIP_R else ()
    if policy == "ppo":
        clips += ("learner.loss.dual_clip",)
    else:
        yield from c.inactive("learner.loss.dual_clip", why=with_policy, fix=f"set {_POLICY}=ppo")
    if policy in ("aipo", "topr", "reinforce"):
        yield from c.inactive(
            *_CLIPS, why=f"{with_policy} (it clips no ratio)",
            fix=f"set {_POLICY}=ppo, gspo, cispo, dppo-tv or dppo-kl",
        )  # fmt: skip
    if policy != "aipo":
        yield from c.inactive("learner.loss.cap", why=with_policy, fix=f"set {_POLICY}=aipo")
    if c.one_update and c.config.learner.correction.prox == "recompute":
        yield from c.inactive(
            *clips,
            why="with learner.epochs=1 and learner.minibatches=1 (the ratio to the policy before "
            "the update is 1)",
            fix=f"set learner.minibatches=2 or more, or {_PROX}=interpolate or behaviour",
        )


def _bounds(c: Context) -> Iterator[str]:
    """Clip bounds that nothing ever reaches."""
    loss = c.config.learner.loss
    low, high = loss.clips
    if loss.policy == "ppo" and low >= 1:
        yield f"{c.named(_CLIPS[0])} bounds nothing: a ratio is never below 0: set it below 1"
    if loss.policy in ("gspo", "cispo") and low > 1:
        yield (
            f"{c.named(_CLIPS[0])} puts the lower bound 1 - e below 0: set it to 1 (no lower "
            "bound) or less"
        )
    if loss.policy == "dppo-tv":
        for key, value in zip(_CLIPS, (low, high), strict=True):
            if value >= 1:
                yield (
                    f"{c.named(key)} masks nothing: a total variation is never over 1: set it "
                    "below 1"
                )


def _sums(c: Context) -> Iterator[str]:
    """How the terms of the loss add up."""
    loss = c.config.learner.loss
    if loss.aggregation != "seq-mean-token-sum-norm":
        yield from c.inactive(
            "learner.loss.norm_tokens", why=f"with learner.loss.aggregation={loss.aggregation}",
            fix="set learner.loss.aggregation=seq-mean-token-sum-norm",
        )  # fmt: skip
    if loss.entropy >= MAX_ENTROPY:
        yield (
            f"{c.named('learner.loss.entropy')} makes randomness worth more than reward: lower it "
            "to .01 or less (below 1 at least)"
        )
    if loss.policy != "gspo":
        return
    if loss.aggregation != "seq-mean-token-mean":
        yield (
            f"{c.named(_POLICY)} has one term per sequence, and learner.loss.aggregation="
            f"{loss.aggregation} would weigh it by its length: set "
            "learner.loss.aggregation=seq-mean-token-mean, or add --config correction/gspo"
        )
    if not c.relative:
        yield (
            f"{c.named(_POLICY)} needs one advantage per sequence, and "
            f"{c.named('learner.advantage.estimator')} gives one per token: set "
            "learner.advantage.estimator=grpo, dr_grpo or rloo, or another loss"
        )


def _once(c: Context) -> Iterator[str]:
    """The behaviour policy counts once."""
    learner = c.config.learner
    policy, correction = learner.loss.policy, learner.correction
    by_rho, vtrace = policy in BY_RHO, learner.advantage.estimator == "vtrace"
    preset = policy.partition("-")[0] if by_rho else "vtrace"
    estimator = c.named("learner.advantage.estimator")
    if by_rho and correction.level != "off":
        yield (
            f"{c.named(_POLICY)} weighs by pi_theta/mu itself, so that {_LEVEL}={correction.level} "
            f"would count mu twice: set {_LEVEL}=off, or add --config correction/{preset}"
        )
    elif vtrace and correction.level != "off":
        yield (
            f"{estimator} holds min(rho_bar_pg, pi_theta/mu) already, so that {_LEVEL}="
            f"{correction.level} would count mu twice: set {_LEVEL}=off, or add --config "
            f"correction/{preset}"
        )
    if vtrace and by_rho:
        yield (
            f"{estimator} holds pi_theta/mu already, and {c.named(_POLICY)} weighs by it again: "
            f"set {_POLICY}=reinforce, ppo or cispo"
        )
    if vtrace and policy in CLIP_R and correction.prox == "behaviour":
        yield (
            f"{estimator} holds pi_theta/mu already, and {c.named(_PROX)} makes it the ratio of "
            f"{policy} too: set {_PROX}=recompute"
        )


def _prox(c: Context) -> Iterator[str]:
    """pi_prox: where it is in no formula, and where interpolating it saves nothing."""
    learner = c.config.learner
    prox, level = learner.correction.prox, learner.correction.level
    policy = learner.loss.policy
    if prox != "recompute" and (policy in BY_RHO or (policy == "reinforce" and level == "off")):
        off = "" if policy in BY_RHO else f" and {_LEVEL}=off"
        yield from c.inactive(
            _PROX, why=f"with {_POLICY}={policy}{off} (no pi_prox in the loss)",
            fix=f"set {_POLICY}=ppo",
        )  # fmt: skip
    if prox != "interpolate":
        return
    needs = ["learner.advantage.estimator"] if c.critic else []
    if learner.correction.m2po is not None:
        needs.append("learner.correction.m2po")
    if learner.optim.ess_ref is not None:
        needs.append("learner.optim.ess_ref")
    if learner.kl.coefficient and learner.kl.apply == "reward":
        needs.append("learner.kl.apply")
    for key in needs:
        yield (
            f"{c.named(key)} needs a forward pass of the batch before the update, the one that "
            f"{c.named(_PROX)} does without: nothing is saved: set {_PROX}=recompute"
        )


def _weight(c: Context) -> Iterator[str]:
    """What is made of w."""
    correction = c.config.learner.correction
    action, low, high = (f"learner.correction.{name}" for name in ("action", "low", "high"))
    if correction.prox == "behaviour":
        level = () if correction.level == "off" else (_LEVEL,)
        yield from c.inactive(
            *level, action, low, high, why=f"with {_PROX}=behaviour (w is 1)",
            fix=f"set {_PROX}=recompute",
        )  # fmt: skip
        return
    if correction.level == "off":
        yield from c.inactive(
            action, low, high, why=f"with {_LEVEL}=off", fix=f"set {_LEVEL}=token"
        )
        return
    with_action = f"with {action}={correction.action}"
    if correction.action != "mask":
        yield from c.inactive(low, why=with_action, fix=f"set {action}=mask")
    if correction.action == "none":
        yield from c.inactive(high, why=with_action, fix=f"set {action}=truncate or mask")
        return
    yield from _range(c)


def _range(c: Context) -> Iterator[str]:
    """Bounds of w: on-policy tokens, whose w is 1, must pass as they are."""
    correction = c.config.learner.correction
    (a, b), mask = correction.bounds, correction.action == "mask"
    low = f"learner.correction.low={a:g} (default)"
    high = f"learner.correction.high={b:g} (default)"
    low = low if correction.low is None else c.named("learner.correction.low")
    high = high if correction.high is None else c.named("learner.correction.high")
    if mask and a >= b:
        yield f"{low} is not below {high}, so that the mask rejects every token: lower the one"
    elif mask and a > 1:
        yield f"{low} rejects on-policy tokens, whose w is 1: lower it to 1 or less"
    elif b < 1:
        what = "rejects on-policy tokens" if mask else "cuts the weight of on-policy tokens too"
        yield f"{high} {what}, whose w is 1: raise it to 1 or more"


def _denominator(c: Context) -> Iterator[str]:
    """What is kept must be known before the first update."""
    learner, key = c.config.learner, "learner.loss.denominator"
    correction = learner.correction
    if learner.loss.denominator == "original":
        return
    weight_mask = correction.action == "mask" and correction.level != "off"
    masks = weight_mask or correction.m2po is not None
    by_update = "learner.correction.opsm" if correction.opsm is not None else _POLICY
    if not masks and (correction.opsm is not None or learner.loss.policy.startswith("dppo")):
        yield (
            f"{c.named(key)} is fixed before the update, and {c.named(by_update)} masks anew in "
            f"each: set {key}=original, or a mask by w (learner.correction.action=mask, or m2po)"
        )
    elif not masks:
        yield (
            f"{c.named(key)} has no effect without a mask: remove it, or set "
            "learner.correction.action=mask or learner.correction.m2po"
        )
    elif correction.prox != "recompute":
        yield (
            f"{c.named(key)} counts what a mask of the recomputed pi_prox/mu keeps before the "
            f"update, and {c.named(_PROX)} has none: set {_PROX}=recompute or {key}=original"
        )


RULES: tuple[Rule, ...] = (_ratio, _bounds, _sums, _once, _prox, _weight, _denominator)
