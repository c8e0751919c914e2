"""`asyncrl replay` of a small run: a learner alone, and what makes a replay impossible.

Two ranks, and a real run, are in tests/runs.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from asyncrl import wire
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.checkpoints import Meta, partial, seal
from asyncrl.config.load import load
from asyncrl.config.render import to_yaml
from asyncrl.errors import DataError, ModelError, UserError
from asyncrl.launch.replay import Wish, replay
from asyncrl.launch.replay.compare import different
from asyncrl.launch.replay.past import read_past
from asyncrl.launch.replay.plan import read_batches
from asyncrl.launch.scratch import OWNER
from asyncrl.learner.step import Trainer
from asyncrl.recording import Retired
from asyncrl.types import BatchPart, Version
from tests.helpers.tiny_model import make_batch, save_tiny_model

STEPS, GROUPS, SIZE = 3, 2, 4
SETTINGS = [
    "rollout.group_size=4", "learner.batch_size=8", "run.steps=3", "learner.dtype=float32",
    "engine.dtype=float32", "learner.optim.lr=1e-2", "cluster.device=cpu",
]  # fmt: skip


def samples(k, seed):
    """Batch k: what groups 2 (k - 1) and on of the prompts gave."""
    for t in make_batch(seed, GROUPS, SIZE):
        id = t.header.id._replace(index=t.header.id.index + GROUPS * (k - 1))
        yield replace(t, header=replace(t.header, id=id, lease=id.index))


def write(run, batches):
    """Record (batch, incarnation, samples), the samples not in their order."""
    writer = TrajectoryWriter(run / "trajectories", max_bytes=1 << 30)
    for k, incarnation, batch in batches:
        writer.put(
            Retired(
                wire.pack_trajectory(t), "trained", incarnation, version=k - 1, batch=k, rank=0,
                position=t.header.id.index,
            )
            for t in reversed(batch)
        )  # fmt: skip
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def past(tmp_path_factory, model):
    """The folder of a run of three steps, the second and third trained twice, and its weights."""
    run = tmp_path_factory.mktemp("runs") / "r"
    config = load(None, SETTINGS).config
    (run / "trajectories").mkdir(parents=True)
    (run / "config.yaml").write_text(f"# Resolved by asyncrl\n{to_yaml(config)}")
    lost = [(k, 0, list(samples(k, 90 + k))) for k in (2, 3)]  # of a lineage that was given up
    kept = [(k, int(k > 1), list(samples(k, k))) for k in range(1, STEPS + 1)]
    write(run, [kept[0], *lost, *kept[1:]])
    threads = torch.get_num_threads()
    events = [{"run_id": "r-1", "event": "placed", "name": "learner-0", "threads": threads}]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (run / "summary.json").write_text(json.dumps({"steps": STEPS, "ended": "finished"}))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainer = Trainer(config, model, rank=0, world=1, device="cpu")
    with open(run / "metrics.jsonl", "w") as file:
        for k, incarnation, batch in kept:
            envelopes = tuple(map(wire.pack_trajectory, batch))
            part = BatchPart(
                k, 0, tuple(t.header for t in batch), tuple(range(len(batch))), envelopes,
                len(batch),
            )  # fmt: skip
            metrics = dict(trainer.train(part, Version(incarnation, k - 1)).metrics)
            record = {"role": "learner", "rank": 0, "step": k, "incarnation": incarnation}
            file.write(json.dumps(record | {"metrics": metrics}) + "\n")
    trainer.save_hf(run / "checkpoints" / "final")
    dist.destroy_process_group()
    return run


@pytest.fixture
def run(tmp_path, past, model, monkeypatch):
    """A copy of it that the test may spoil."""
    monkeypatch.setattr("asyncrl.models.resolve", lambda name: model)
    return shutil.copytree(past, tmp_path / "r")


@pytest.fixture
def said():
    return []


def test_the_weights_are_the_run_s_bit_for_bit(run, said, tmp_path):
    out = tmp_path / "out"
    assert replay(run, Wish(check=True, out=str(out)), said.append) == 0
    assert said[-1] == "check: after step 3 every bit of the weights is that of the final model"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert [r["incarnation"] for r in records] == [0, 1, 1]
    assert (out / "model" / "config.json").exists()


def test_a_flipped_bit_is_noticed_and_the_step_is_named(run, said):
    entry = next(b for b in read_batches(run, 2, 2))
    e = entry.samples[0].entry
    frames = run / "trajectories" / e.file
    data = bytearray(frames.read_bytes())
    tokens = entry.samples[0].envelope().header
    # The first behaviour log-probability; the lowest bit of its mantissa.
    payload = e.offset + e.bytes - entry.samples[0].envelope().nbytes
    data[payload + 4 * tokens.prompt_tokens + 4 * tokens.response_tokens] ^= 1
    frames.write_bytes(data)
    with pytest.raises(DataError, match="they are damaged"):
        replay(run, Wish(check=True), said.append)
    index = run / "trajectories" / "index.jsonl"  # as before there were checksums
    index.write_text(re.sub(r',"crc":\d+', "", index.read_text()))
    assert replay(run, Wish(check=True), said.append) == 1
    assert "came out otherwise: step 2, " in said[-1]


def test_weights_are_compared_bit_for_bit(run, tmp_path):
    one, other = run / "checkpoints" / "final", tmp_path / "other"
    shutil.copytree(one, other)
    assert different(one, other) == []
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(different(one, other)) == 1
    path.write_bytes(data[:5])
    with pytest.raises(ModelError, match="cannot be compared"):
        different(one, other)


def test_another_loss_on_the_same_data(run, said, tmp_path):
    wish = Wish(overrides=("learner.loss.policy=reinforce",), out=str(tmp_path / "out"))
    assert replay(run, wish, said.append) == 0
    then, now = (
        [
            json.loads(line)["metrics"]
            for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]
        ]
        for folder in (run, tmp_path / "out")
    )
    assert then[0]["loss/tokens"] == now[0]["loss/tokens"]
    assert then[0]["loss/policy"] != now[0]["loss/policy"]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(check=True, overrides=("learner.optim.lr=1e-3",)), "leave one of them out"),
        (Wish(overrides=("rollout.temperature=0.5",)), "the recording fixes it"),
        (Wish(overrides=("learner.batch_size=16",)), "the recording fixes it"),
        (Wish(steps=4), "has trained 3"),
        (Wish(check=True, steps=2), "kept no weights of step 2"),
        (Wish(check=True, learners=2), "2 ranks instead of the run's 1"),
        (Wish(out="{run}"), "exists and is not an empty folder"),
        (Wish(from_step=1), "has no checkpoints"),
    ],
)
def test_what_cannot_be_asked_for(run, said, wish, words):
    if wish.out is not None:
        wish = replace(wish, out=str(run))
    with pytest.raises(Exception, match=words) as e:
        replay(run, wish, said.append)
    assert getattr(e.value, "exit_code", 1) == 2
    assert said == []


def without(run, condition):
    """Remove the index lines for which the condition holds."""
    index = run / "trajectories" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(line for line in lines if not condition(json.loads(line))))


def test_what_the_recording_lacks_is_said(run, said):
    counts = Counter()

    def third_of_batch_2(entry):
        counts[entry["batch"], entry["incarnation"]] += 1
        return counts[2, 1] == 3 and (entry["batch"], entry["incarnation"]) == (2, 1)

    without(run, third_of_batch_2)
    with pytest.raises(DataError, match=r"batch 2 has loss/tokens .* samples of it are missing"):
        replay(run, Wish(), said.append)
    without(run, lambda entry: entry["batch"] == 3)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "recording_ended", "reason": "record.max_gib=1 is reached"}\n')
    with pytest.raises(DataError, match=r"has no batch 3, .* \(record.max_gib=1 is reached\)"):
        replay(run, Wish(), said.append)
    shutil.rmtree(run / "trajectories")
    with pytest.raises(DataError, match="no recording can be read there"):
        replay(run, Wish(), said.append)


def went_back(run, *bases):
    """What lineage.json has after resumes: [incarnation, that of its checkpoint, batch] each."""
    told = {"incarnation": bases[-1][0], "bases": bases}
    (run / "lineage.json").write_text(json.dumps(told))


def incarnations(run, last):
    return [b.version.incarnation for b in read_batches(run, 1, last)]


def test_batches_of_a_branch_that_was_left_are_not_taken(run, said):
    assert incarnations(run, 3) == [0, 1, 1]
    went_back(run, [1, 0, 1], [2, 0, 2])  # it went on from batch 2 of the first branch
    assert incarnations(run, 2) == [0, 0]
    with pytest.raises(DataError, match="has no batch 3 of its own line, only one of a branch"):
        replay(run, Wish(), said.append)
    went_back(run, [1, 0, 1])  # and was killed when it had trained batch 2 once more
    without(run, lambda entry: (entry["batch"], entry["incarnation"]) == (3, 1))
    assert incarnations(run, 2) == [0, 1]
    with pytest.raises(DataError, match="has no batch 3 of its own line, only one of a branch"):
        replay(run, Wish(), said.append)
    (run / "lineage.json").unlink()  # an older run: what was trained before cannot follow
    with pytest.raises(DataError, match="has no batch 3 of its own line, only one of a branch"):
        replay(run, Wish(), said.append)


def test_a_checkpoint_of_a_branch_that_was_left_is_no_beginning(run, said):
    for step, incarnation in ((1, 0), (2, 0), (3, 1)):
        folder = partial(run, step, incarnation)
        folder.mkdir(parents=True)
        seal(folder, Meta(step, step, incarnation, 1, "r-1"))
    went_back(run, [1, 0, 1])
    with pytest.raises(UserError) as e:
        replay(run, Wish(from_step=2), said.append)
    assert str(e.value) == (
        "--from-step 2: step-000002 is of a branch that the run left at batch 1, the batches after "
        "it were trained from other weights: name one of steps 1, 3"
    )
    assert read_past(run, (), 1, None).first == 2
    assert read_past(run, (), None, 2).end is None, "nor one to compare with"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000003")
    assert read_past(run, (), None, None).last == 1, "killed: the line's newest checkpoint"


def test_what_was_changed_and_measured_on_a_branch_that_was_left_matters_not(run):
    changed = {"event": "resumed", "incarnation": 1, "batch": 1,
               "changes": [{"field": "learner.optim.lr", "was": 1, "is": 2}]}  # fmt: skip
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(changed) + "\n")
    past = read_past(run, (), None, 3)
    assert (len(past.inexact), past.told.keys()) == (1, {1, 2, 3})
    went_back(run, [1, 0, 1], [2, 0, 1])
    past = read_past(run, (), None, 3)
    assert (past.inexact, past.told.keys()) == ((), {1})


@pytest.mark.parametrize("steps", ['"x"', "1.5", "true"])
def test_a_summary_without_a_number_is_named(tmp_path, steps):
    (tmp_path / "config.yaml").write_text(to_yaml(load(None, SETTINGS).config))
    (tmp_path / "summary.json").write_text(f'{{"steps": {steps}}}')
    with pytest.raises(DataError, match=rf"summary\.json: steps is {steps}, no whole number: res"):
        read_past(tmp_path, (), None, None)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "record.trajectories=false",
            "has no recording, record.trajectories=false: launch with true",
        ),
        (
            "replay.fraction=0.5",
            "trained samples again, replay.fraction=0.5: which ones came with which batch is not "
            "recorded: launch with replay.fraction=0 for a run that can be replayed",
        ),
    ],
)
def test_a_run_that_cannot_be_replayed(run, said, setting, words):
    config = load(None, [*SETTINGS, setting]).config
    (run / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError) as e:
        replay(run, Wish(), said.append)
    assert str(e.value) == f"{run} {words}"


def test_a_replay_removes_what_a_killed_one_left_and_its_own(run, said, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    left = tmp_path / "tmp" / "asyncrl-replay-left"
    (left / "out").mkdir(parents=True)
    (left / OWNER).touch()
    assert replay(run, Wish(steps=1), said.append) == 0
    assert list((tmp_path / "tmp").iterdir()) == []
