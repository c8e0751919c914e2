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
_AGGREGATION = "learner.loss.aggregation"


def _ratio(c: Context) -> Iterator[str]:
    """r, the ratio to the policy before the update: 1 with one update, needed with several."""
    learner = c.config.learner
    policy = learner.loss.policy
    if policy == "reinforce" and not c.one_update:
        yield (
            f"{c.named(_POLICY)} has no ratio to correct for the earlier updates of a batch, and "
            f"learner.epochs={learner.epochs} and learner.minibatches={learner.minibatches} make "
            f"{learner.updates}: set both to 1, or {_POLICY}=ppo or cispo"
        )
    if policy not in CLIP_R or not c.one_update or learner.correction.prox != "recompute":
        return
    fix = f"set learner.minibatches=2 or more, or {_PROX}=interpolate or behaviour"
    if policy != "ppo" and c.given(_POLICY):
        yield (
            f"{c.named(_POLICY)} is a plain policy gradient with learner.epochs=1 and "
            f"learner.minibatches=1 (the ratio to the policy before the update is 1): {fix}"
        )
        return
    dual = ("learner.loss.dual_clip",) if policy == "ppo" else ()
    yield from c.inactive(
        *_CLIPS, *dual, why="with learner.epochs=1 and learner.minibatches=1 (the ratio to the "
        "policy before the update is 1)", fix=fix,
    )  # fmt: skip


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
    if loss.entropy >= MAX_ENTROPY:
        yield (
            f"{c.named('learner.loss.entropy')} makes randomness worth more than reward: lower it "
            "to .01 or less (below 1 at least)"
        )
    if loss.policy != "gspo":
        return
    if loss.aggregation != "seq-mean-token-mean":
        fix = c.fix(_AGGREGATION, "seq-mean-token-mean", "correction/gspo")
        yield (
            f"{c.named(_POLICY)} has one term per sequence, and {c.named(_AGGREGATION)} would "
            f"weigh it by its length: {fix}"
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
    if (by_rho or vtrace) and correction.level != "off":
        holds = (
            f"{c.named(_POLICY)} weighs by pi_theta/mu itself" if by_rho
            else f"{estimator} holds min(rho_bar_pg, pi_theta/mu) already"
        )  # fmt: skip
        yield (
            f"{holds}, so that {c.named(_LEVEL)} would count mu twice: "
            f"{c.fix(_LEVEL, 'off', f'correction/{preset}')}"
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
    for key in learner.first_pass_for:
        if key == "loss.denominator":
            continue  # refused by `_denominator`, for a reason of its own
        yield (
            f"{c.named(f'learner.{key}')} needs a forward pass of the batch before the update, the "
            f"one that {c.named(_PROX)} does without: nothing is saved: set {_PROX}=recompute"
        )


def _weight(c: Context) -> Iterator[str]:
    """What is made of w."""
    correction = c.config.learner.correction
    action, low, high = (f"learner.correction.{name}" for name in ("action", "low", "high"))
    if correction.prox == "behaviour":
        # Of two files, one is for a weight and the other for none: neither is left unsaid.
        apart = c.file(_LEVEL) and c.file(_PROX) and c.file(_LEVEL) != c.file(_PROX)
        if correction.level != "off" and (c.given(_LEVEL) or apart):
            yield (
                f"{c.named(_LEVEL)} weighs nothing, since w is 1 with {c.named(_PROX)}: set "
                f"{_LEVEL}=off, or {_PROX}=recompute"
            )
        yield from c.inactive(
            action, low, high, why=f"with {_PROX}=behaviour (w is 1)", fix=f"set {_PROX}=recompute"
        )
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
