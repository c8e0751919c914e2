"""What holds a run back, in plain words, with the setting to change and what that may bring.

One bottleneck at most, the first that applies, from where each side's time goes:

    the learner waits for data ─┬─ samples wait for their reward           reward
                                ├─ updates hold the engines up             weights
                                ├─ few long responses keep a batch back    tail
                                ├─ actors wait too: for newer weights      staleness
                                └─ actors are busy                         actors
    it trains all the time, and actors wait                                learner

Then what is wrong with the data whatever the pace: ess, length, alike, truncated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.learner.advice import ess_collapse
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.reading.settings import read_settings
from asyncrl.monitor.window import Window, of_history

STARVED = 0.15
"""The learner's share of waiting for data from which on it is worth a change."""
HELD = 0.2
"""The actors' share of waiting for leases from which on they are held back."""
SCORING = 0.5
"""Share of the samples in flight that wait for a reward: the rest is generated."""
UPDATING = 0.15
"""Share of the actors' time that weight updates take."""
TAIL = 3.0
"""The longest response of a batch in mean responses, from which on it is a tail."""
EMPTY = 0.5
"""Share of the places in flight that are taken, below which engines run empty."""
LENGTH_BIAS = 0.1
"""Distance of samples/len_bias from 1 that matters."""
ALIKE = 0.5
"""Share of the groups whose rewards are all equal, over the last batches, that matters."""
TRUNCATED = 0.5
"""Share of the responses that ended at the limit, likewise."""
ENOUGH_S = 5.0
"""A shorter window says nothing."""
MOST_GAIN = 10.0


@dataclass(frozen=True, slots=True)
class Advice:
    """One line of advice.

    >>> Advice("actors", "the learner waits", "cluster.actors", 1.7).line()
    'the learner waits (cluster.actors; up to 1.7 times as fast)'
    """

    kind: str
    """The bottleneck (reward, weights, tail, staleness, actors, learner), or ess, length, alike,
    truncated."""
    text: str
    setting: str
    """The first setting to change."""
    gain: float | None
    """By how many times faster the run would be at most; None where it is not about speed."""

    def line(self) -> str:
        """All of it in words."""
        gain = "" if self.gain is None else f"; up to {self.gain:.1f} times as fast"
        return f"{self.text} ({self.setting}{gain})"


Rule = Callable[[Window, Config], Advice | None]


def advise(window: Window, config: Config) -> list[Advice]:
    """Advice for a run that went on as in the window, the bottleneck first; a pure function."""
    if window.seconds < ENOUGH_S:
        return []
    found = [rule(window, config) for rule in (_bottleneck, _ess, _length, _alike, _truncated)]
    return [advice for advice in found if advice is not None]


def advise_run(folder: Path, history: RunHistory, seconds: float | None = None) -> list[Advice]:
    """Advice from a run's folder: on all since training began, or on the last seconds.

    A run whose configuration cannot be read gets none.
    """
    try:
        config = Config.model_validate_json(json.dumps(read_settings(folder)))  # for its tuples
    except ValueError:  # pydantic's, and UserError
        return []
    return advise(of_history(history, seconds), config)


# --- the pace ------------------------------------------------------------------------------------


def _bottleneck(window: Window, config: Config) -> Advice | None:
    if window.share("learner", "get_wait") < STARVED:
        return _learner(window, config)
    for rule in (_reward, _weights, _tail, _staleness, _actors):
        if (advice := rule(window, config)) is not None:
            return advice
    return None


def _reward(window: Window, config: Config) -> Advice | None:
    in_flight, scoring = (window.means.get(f"actor/{n}", 0.0) for n in ("in_flight", "scoring"))
    part = scoring / in_flight if in_flight else 0.0
    if part < SCORING:
        return None
    workers = config.task.reward_workers
    return Advice(
        "reward",
        f"{part:.0%} of the samples in flight wait for their reward, and the learner waits "
        f"{_starved(window)} of its time for data: raise the reward processes of each actor above "
        f"{workers}, or make the reward faster",
        "task.reward_workers", _faster(window.share("learner", "get_wait")),
    )  # fmt: skip


def _weights(window: Window, config: Config) -> Advice | None:
    held_up = window.share("actor", "sync")
    if held_up < UPDATING:
        return None
    return Advice(
        "weights",
        f"weight updates hold the engines up {held_up:.0%} of their time: publish after more "
        f"batches than {config.learner.batches_per_publication}, or let requests under way go on "
        f"with their keys and values (weights.in_flight=keep_kv, now {config.weights.in_flight})",
        "learner.batches_per_publication", _faster(held_up),
    )  # fmt: skip


def _tail(window: Window, config: Config) -> Advice | None:
    mean, longest = (window.means.get(f"rollout/response_tokens/{n}", 0.0) for n in ("mean", "max"))
    ratio = longest / mean if mean else 0.0
    if ratio < TAIL or _taken(window, config) > EMPTY:
        return None
    widest = config.buffer.max_staleness * config.groups_per_batch
    widest = widest * config.learner.batches_per_publication + 1
    if config.buffer.window < widest:
        change, setting = f"let groups overtake (buffer.window up to {widest})", "buffer.window"
    else:
        change, setting = "raise buffer.max_staleness and buffer.window", "buffer.max_staleness"
    return Advice(
        "tail",
        f"the longest response of a batch is {ratio:.1f} times the mean one, and the learner waits "
        f"{_starved(window)} of its time for the last ones while engines run "
        f"{_taken(window, config):.0%} full: {change}, or lower rollout.max_new_tokens below "
        f"{config.rollout.max_new_tokens}",
        setting, _faster(window.share("learner", "get_wait")),
    )  # fmt: skip


def _staleness(window: Window, config: Config) -> Advice | None:
    held = window.share("actor", "get_wait")
    if held < HELD:
        return None
    busiest = max(1 - held, 1 - window.share("learner", "get_wait"))
    limit = config.buffer.max_staleness
    return Advice(
        "staleness",
        f"the two sides take turns: actors wait {held:.0%} of their time for leases, the learner "
        f"{_starved(window)} for data: raise the staleness allowed above {limit}, so that they "
        "overlap",
        "buffer.max_staleness", _faster(1 - busiest),
    )  # fmt: skip


def _actors(window: Window, config: Config) -> Advice | None:
    starved, actors = window.share("learner", "get_wait"), config.cluster.actors
    needed = max(actors + 1, math.ceil(actors * _faster(starved)))
    return Advice(
        "actors",
        f"the learner waits {_starved(window)} of its time for data, and the actors generate "
        f"{window.share('actor', 'generate'):.0%} of theirs: add actors, {needed} instead of "
        f"{actors} (asyncrl scale adds them to a run)",
        "cluster.actors", _faster(starved),
    )  # fmt: skip


def _learner(window: Window, config: Config) -> Advice | None:
    held = window.share("actor", "get_wait")
    if held < HELD or not window.shares.get("learner"):
        return None
    working = window.share("learner", "train", "sync", "checkpoint")
    enough = max(1, math.ceil(config.cluster.actors * (1 - held)))
    fewer = f", or use {enough} actor(s): they keep up" if enough < config.cluster.actors else ""
    blocked = window.share("learner", "sync", "checkpoint")
    note = f" (of that {blocked:.0%} publishing and saving)" if blocked > UPDATING else ""
    return Advice(
        "learner",
        f"the learner sets the pace: it works {working:.0%} of its time{note}, while actors wait "
        f"{held:.0%} of theirs for leases: add learner ranks to the {config.cluster.learners} there"
        f" are{fewer}",
        "cluster.learners", _faster(held),
    )  # fmt: skip


def _taken(window: Window, config: Config) -> float:
    """How full the engines are while they generate."""
    busy = window.share("actor", "generate", "reward", "put_wait", "sync")
    places = config.rollout.max_in_flight
    if capacity := window.means.get("queue/capacity"):
        places = min(places, max(1, int(capacity / config.cluster.actors)))
    return window.means.get("actor/in_flight", 0.0) / places / busy if busy else 1.0


def _starved(window: Window) -> str:
    return f"{window.share('learner', 'get_wait'):.0%}"


def _faster(part: float) -> float:
    """How many times as fast a run is that is rid of this part of its time."""
    return min(MOST_GAIN, 1 / max(1 - part, 1e-9))


# --- the data ------------------------------------------------------------------------------------


def _ess(window: Window, config: Config) -> Advice | None:
    text = ess_collapse(window.means)
    return None if text is None else Advice("ess", text, "buffer.max_staleness", None)


def _length(window: Window, config: Config) -> Advice | None:
    bias = window.means.get("samples/len_bias")
    if bias is None or bias > 1 - LENGTH_BIAS:
        return None
    cause, setting = "groups left out are the longer ones", "buffer.filter_zero_variance"
    if not config.buffer.filter_zero_variance:
        cause, setting = "long answers end after the others, or are lost", "rollout.lease_timeout_s"
    return Advice(
        "length",
        f"what is trained is {1 - bias:.0%} shorter than what is generated ({cause}): the policy "
        f"learns to be brief; look at {setting}",
        setting, None,
    )  # fmt: skip


def _alike(window: Window, config: Config) -> Advice | None:
    part, learner = window.lately.get("reward/zero_std_frac", 0.0), config.learner
    shaped = "reward/shaped_mean" in window.means  # rewards may differ after that
    if part <= ALIKE or shaped or not learner.advantage.relative:
        return None
    if config.buffer.filter_zero_variance:
        change, setting = "choose prompts that are neither solved nor out of reach", "task.kind"
    else:
        change = (
            "choose prompts that are neither solved nor out of reach, or leave such groups out "
            "(buffer.filter_zero_variance), so that other prompts fill the batch"
        )
        setting = "buffer.filter_zero_variance"
    return Advice(
        "alike",
        f"{part:.0%} of the groups of the last batches have rewards that are all equal: their "
        f"advantage is 0 and they teach nothing: {change}",
        setting, None,
    )  # fmt: skip


def _truncated(window: Window, config: Config) -> Advice | None:
    part = window.lately.get("rollout/truncated_frac", 0.0)
    if part <= TRUNCATED:
        return None
    return Advice(
        "truncated",
        f"{part:.0%} of the responses of the last batches end at rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens} rather than by themselves: raise it, or look at the "
        "samples (asyncrl samples --finish length): the policy may not know how to stop",
        "rollout.max_new_tokens", None,
    )  # fmt: skip


def as_json(advice: list[Advice]) -> list[Mapping[str, Any]]:
    """For summary.json and the web page: kind, text, setting, gain, and the whole line."""
    return [
        {"kind": a.kind, "text": a.text, "setting": a.setting, "gain": a.gain, "line": a.line()}
        for a in advice
    ]
