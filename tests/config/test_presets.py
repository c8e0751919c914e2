"""The shipped corrections: what each is, alone, on top of a run, and on top of each other."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from asyncrl.config import fields, reader
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.config.sources import shipped, summary
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PRESETS = [name for name in shipped() if name.startswith("correction/")]
LOSSES = {
    "decoupled-ppo": ("ppo", 2, "recompute", "token", "truncate", 0, 5),
    "naive-ppo": ("ppo", 1, "behaviour", "off", "truncate", 0, 2),
    "interpolated": ("ppo", 1, "interpolate", "token", "truncate", 0, 2),
    "gspo": ("gspo", 2, "recompute", "sequence-geometric", "truncate", 0, 2),
    "cispo": ("cispo", 2, "recompute", "token", "truncate", 0, 5),
    "aipo": ("aipo", 1, "recompute", "off", "truncate", 0, 2),
    "topr": ("topr", 1, "recompute", "off", "truncate", 0, 2),
    "dppo": ("dppo-tv", 1, "recompute", "off", "truncate", 0, 2),
    "vtrace": ("ppo", 1, "recompute", "off", "truncate", 0, 2),
    "gae": ("ppo", 1, "recompute", "token", "truncate", 0, 2),
}
"""Loss, updates of a batch, pi_prox, and the weight: level, action, bounds."""
WEIGHTS = {
    "tis": ("token", "truncate", 0, 2),
    "icepop": ("token", "mask", 0.5, 5),
    "sequence-mask": ("sequence-geometric", "mask", 0.99, 1.01),
}
"""Level, action, bounds; all else is left to others."""
MASKS = {"m2po": 0.04, "opsm": 1e-4}
"""One setting each."""
FREE = ["decoupled-ppo", "interpolated", "gspo", "cispo", "gae"]
"""Losses on which a weight goes."""


def what(config: Config) -> tuple[object, ...]:
    """Of a run, what `LOSSES` says of a preset."""
    learner = config.learner
    correction = learner.correction
    return (
        learner.loss.policy, learner.updates, correction.prox, correction.level, correction.action,
        *correction.bounds,
    )  # fmt: skip


def stack(*names: str) -> Config:
    """Presets on top of a run."""
    return load(["quickstart", *(f"correction/{name}" for name in names)]).config


def masks(config: Config) -> dict[str, float]:
    """The masks beside the weight that are on."""
    correction = config.learner.correction
    both = {"m2po": correction.m2po, "opsm": correction.opsm}
    return {name: value for name, value in both.items() if value is not None}


def test_the_presets_are_those_of_the_table() -> None:
    names = [name.removeprefix("correction/") for name in PRESETS]
    assert sorted(names) == sorted([*LOSSES, *WEIGHTS, *MASKS])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("base", [None, "quickstart", "tiny"])
def test_a_preset_is_legal_alone_and_on_top_of_a_run(base: str | None, name: str) -> None:
    resolved = load([base, name] if base else name)
    assert resolved.name == base or resolved.name == name.removeprefix("correction/")
    for key, entry in reader.read_file(shipped()[name]).items():
        assert resolved.sources[key] == f"{name}.yaml:{entry.line}"
        assert fields.flatten(resolved.config)[key] == entry.value
    if base:
        assert resolved.sources["run.steps"].startswith(f"{base}.yaml:")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_short_says_when_to_use_it_and_is_in_the_documentation(name: str) -> None:
    lines = shipped()[name].read_text().splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("# ")
    assert 40 <= len(summary(shipped()[name])) <= 110
    assert f"`{name}`" in (ROOT / "docs/corrections.md").read_text()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_what_its_table_says(loss: str) -> None:
    config = stack(loss)
    assert what(config) == LOSSES[loss]
    assert masks(config) == {}
    estimator = loss if loss in ("gae", "vtrace") else "grpo"
    assert config.learner.advantage.estimator == estimator


@pytest.mark.parametrize(("loss", "weight"), product(FREE, WEIGHTS))
def test_a_weight_goes_on_top_of_a_loss_and_changes_nothing_else(loss: str, weight: str) -> None:
    under, both = stack(loss), stack(loss, weight)
    assert what(both) == (*LOSSES[loss][:3], *WEIGHTS[weight])
    assert everything_but_the_correction(both) == everything_but_the_correction(under)
    assert masks(both) == {}


@pytest.mark.parametrize(
    ("under", "mask"),
    [p for p in product([*LOSSES, *WEIGHTS], MASKS) if p != ("interpolated", "m2po")],
)
def test_a_mask_goes_on_top_of_all_and_changes_nothing_else(under: str, mask: str) -> None:
    alone, both = stack(under), stack(under, mask)
    assert what(both) == what(alone)
    assert masks(both) == {mask: MASKS[mask]}
    assert everything_but_the_correction(both) == everything_but_the_correction(alone)


def everything_but_the_correction(config: Config) -> dict[str, object]:
    flat = fields.flatten(config)
    return {key: value for key, value in flat.items() if "learner.correction." not in key}


def test_m2po_needs_the_pass_that_interpolation_saves() -> None:
    with pytest.raises(ConfigError, match=r"m2po=0.04 .* needs a forward pass"):
        stack("interpolated", "m2po")


@pytest.mark.parametrize(("first", "second"), product(WEIGHTS, WEIGHTS))
def test_a_later_weight_replaces_an_earlier_one_whole(first: str, second: str) -> None:
    assert stack(first, second) == stack(second)


@pytest.mark.parametrize(("first", "second"), product(["gae", "vtrace"], ["gae", "vtrace"]))
def test_an_actor_critic_leaves_nothing_to_a_later_one(first: str, second: str) -> None:
    assert stack(first, second) == stack(second)


@pytest.mark.parametrize(
    ("loss", "weight"), [p for p in product(LOSSES, WEIGHTS) if p[0] not in FREE]
)
def test_a_weight_on_top_of_a_loss_that_has_none_is_refused(loss: str, weight: str) -> None:
    why = "w is 1 with" if loss == "naive-ppo" else "would count mu twice"
    with pytest.raises(ConfigError, match=why) as e:
        stack(loss, weight)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize(("first", "second"), product(PRESETS, PRESETS))
def test_the_later_of_two_presets_wins_or_the_reason_is_given(first: str, second: str) -> None:
    """What the first set and the second makes useless is not held against the user."""
    problems = ""
    try:
        resolved = load([first, second])
    except ConfigError as e:
        problems = str(e)
    if problems:
        assert "has no effect" not in problems
        assert len(problems.splitlines()) <= 2
        return
    for key, entry in reader.read_file(shipped()[second]).items():
        assert fields.flatten(resolved.config)[key] == entry.value


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_a_critic_goes_on_top_of_a_run_that_filters_groups(name: str) -> None:
    resolved = load(["math-2node", f"correction/{name}"], ["task.path=x"])
    assert resolved.config.buffer.filter_zero_variance is False
    with pytest.raises(ConfigError, match="would leave out prompts that do carry an advantage"):
        load(
            ["math-2node", f"correction/{name}"],
            ["task.path=x", "buffer.filter_zero_variance=true"],
        )
