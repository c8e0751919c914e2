"""What a resumed run may have otherwise: every key has a verdict, refusals say why."""

from __future__ import annotations

import pytest

from asyncrl.config import fields
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.resume.fields import ACCEPTED, REFUSED, check_changes


def test_every_key_of_the_schema_is_classified_once() -> None:
    assert ACCEPTED & REFUSED.keys() == set()
    assert ACCEPTED | REFUSED.keys() == set(fields.leaves())


def config(*overrides: str) -> Config:
    return load("tiny", overrides).config


def test_accepted_changes_are_told() -> None:
    found = check_changes(config(), config("learner.optim.lr=1e-4", "cluster.actors=3"))
    assert sorted(c.key for c in found) == ["cluster.actors", "learner.optim.lr"]
    assert str(found[0]).startswith("learner.optim.lr: ")
    assert check_changes(config(), config()) == []


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("buffer.max_staleness=7", "what the ledger decided so far rests on it"),
        ("task.reward=mine:score", "the samples of a group must be alike"),
        ("run.seed=5", "the prompts that were taken must come again"),
        ("learner.lora.rank=4", "the checkpoint's weights and optimizer are of it"),
        ("learner.advantage.estimator=gae", "one has a critic, the other has none"),
    ],
)
def test_refused_changes_say_why_and_what_to_do(override: str, reason: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError) as e:
        check_changes(config(), config(override, "learner.optim.lr=1e-4"))
    text = str(e.value)
    assert text.startswith(f"{key}: ")
    assert f"-> {value}: {reason}" in text
    assert text.endswith(": set it back, or start a new run from its weights with --from")
    assert "learner.optim.lr" not in text


def test_checkpoints_cannot_be_turned_off() -> None:
    was = config()
    now = was.model_copy(update={"checkpoint": was.checkpoint.model_copy(update={"every": None})})
    with pytest.raises(ConfigError, match="checkpoint.every: 20 -> null: a run that goes on needs"):
        check_changes(was, now)
