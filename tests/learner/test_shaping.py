"""Reward shaping: each step by its formula, their order, and the user's function."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.learning import ShapingConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.learner.maths.shaping import shaped_rewards
from asyncrl.types import SampleHeader
from tests.helpers.tiny_model import make_trajectory

MODULE = """
calls = []

def double(header, reward):
    calls.append(header.id)
    return 2 * reward

def by_length(header, reward):
    return reward - header.response_tokens

def bad(header, reward):
    if header.id.sample == 1:
        return {bad}
    return True

def fails(header, reward):
    raise KeyError("answer")

class Holder:
    @staticmethod
    def triple(header, reward):
        return 3 * reward

constant = 3
def alone(header): return 1.0
def ends(header, reward): raise SystemExit("enough")
"""


def _manifest(*samples: tuple[int, int, float]) -> list[SampleHeader]:
    """Headers of (group, response tokens, reward)."""
    rng = np.random.default_rng(0)
    return [
        make_trajectory(rng, g, k, [3], n, reward=r).header for k, (g, n, r) in enumerate(samples)
    ]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with `shape_it.py` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path
    sys.modules.pop("shape_it", None)


def test_by_default_the_reward_is_the_tasks() -> None:
    manifest = _manifest((0, 3, 0.5), (0, 9, -1.0), (1, 9, 2.0))
    assert shaped_rewards(manifest, ShapingConfig(), 9).tolist() == [0.5, -1.0, 2.0]
    assert shaped_rewards([], ShapingConfig(length_normalise=True), 9).shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_of_the_task_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(DataError, match=rf"'tiny', 0, 3, 1\) is {value}"):
        shaped_rewards(_manifest((3, 1, 0.0), (3, 1, value)), ShapingConfig(), 9)


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 60), st.floats(0.1, 3))
def test_the_overlong_penalty(length: int, soft: int, most: int, penalty: float) -> None:
    length = min(length, most)
    config = ShapingConfig(overlong_tokens=soft, overlong_penalty=penalty)
    got = shaped_rewards(_manifest((0, length, 1.0)), config, most)[0]
    expected = 1.0  # DAPO's three cases
    if length > most - soft:
        expected = 1.0 + penalty * ((most - soft) - length) / soft
    assert got == pytest.approx(expected, rel=1e-12)
    if length == most:
        assert got == 1.0 - penalty


def test_length_normalisation_is_by_the_mean_of_the_group() -> None:
    manifest = _manifest((0, 2, 1.0), (1, 7, 1.0), (0, 6, 1.0), (0, 4, -1.0))
    got = shaped_rewards(manifest, ShapingConfig(length_normalise=True), 100)
    np.testing.assert_allclose(got, [1 / (2 / 4), 1.0, 1 / (6 / 4), -1 / (4 / 4)], rtol=1e-15)
    empty = _manifest((0, 0, 1.0), (0, 3, 1.0))  # a response without tokens counts as one
    got = shaped_rewards(empty, ShapingConfig(length_normalise=True), 100)
    np.testing.assert_allclose(got, [1 / (1 / 2), 1 / (3 / 2)], rtol=1e-15)


def test_the_order_is_function_overlong_length(write_module: Path) -> None:
    (write_module / "shape_it.py").write_text(MODULE.format(bad=0))
    config = ShapingConfig(
        function="shape_it:by_length",
        overlong_tokens=4,
        overlong_penalty=2.0,
        length_normalise=True,
    )
    manifest = _manifest((0, 10, 7.0), (0, 6, 7.0))
    expected = [((7 - 10) - 2.0) / (10 / 8), (7 - 6) / (6 / 8)]
    np.testing.assert_allclose(shaped_rewards(manifest, config, 10), expected, rtol=1e-15)


def test_the_function_is_imported_once_and_called_for_each_sample(write_module: Path) -> None:
    file = write_module / "shape_it.py"
    file.write_text(MODULE.format(bad=0))
    config = ShapingConfig(function="shape_it:double")
    manifest = _manifest((0, 1, 0.5), (1, 2, -1.0))
    got = shaped_rewards(manifest, config, 9)
    assert got.tolist() == [1.0, -2.0]
    file.unlink()
    assert shaped_rewards(manifest, config, 9).tolist() == [1.0, -2.0]
    called = importlib.import_module("shape_it").calls
    assert called == [h.id for h in manifest] * 2
    nested = ShapingConfig(function="shape_it:Holder.triple")
    assert shaped_rewards(manifest[:1], nested, 9).tolist() == [1.5]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("float('nan')", "nan"),
        ("float('-inf')", "-inf"),
        ("'1'", "'1'"),
        ("None", "None"),
        ("[1.0]", r"\[1.0\]"),
        ("10**400", "1000"),
        ("__import__('numpy').zeros(2)", r"array\(\[0., 0.\]\)"),
    ],
)
def test_what_is_no_finite_number_is_refused(write_module: Path, value: str, shown: str) -> None:
    (write_module / "shape_it.py").write_text(MODULE.format(bad=value))
    config = ShapingConfig(function="shape_it:bad")
    assert shaped_rewards(_manifest((0, 1, 0.5)), config, 9).tolist() == [1.0]
    pattern = rf"shape_it:bad: for sample \('tiny', 0, 0, 1\), reward 0.25, it returned {shown}"
    with pytest.raises(DataError, match=pattern):
        shaped_rewards(_manifest((0, 1, 0.5), (0, 1, 0.25)), config, 9)


def test_a_function_that_fails_is_named(write_module: Path) -> None:
    (write_module / "shape_it.py").write_text(MODULE.format(bad=0))
    for name, error in (("fails", "KeyError: 'answer'"), ("ends", "SystemExit: enough")):
        with pytest.raises(DataError, match=rf"shape_it:{name}: for sample .* raised {error}"):
            shaped_rewards(_manifest((0, 1, 0.5)), ShapingConfig(function=f"shape_it:{name}"), 9)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("shape_it", "expected module:function"),
        ("no_such_shape:f", r"no module 'no_such_shape' \(looked in "),
        ("shape_it:none", "shape_it has no 'none'"),
        ("shape_it:constant", r"is a int, expected a function \(SampleHeader, reward\) -> float"),
        ("shape_it:alone", r"cannot be called with \(SampleHeader, reward\): too many positional"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused(
    write_module: Path, spec: str, why: str
) -> None:
    (write_module / "shape_it.py").write_text(MODULE.format(bad=0))
    with pytest.raises(ConfigError, match=f"learner.shaping.function={spec}: {why}"):
        shaped_rewards(_manifest((0, 1, 0.5)), ShapingConfig(function=spec), 9)
