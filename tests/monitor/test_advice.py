"""Advice names the true bottleneck and what it would bring; windows add records up rightly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.load import load
from asyncrl.config.render import to_yaml
from asyncrl.config.schema import Config
from asyncrl.monitor.advice import advise, advise_run, as_json
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.window import Window, measure, of_history

RECORDED = Path(__file__).parent / "bottlenecks.json"
"""Windows of five real runs, each built to have one bottleneck: tests/runs/test_bottlenecks.py."""

BUSY = {"learner": {"train": 0.95, "get_wait": 0.05}, "actor": {"generate": 0.97, "get_wait": 0.03}}


def config(**sections):
    return Config.model_validate(sections)


def window(shares=BUSY, seconds=60.0, **means):
    return Window(seconds, shares, {k.replace("__", "/"): v for k, v in means.items()})


@pytest.mark.parametrize("kind", ["reward", "actors", "staleness", "learner", "tail"])
def test_the_bottleneck_of_a_real_run_is_named(kind):
    recorded = json.loads(RECORDED.read_text())[kind]
    found = advise(Window(**recorded["window"]), load("tiny", recorded["settings"], {}).config)
    assert found[0].kind == kind, found


def test_both_sides_busy_is_as_good_as_it_gets():
    assert advise(window(), config()) == []


def test_a_short_window_says_nothing():
    starved = {"learner": {"get_wait": 1.0}, "actor": {"generate": 1.0}}
    assert advise(window(starved), config())[0].kind == "actors"
    assert advise(window(starved, seconds=3.0), config()) == []


def test_gains_are_those_of_the_shares():
    shares = {"learner": {"train": 0.5, "get_wait": 0.5}, "actor": {"generate": 1.0}}
    (advice,) = advise(window(shares), config(cluster={"actors": 3}))
    assert (advice.kind, advice.setting, advice.gain) == ("actors", "cluster.actors", 2.0)
    assert "50% of its time" in advice.text
    assert "6 instead of 3" in advice.text
    shares = {
        "learner": {"train": 0.6, "get_wait": 0.4},
        "actor": {"generate": 0.5, "get_wait": 0.5},
    }
    (advice,) = advise(window(shares), config())
    assert (advice.kind, advice.setting) == ("staleness", "buffer.max_staleness")
    assert advice.gain == pytest.approx(1 / 0.6)
    shares = {"learner": {"train": 1.0}, "actor": {"generate": 0.4, "get_wait": 0.6}}
    (advice,) = advise(window(shares), config(cluster={"actors": 5}))
    assert (advice.kind, advice.gain) == ("learner", pytest.approx(2.5))
    assert "2 actor(s)" in advice.text
    assert "up to 2.5 times as fast" in advice.line()


def test_updates_that_hold_engines_up():
    shares = {"learner": {"train": 0.6, "get_wait": 0.4}, "actor": {"generate": 0.6, "sync": 0.4}}
    (advice,) = advise(window(shares), config())
    assert (advice.kind, advice.setting) == ("weights", "learner.batches_per_publication")
    assert advice.gain == pytest.approx(1 / 0.6)


def test_a_tail_is_one_only_while_engines_run_empty():
    shares = {"learner": {"train": 0.3, "get_wait": 0.7}, "actor": {"generate": 0.95}}
    lengths = {"rollout__response_tokens__mean": 100.0, "rollout__response_tokens__max": 420.0}
    few, full = {"actor__in_flight": 6.0}, {"actor__in_flight": 60.0}
    wide = config(buffer={"max_staleness": 1, "window": 9}, learner={"batch_size": 64})
    assert advise(window(shares, **lengths, **full), config())[0].kind == "actors"
    tail = advise(window(shares, **lengths, **few), config())[0]
    assert (tail.kind, tail.setting) == ("tail", "buffer.window")
    assert "4.2 times" in tail.text
    assert advise(window(shares, **lengths, **few), wide)[0].setting == "buffer.max_staleness"


def test_what_is_wrong_with_the_data_is_told_whatever_the_pace():
    found = advise(window(is__ess_frac=0.1, samples__len_bias=0.7), config())
    assert [a.kind for a in found] == ["ess", "length"]
    assert found[1].gain is None
    assert "30% shorter" in found[1].text
    assert [a["setting"] for a in as_json(found)] == [
        "buffer.max_staleness", "rollout.lease_timeout_s",
    ]  # fmt: skip


def test_batches_that_teach_nothing_are_told():
    alike = Window(60.0, BUSY, {}, {"reward/zero_std_frac": 0.75})
    (found,) = advise(alike, config())
    assert (found.kind, found.setting, found.gain) == ("alike", "buffer.filter_zero_variance", None)
    assert found.text.startswith("75% of the groups of the last batches have rewards that are all")
    (found,) = advise(alike, config(buffer={"filter_zero_variance": True}))
    assert (found.setting, "filter" in found.text) == ("task.kind", False)
    assert advise(alike, config(learner={"advantage": {"estimator": "gae"}})) == []
    assert advise(replace(alike, means={"reward/shaped_mean": 0.5}), config()) == []
    assert advise(replace(alike, lately={"reward/zero_std_frac": 0.5}), config()) == []


def test_responses_that_end_at_the_limit_are_told():
    cut = Window(60.0, BUSY, {}, {"rollout/truncated_frac": 0.9})
    (found,) = advise(cut, config(rollout={"max_new_tokens": 64}))
    assert (found.kind, found.setting) == ("truncated", "rollout.max_new_tokens")
    assert "90% of the responses" in found.text
    assert "rollout.max_new_tokens=64" in found.text
    assert advise(replace(cut, lately={"rollout/truncated_frac": 0.5}), config()) == []


def test_of_a_share_that_changes_the_last_batches_count():
    lines = [
        record("learner", 0, k, reward__zero_std_frac=0.0 if k < 20 else 1.0, queue__get_wait_s=1)
        for k in range(25)
    ]
    assert measure(lines).lately == {"reward/zero_std_frac": 0.5}, "of 10 batches"


def record(role, rank, wall_s, **metrics):
    named = {k.replace("__", "/"): float(v) for k, v in metrics.items()}
    return {"role": role, "rank": rank, "step": int(wall_s), "version": 0, "incarnation": 0,
            "run_id": "r", "wall_s": wall_s, "metrics": named, "hist": {}}  # fmt: skip


RECORDS = [
    record("actor", 0, 10.0, time__generate_s=4, time__idle_s=6, actor__in_flight=8),
    record("actor", 1, 10.0, time__generate_s=10, actor__in_flight=2),
    record("learner", 0, 11.0, time__train_s=1, time__idle_s=10, queue__get_wait_s=1,
           is__ess_frac=0.5),
    record("actor", 0, 20.0, time__generate_s=10, time__get_wait_s=4, time__idle_s=6,
           actor__in_flight=4),
    record("actor", 1, 15.0, time__generate_s=15, actor__in_flight=2),
    # actor-1 begins anew: what it did before its first record is its own, too.
    record("actor", 1, 18.0, time__idle_s=1, actor__in_flight=0),
    record("actor", 1, 21.0, time__idle_s=2, time__generate_s=2, actor__in_flight=4),
    record("buffer", 0, 21.0, samples__dispatched=64, samples__len_bias=0.9),
    record("learner", 0, 21.0, time__train_s=6, time__idle_s=15, queue__get_wait_s=2,
           is__ess_frac=0.7),
]  # fmt: skip


def check(found):
    assert found.seconds == pytest.approx(11.0)
    assert found.shares["actor"] == pytest.approx(
        {"generate": (6 + 5 + 2) / 19, "get_wait": 4 / 19, "idle": (1 + 1) / 19}
    )
    assert found.shares["learner"] == pytest.approx({"train": 0.5, "idle": 0.5})
    assert found.means["is/ess_frac"] == pytest.approx(0.6)
    assert found.means["actor/in_flight"] == pytest.approx((8 + 2 + 4 + 2 + 0 + 4) / 6)
    assert found.means["samples/len_bias"] == 0.9


def test_a_window_adds_up_what_processes_did():
    check(measure(sorted(RECORDS, key=lambda r: r["wall_s"])))


def test_a_run_s_files_give_the_same_window(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for line in sorted(RECORDS, key=lambda r: r["wall_s"]):
            file.write(json.dumps(line) + "\n")
    event = record("launcher", 0, 9.0) | {"event": "training"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    history = RunHistory(tmp_path)
    history.update()
    check(of_history(history))
    late = of_history(history, seconds=4.0)
    assert late.seconds == pytest.approx(3.0)
    assert late.shares["actor"] == pytest.approx({"generate": 2 / 3, "idle": 1 / 3})
    assert advise_run(tmp_path, history) == [], "without a configuration"
    (tmp_path / "config.yaml").write_text(to_yaml(Config()))  # as the launcher writes it
    starved = [replace_share(line) for line in RECORDS]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starved))
    history = RunHistory(tmp_path)
    history.update()
    assert advise_run(tmp_path, history)[0].kind == "staleness"


def replace_share(line):
    """The learner waits for data instead of training."""
    metrics = {k.replace("train", "get_wait"): v for k, v in line["metrics"].items()}
    return line | {"metrics": metrics}


def test_windows_are_values():
    assert replace(window(), seconds=1.0).share("learner", "train", "get_wait") == pytest.approx(1)
