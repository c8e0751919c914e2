# ruff: noqa: E501  (tables of messages read best one case a line)
"""Which losses, weights, masks, estimators and critics go together, and what is said of the rest."""

from __future__ import annotations

import typing
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import fields
from asyncrl.config.check import check
from asyncrl.config.load import load
from asyncrl.config.rules.correcting import BY_RHO, CLIP_R
from asyncrl.config.rules.owned import OWNERS
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

SHORT = {
    "policy": "learner.loss.policy", "aggregation": "learner.loss.aggregation",
    "denominator": "learner.loss.denominator", "clip_low": "learner.loss.clip_low",
    "clip_high": "learner.loss.clip_high", "prox": "learner.correction.prox",
    "level": "learner.correction.level", "action": "learner.correction.action",
    "low": "learner.correction.low", "high": "learner.correction.high",
    "m2po": "learner.correction.m2po", "opsm": "learner.correction.opsm",
    "estimator": "learner.advantage.estimator", "minibatches": "learner.minibatches",
    "epochs": "learner.epochs", "kl": "learner.kl.coefficient",
}  # fmt: skip
"""The tables below say `policy=aipo` for learner.loss.policy=aipo."""


def overrides(text: str) -> list[str]:
    pairs = (item.partition("=") for item in text.split())
    return [f"{SHORT.get(key, key)}={value}" for key, _, value in pairs]


GSPO = "policy=gspo aggregation=seq-mean-token-mean minibatches=2"
GSPO_ONCE = "policy=gspo aggregation=seq-mean-token-mean"
VTRACE = "estimator=vtrace level=off"
MASK = "action=mask"

REFUSED = [
    # clips
    ("policy=aipo level=off clip_low=.1", "learner.loss.clip_low=0.1 (override) has no effect with learner.loss.policy=aipo (it clips no ratio): remove it or set learner.loss.policy=ppo"),
    ("policy=topr level=off clip_high=.1", "learner.loss.clip_high=0.1 (override) has no effect with learner.loss.policy=topr"),
    ("policy=reinforce clip_high=.1", "has no effect with learner.loss.policy=reinforce"),
    ("clip_low=.1", "learner.loss.clip_low=0.1 (override) has no effect with learner.epochs=1 and learner.minibatches=1 (the ratio to the policy before the update is 1): remove it or set learner.minibatches=2"),
    ("policy=cispo clip_high=3", "learner.loss.policy=cispo (override) is a plain policy gradient with learner.epochs=1 and learner.minibatches=1 (the ratio to the policy before the update is 1): set learner.minibatches=2 or more, or learner.correction.prox=interpolate or behaviour"),
    (GSPO_ONCE, "learner.loss.policy=gspo (override) is a plain policy gradient with learner.epochs=1"),
    ("policy=reinforce epochs=2", "learner.loss.policy=reinforce (override) has no ratio to correct for the earlier updates of a batch, and learner.epochs=2 and learner.minibatches=1 make 2: set both to 1, or learner.loss.policy=ppo or cispo"),
    ("policy=reinforce prox=interpolate minibatches=4", "learner.epochs=1 and learner.minibatches=4 make 4"),
    (f"{VTRACE} policy=reinforce minibatches=2", "has no ratio to correct for the earlier updates"),
    ("learner.loss.dual_clip=3", "learner.loss.dual_clip=3.0 (override) has no effect with learner.epochs=1"),
    ("policy=cispo learner.loss.dual_clip=3 minibatches=2", "learner.loss.dual_clip=3.0 (override) has no effect with learner.loss.policy=cispo: remove it or set learner.loss.policy=ppo"),
    ("policy=dppo-tv level=off learner.loss.dual_clip=3", "learner.loss.dual_clip=3.0 (override) has no effect"),
    ("learner.loss.cap=3", "learner.loss.cap=3.0 (override) has no effect with learner.loss.policy=ppo: remove it or set learner.loss.policy=aipo"),
    ("minibatches=2 clip_low=1", "learner.loss.clip_low=1.0 (override) bounds nothing: a ratio is never below 0: set it below 1"),
    ("policy=cispo minibatches=2 clip_low=1.1", "learner.loss.clip_low=1.1 (override) puts the lower bound 1 - e below 0: set it to 1"),
    (f"{GSPO} clip_low=1.1", "learner.loss.clip_low=1.1 (override) puts the lower bound"),
    ("policy=dppo-tv level=off clip_low=1", "learner.loss.clip_low=1.0 (override) masks nothing: a total variation is never over 1"),
    ("policy=dppo-tv level=off clip_high=1.5", "learner.loss.clip_high=1.5 (override) masks nothing"),
    # sums
    ("learner.loss.norm_tokens=99", "learner.loss.norm_tokens=99 (override) has no effect with learner.loss.aggregation=token-mean: remove it or set learner.loss.aggregation=seq-mean-token-sum-norm"),
    ("learner.loss.entropy=1", "learner.loss.entropy=1.0 (override) makes randomness worth more than reward: lower it"),
    ("policy=gspo minibatches=2", "learner.loss.policy=gspo (override) has one term per sequence, and learner.loss.aggregation=token-mean would weigh it by its length: set learner.loss.aggregation=seq-mean-token-mean, or add --config correction/gspo"),
    ("policy=gspo aggregation=prompt-mean", "learner.loss.aggregation=prompt-mean (override) would weigh it by its length"),
    ("policy=gspo aggregation=seq-mean-token-sum-norm", "learner.loss.aggregation=seq-mean-token-sum-norm (override) would weigh it by its length"),
    (f"{GSPO} estimator=gae", "learner.loss.policy=gspo (override) needs one advantage per sequence, and learner.advantage.estimator=gae (override) gives one per token"),
    (f"{GSPO} estimator=reinforce++", "needs one advantage per sequence"),
    (f"{GSPO} {VTRACE}", "needs one advantage per sequence"),
    # mu once
    ("policy=aipo", "learner.loss.policy=aipo (override) weighs by pi_theta/mu itself, so that learner.correction.level=token would count mu twice: set learner.correction.level=off, or add --config correction/aipo"),
    ("policy=topr level=sequence-product", "learner.correction.level=sequence-product (override) would count mu twice"),
    ("policy=dppo-kl", "or add --config correction/dppo"),
    ("policy=dppo-tv", "or add --config correction/dppo"),
    ("policy=aipo level=off prox=behaviour", "learner.correction.prox=behaviour (override) has no effect with learner.loss.policy=aipo (no pi_prox in the loss): remove it or set learner.loss.policy=ppo"),
    ("policy=dppo-tv level=off prox=interpolate", "learner.correction.prox=interpolate (override) has no effect with learner.loss.policy=dppo-tv"),
    ("policy=reinforce level=off prox=behaviour", "learner.correction.prox=behaviour (override) has no effect with learner.loss.policy=reinforce and learner.correction.level=off"),
    ("estimator=vtrace", "learner.advantage.estimator=vtrace (override) holds min(rho_bar_pg, pi_theta/mu) already, so that learner.correction.level=token would count mu twice: set learner.correction.level=off, or add --config correction/vtrace"),
    (f"{VTRACE} policy=aipo", "learner.advantage.estimator=vtrace (override) holds pi_theta/mu already, and learner.loss.policy=aipo (override) weighs by it again: set learner.loss.policy=reinforce, ppo or cispo"),
    (f"{VTRACE} policy=dppo-kl", "learner.loss.policy=dppo-kl (override) weighs by it again"),
    (f"{VTRACE} policy=topr", "learner.loss.policy=topr (override) weighs by it again"),
    (f"{VTRACE} prox=behaviour", "learner.correction.prox=behaviour (override) makes it the ratio of ppo too: set learner.correction.prox=recompute"),
    (f"{VTRACE} prox=behaviour policy=cispo", "makes it the ratio of cispo too"),
    # the pass before the update
    ("prox=interpolate m2po=.04", "learner.correction.m2po=0.04 (override) needs a forward pass of the batch before the update, the one that learner.correction.prox=interpolate (override) does without: nothing is saved: set learner.correction.prox=recompute"),
    ("prox=interpolate learner.optim.ess_ref=.9", "learner.optim.ess_ref=0.9 (override) needs a forward pass"),
    ("prox=interpolate estimator=gae", "learner.advantage.estimator=gae (override) needs a forward pass"),
    (f"{VTRACE} prox=interpolate", "learner.advantage.estimator=vtrace (override) needs a forward pass"),
    ("prox=interpolate estimator=reinforce++ kl=.1 learner.kl.apply=reward", "learner.kl.apply=reward (override) needs a forward pass"),
    # the weight
    ("prox=behaviour level=token", "learner.correction.level=token (override) weighs nothing, since w is 1 with learner.correction.prox=behaviour (override): set learner.correction.level=off, or learner.correction.prox=recompute"),
    ("prox=behaviour action=mask", "learner.correction.action=mask (override) has no effect with learner.correction.prox=behaviour"),
    ("prox=behaviour level=off high=3", "learner.correction.high=3.0 (override) has no effect with learner.correction.prox=behaviour"),
    ("level=off action=none", "learner.correction.action=none (override) has no effect with learner.correction.level=off: remove it or set learner.correction.level=token"),
    ("level=off high=3", "learner.correction.high=3.0 (override) has no effect with learner.correction.level=off"),
    ("level=off low=.3", "learner.correction.low=0.3 (override) has no effect with learner.correction.level=off"),
    ("low=.3", "learner.correction.low=0.3 (override) has no effect with learner.correction.action=truncate: remove it or set learner.correction.action=mask"),
    ("action=none low=.3", "learner.correction.low=0.3 (override) has no effect with learner.correction.action=none"),
    ("action=none high=3", "learner.correction.high=3.0 (override) has no effect with learner.correction.action=none: remove it or set learner.correction.action=truncate or mask"),
    (f"{MASK} low=3 high=3", "learner.correction.low=3.0 (override) is not below learner.correction.high=3.0 (override), so that the mask rejects every token"),
    (f"{MASK} low=6", "learner.correction.low=6.0 (override) is not below learner.correction.high=5 (default)"),
    (f"{MASK} high=.4", "learner.correction.low=0.5 (default) is not below learner.correction.high=0.4 (override)"),
    (f"{MASK} low=1.1", "learner.correction.low=1.1 (override) rejects on-policy tokens, whose w is 1: lower it to 1 or less"),
    (f"{MASK} high=.9", "learner.correction.high=0.9 (override) rejects on-policy tokens, whose w is 1: raise it to 1 or more"),
    (f"level=sequence-geometric {MASK} high=.995", "learner.correction.high=0.995 (override) rejects on-policy tokens"),
    ("high=.9", "learner.correction.high=0.9 (override) cuts the weight of on-policy tokens too, whose w is 1: raise it to 1 or more"),
    # denominators
    ("denominator=kept", "learner.loss.denominator=kept (override) has no effect without a mask: remove it, or set learner.correction.action=mask or learner.correction.m2po"),
    (f"denominator=kept level=off {MASK}", "learner.loss.denominator=kept (override) has no effect without a mask"),
    ("denominator=kept opsm=1e-4", "learner.loss.denominator=kept (override) is fixed before the update, and learner.correction.opsm=0.0001 (override) masks anew in each"),
    ("denominator=kept policy=dppo-tv level=off", "learner.loss.denominator=kept (override) is fixed before the update, and learner.loss.policy=dppo-tv (override) masks anew in each"),
    (f"denominator=kept {MASK} prox=interpolate", "and learner.correction.prox=interpolate (override) has none: set learner.correction.prox=recompute or learner.loss.denominator=original"),
    ("denominator=kept m2po=.04 prox=behaviour", "and learner.correction.prox=behaviour (override) has none"),
    # advantages
    ("learner.advantage.gamma=.9", "learner.advantage.gamma=0.9 (override) has no effect with learner.advantage.estimator=grpo: remove it or set learner.advantage.estimator=reinforce++, gae or vtrace"),
    ("estimator=rloo learner.advantage.lam=.9", "learner.advantage.lam=0.9 (override) has no effect with learner.advantage.estimator=rloo: remove it or set learner.advantage.estimator=gae or vtrace"),
    ("estimator=reinforce++ learner.advantage.lam=.9", "learner.advantage.lam=0.9 (override) has no effect with learner.advantage.estimator=reinforce++"),
    ("estimator=reinforce++ learner.advantage.whiten=true", "learner.advantage.whiten=true (override) has no effect with learner.advantage.estimator=reinforce++"),
    ("estimator=gae learner.advantage.rho_bar=2", "learner.advantage.rho_bar=2.0 (override) has no effect with learner.advantage.estimator=gae: remove it or set learner.advantage.estimator=vtrace"),
    ("learner.advantage.c_bar=2", "learner.advantage.c_bar=2.0 (override) has no effect"),
    ("learner.advantage.rho_bar_pg=2", "learner.advantage.rho_bar_pg=2.0 (override) has no effect"),
    (f"{VTRACE} learner.advantage.c_bar=1.5", "learner.advantage.c_bar=1.5 (override) is over rho_bar=1: V-trace need not converge then: lower it, or raise learner.advantage.rho_bar"),
    (f"{VTRACE} learner.advantage.rho_bar=.5", "learner.advantage.c_bar=1.0 is over rho_bar=0.5"),
    # critics
    ("learner.critic.trunk=own", "learner.critic.trunk=own (override) has no effect with learner.advantage.estimator=grpo: remove it or set learner.advantage.estimator=gae or vtrace"),
    ("learner.critic.coefficient=1", "learner.critic.coefficient=1.0 (override) has no effect"),
    ("learner.critic.lr=1", "learner.critic.lr=1.0 (override) has no effect"),
    ("estimator=reinforce++ learner.critic.warmup_steps=1", "learner.critic.warmup_steps=1 (override) has no effect"),
    ("estimator=gae learner.critic.warmup_steps=100", "learner.critic.warmup_steps=100 (override) is not below run.steps=100: the policy would never be trained"),
    ("estimator=gae learner.critic.clip=.2", "learner.critic.clip=0.2 (override) has no effect with learner.epochs=1 and learner.minibatches=1"),
    ("estimator=gae learner.critic.lr=11", "learner.critic.lr=11.0 (override) destroys the critic in one step"),
    # groups
    ("rollout.group_size=1", "rollout.group_size=1 (override): the advantage is relative to the group (learner.advantage.estimator=grpo) and always 0 in a group of one, so nothing is learned: raise it to 2 or more, or set learner.advantage.estimator=reinforce++, gae or vtrace"),
    ("rollout.group_size=1 estimator=rloo", "always 0 in a group of one"),
    ("rollout.group_size=1 estimator=gae rollout.failed_member=drop", "rollout.failed_member=drop (override) has no effect with rollout.group_size=1"),
    ("rollout.group_size=1 estimator=gae learner.shaping.length_normalise=true", "learner.shaping.length_normalise=true (override) has no effect with rollout.group_size=1"),
    ("estimator=gae buffer.filter_zero_variance=true", "buffer.filter_zero_variance=true (override) would leave out prompts that do carry an advantage: learner.advantage.estimator=gae (override) is not relative to the group: set it to false"),
    ("estimator=reinforce++ replay.fraction=.25 replay.by=advantage", "replay.by=advantage (override) weighs by the distance from the group's mean, and learner.advantage.estimator=reinforce++ (override) is not relative to the group: set replay.by=uniform or fresh"),
    # KL
    ("learner.kl.estimator=k2", "learner.kl.estimator=k2 (override) has no effect with learner.kl.coefficient=0: remove it or set learner.kl.coefficient"),
    ("learner.kl.apply=reward", "learner.kl.apply=reward (override) has no effect"),
    ("learner.kl.clamp=3", "learner.kl.clamp=3.0 (override) has no effect"),
    ("kl=.1 learner.kl.estimator=k1", "learner.kl.estimator=k1 (override) in the loss pulls nowhere"),
    ("kl=.1 learner.kl.apply=reward", "learner.kl.apply=reward (override) takes KL from each token's reward, and learner.advantage.estimator=grpo has one reward per sequence"),
    ("kl=.1 learner.kl.apply=reward estimator=gae learner.kl.estimator=k3-unbiased", "learner.kl.estimator=k3-unbiased (override) weighs by pi_theta/mu, and a reward is weighed by it already"),
    # shaping
    ("learner.shaping.overlong_penalty=2", "learner.shaping.overlong_penalty=2.0 (override) has no effect without learner.shaping.overlong_tokens: remove it or set learner.shaping.overlong_tokens"),
    ("learner.shaping.overlong_tokens=257", "learner.shaping.overlong_tokens=257 (override) is over rollout.max_new_tokens=256"),
    ("learner.shaping.function=mine", "learner.shaping.function=mine (override): expected module:function, called with (SampleHeader, reward)"),
    ("learner.shaping.function=my-module:f", "expected module:function"),
    ("learner.shaping.function=", "expected module:function"),
    ("learner.shaping.function=a:b buffer.filter_zero_variance=true", "buffer.filter_zero_variance=true (override) looks at rewards before shaping, and would leave out prompts that carry an advantage with learner.shaping.function=a:b (override): set it to false"),
    ("learner.shaping.overlong_tokens=9 learner.shaping.length_normalise=true buffer.filter_zero_variance=true", "with learner.shaping.overlong_tokens=9 (override) and learner.shaping.length_normalise=true (override): set it to false"),
    # parts of a batch
    ("minibatches=3", "learner.minibatches=3 (override) does not divide the 8 groups of a batch (learner.batch_size / rollout.group_size): set it to 2 or 4"),
    ("minibatches=9", "set it to 8"),
    ("minibatches=2 learner.batch_size=1000003 rollout.group_size=1 estimator=gae", "set it to 1 or 1000003"),
    # the model
    ("learner.lora.alpha=8", "learner.lora.alpha=8.0 (override) has no effect without learner.lora.rank: remove it or set learner.lora.rank"),
    ("learner.lora.targets=[q_proj]", "(override) has no effect without learner.lora.rank"),
    ("learner.lora.rank=8 learner.lora.targets=[]", "names no layer, so nothing would be trained"),
    ("cluster.device=cpu learner.cpu_offload=true", "learner.cpu_offload=true (override) needs GPUs and runs on device cpu, where all is in host memory: set it to false"),
    ("cluster.device=cpu learner.attention=flash", "learner.attention=flash (override) needs GPUs and runs on device cpu: set learner.attention=auto"),
    ("cluster.device=cuda learner.attention=flash learner.dtype=float32", "learner.attention=flash (override) needs learner.dtype=bfloat16, and learner.dtype=float32 (override)"),
]  # fmt: skip

ALLOWED = [
    "minibatches=2 clip_low=.1 clip_high=.3 learner.loss.dual_clip=3",
    "epochs=2 clip_low=.99 learner.loss.dual_clip=3",
    "prox=behaviour clip_low=.1 learner.loss.dual_clip=3",
    "prox=interpolate clip_high=.3 high=5",
    "prox=interpolate buffer.max_staleness=0",
    "prox=interpolate estimator=reinforce++ kl=.1",
    "prox=interpolate policy=reinforce",
    "prox=behaviour level=off",
    "prox=behaviour policy=cispo level=off clip_low=1 clip_high=4",
    "prox=behaviour m2po=.04 learner.optim.ess_ref=.9",
    "policy=reinforce",
    "policy=reinforce level=off",
    "policy=reinforce prox=recompute level=off",
    "policy=aipo level=off learner.loss.cap=10 prox=recompute",
    "policy=topr level=off",
    "policy=dppo-tv level=off clip_low=.99 clip_high=.1",
    "policy=dppo-kl level=off clip_low=3",
    "policy=aipo level=off m2po=.04 opsm=0 denominator=kept",
    f"{GSPO_ONCE} minibatches=4 clip_low=1 clip_high=4e-4",
    f"{GSPO_ONCE} epochs=2",
    f"{GSPO_ONCE} prox=interpolate",
    "policy=cispo prox=behaviour level=off",
    "minibatches=2 policy=aipo level=off",
    f"{GSPO} estimator=rloo level=sequence-product {MASK}",
    "aggregation=seq-mean-token-sum-norm learner.loss.norm_tokens=99",
    "aggregation=prompt-mean",
    "learner.loss.entropy=.99",
    f"{VTRACE} policy=reinforce",
    f"{VTRACE} policy=cispo minibatches=2",
    f"{VTRACE} learner.advantage.rho_bar=2 learner.advantage.c_bar=2 learner.advantage.rho_bar_pg=3",
    f"{VTRACE} learner.advantage.lam=.9 learner.advantage.whiten=true m2po=.04",
    f"{MASK} low=1 high=1.5",
    f"{MASK} low=0 high=1",
    f"level=sequence-geometric {MASK} low=.999 high=1.001",
    "level=sequence-product high=1",
    "action=none m2po=.04",
    f"denominator=kept {MASK}",
    "denominator=kept m2po=.04 opsm=1e-4",
    "estimator=gae learner.advantage.gamma=.9 learner.advantage.lam=.9 learner.advantage.whiten=true",
    "estimator=reinforce++ learner.advantage.gamma=.9",
    "estimator=gae learner.critic.trunk=own learner.critic.lr=1e-3 learner.critic.warmup_steps=99",
    "estimator=gae learner.critic.clip=.2 epochs=2",
    "rollout.group_size=1 estimator=reinforce++",
    "rollout.group_size=1 estimator=gae buffer.max_staleness=0",
    "estimator=gae replay.fraction=.25 replay.by=fresh",
    "replay.fraction=.25 replay.by=advantage buffer.filter_zero_variance=true",
    "kl=.1 learner.kl.estimator=k2 learner.kl.clamp=3",
    "kl=.1 learner.kl.estimator=k3-unbiased",
    "kl=.1 learner.kl.estimator=k1 learner.kl.apply=reward estimator=reinforce++",
    f"kl=.1 learner.kl.apply=reward {VTRACE}",
    "learner.shaping.overlong_tokens=256 learner.shaping.overlong_penalty=2",
    "learner.shaping.length_normalise=true learner.shaping.function=my.module:Some.function",
    "minibatches=8",
    "learner.lora.rank=8 learner.lora.alpha=8 learner.lora.targets=[q_proj]",
    "cluster.device=cuda learner.cpu_offload=true learner.attention=flash",
    "cluster.device=cpu learner.attention=sdpa learner.compile=true",
    "learner.optim.ess_ref=1",
]


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(None, overrides(text))
    lines = [line for line in str(e.value).splitlines() if expected in line]
    assert len(lines) == 1, str(e.value)


@pytest.mark.parametrize("text", ALLOWED)
def test_allowed(text: str) -> None:
    load(None, overrides(text))


def test_a_device_found_later_is_checked_too() -> None:
    resolved = load(None, ["learner.attention=flash"])
    check(resolved.config, resolved.sources, "cuda")
    with pytest.raises(ConfigError, match=r"runs on device cpu \(cluster.device=auto\): set"):
        check(resolved.config, resolved.sources, "cpu")


CHOICES = {
    key: typing.get_args(annotation)
    for key, annotation in fields.leaves().items()
    if typing.get_origin(annotation) is typing.Literal
    and key.startswith(("learner.loss.", "learner.correction.", "learner.advantage."))
}


def test_the_table_of_choices_is_found() -> None:
    names = {key.rpartition(".")[2] for key in CHOICES}
    assert names == {"policy", "aggregation", "denominator", "prox", "level", "action", "estimator"}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, vs in CHOICES.items() for v in vs])
def test_one_choice_among_defaults_meets_one_refusal_at_most(key: str, value: str) -> None:
    """Defaults, which nobody chose, are never complained of for themselves."""
    try:
        load(None, [f"{key}={value}"])
    except ConfigError as e:
        lines = str(e).splitlines()
        assert len(lines) == (2 if value == "gspo" else 1)  # its sum, and its one update
        assert all(line.startswith(f"{key}={value} (override) ") for line in lines)


@pytest.mark.parametrize("value", [v for v in CHOICES["learner.loss.policy"] if v != "ppo"])
def test_what_the_refusal_of_a_loss_says_is_enough(value: str) -> None:
    fixes = {
        "gspo": ["aggregation=seq-mean-token-mean", "minibatches=2"], "cispo": ["minibatches=2"],
        "reinforce": [],
    }  # fmt: skip
    more = fixes.get(value, ["level=off"])
    load(None, overrides(" ".join([f"policy={value}", *more])))


def accepted(choice: dict[str, str], steps: int) -> bool:
    defaults = fields.flatten(Config())
    flat = defaults | choice | {"learner.minibatches": steps}
    config = Config.model_validate(fields.as_tree(flat))
    try:
        check(config, {key: "override" for key in choice if choice[key] != defaults[key]})
    except ConfigError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(
    choice=st.fixed_dictionaries({key: st.sampled_from(values) for key, values in CHOICES.items()}),
    steps=st.sampled_from([1, 2]),
)
def test_the_behaviour_policy_counts_at_most_once(choice: dict[str, str], steps: int) -> None:
    """In whatever is accepted, and no proximal policy is chosen that is in no formula."""
    policy, level = choice["learner.loss.policy"], choice["learner.correction.level"]
    prox, estimator = choice["learner.correction.prox"], choice["learner.advantage.estimator"]
    if not accepted(choice, steps):
        return
    times = (
        (level != "off" and prox != "behaviour") + (policy in BY_RHO) + (estimator == "vtrace")
        + (policy in CLIP_R and prox == "behaviour")
    )  # fmt: skip
    assert times <= 1
    assert prox == "recompute" or policy in CLIP_R or (policy == "reinforce" and level != "off")
    assert level != "off" or choice["learner.correction.action"] == "truncate"  # the default
    assert policy != "gspo" or estimator in ("grpo", "dr_grpo", "rloo")
    assert prox != "interpolate" or estimator not in ("gae", "vtrace")
    assert policy != "reinforce" or steps == 1
    assert policy not in ("gspo", "cispo") or prox != "recompute" or steps == 2


def test_combinations_that_papers_use_are_accepted() -> None:
    """So that the property above is not one of an empty set."""
    for policy, level in product(("ppo", "cispo", "reinforce"), ("token", "sequence-geometric")):
        for action, prox in product(("truncate", "mask", "none"), ("recompute", "interpolate")):
            choices = f"policy={policy} level={level} action={action} prox={prox}"
            load(None, overrides(f"{choices} minibatches={1 if policy == 'reinforce' else 2}"))


def write(folder: Path, **lines: str) -> str:
    path = folder / "mine.yaml"
    inside = "".join(f"    {key}: {value}\n" for key, value in lines.items())
    path.write_text(f"learner:\n  correction:\n{inside}")
    return str(path)


def test_a_preset_that_was_given_is_not_advised_again(tmp_path: Path) -> None:
    mine = write(tmp_path, level="sequence-geometric")
    for stack in (["correction/aipo", "correction/icepop"], ["correction/vtrace", mine]):
        with pytest.raises(ConfigError) as e:
            load(stack)
        over = "correction/icepop.yaml" if "aipo" in stack[0] else mine
        assert f" ({over}:" in str(e.value)
        assert str(e.value).endswith(
            f"put --config {stack[0]} last, or remove {over}'s learner.correction.level"
        )
        load([stack[1], stack[0]])
    with pytest.raises(ConfigError, match="remove the override, since --config correction/gspo"):
        load("correction/gspo", ["learner.loss.aggregation=token-mean"])


def test_a_weight_of_one_file_and_none_of_another_is_refused(tmp_path: Path) -> None:
    """An override says what it wants, and so does a file with both; of two files, either is right."""
    mine = write(tmp_path, level="token")
    for over in ("correction/icepop", mine):
        with pytest.raises(ConfigError, match=r"level=token \(.*weighs nothing, since w is 1 with"):
            load(["correction/naive-ppo", over])
    load(["correction/icepop", "correction/naive-ppo"])
    load("correction/icepop", ["learner.correction.prox=behaviour"])
    load(write(tmp_path, level="token", prox="behaviour"))


@pytest.mark.parametrize(("key", "choice"), [(k, owner) for k, (owner, _) in OWNERS.items()])
def test_a_setting_belongs_to_some_values_of_a_choice_that_there_is(key: str, choice: str) -> None:
    values = OWNERS[key][1]
    of_choice = typing.get_args(fields.leaves()[choice])
    assert set(values) < set(of_choice)
