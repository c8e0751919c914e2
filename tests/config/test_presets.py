"""The shipped corrections: what each is, alone, on top of a run, and on top of each other."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from asyncrl.config import fields, reader
from asyncrl.config.load import load
from asyncrl.config.sources import shipped, summary
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PRESETS = [name for name in shipped() if name.startswith("correction/")]
WEIGHTS = ["tis", "icepop", "sequence-mask", "m2po", "opsm"]
"""Those that leave the loss and the estimator to others."""


def test_the_presets_are_those_of_the_table() -> None:
    assert {name.removeprefix("correction/") for name in PRESETS} == {
        "decoupled-ppo", "tis", "icepop", "sequence-mask", "naive-ppo", "interpolated", "gspo",
        "cispo", "aipo", "topr", "dppo", "m2po", "opsm", "vtrace", "gae",
    }  # fmt: skip


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


@pytest.mark.parametrize(("loss", "weight"), product(["gspo", "gae", "decoupled-ppo"], WEIGHTS))
def test_weights_go_on_top_of_losses(loss: str, weight: str) -> None:
    under, over = load(f"correction/{loss}"), load(f"correction/{weight}")
    both = load(["quickstart", f"correction/{loss}", f"correction/{weight}"])
    learner = both.config.learner
    assert learner.loss == under.config.learner.loss
    assert learner.advantage == under.config.learner.advantage
    assert learner.correction.level == over.config.learner.correction.level
    assert learner.correction.action == over.config.learner.correction.action
    assert both.name == "quickstart"


@pytest.mark.parametrize("loss", ["aipo", "topr", "dppo", "vtrace"])
def test_a_weight_on_top_of_a_loss_that_has_its_own_is_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match="would count mu twice") as e:
        load([f"correction/{loss}", "correction/icepop"])
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
