"""The last samples of a recording, as the page shows them."""

import msgspec
import pytest

from asyncrl import wire
from asyncrl.models import resolve
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.recent import recent_samples
from asyncrl.recording import Entry, encode_sample
from asyncrl.types import GroupId, Lease, Prompt, Version
from tests.buffer.samples import trajectory

V0 = Version(0, 0)


@pytest.fixture
def recorded(tmp_path):
    """Writes samples (group, number, outcome) as a buffer would; the trajectories."""
    folder = tmp_path / "trajectories"
    folder.mkdir()

    def write(*samples):
        sent = []
        with (
            open(folder / "000001.frames", "ab") as frames,
            open(folder / "index.jsonl", "ab") as index,
        ):
            for group, k, outcome in samples:
                lease = Lease(1, GroupId("p", 0, group), (k,), V0, 60.0, Prompt(text="?"))
                sent.append(trajectory(lease, k, "actor-0", reward=0.5))
                h, data = sent[-1].header, encode_sample(wire.pack_trajectory(sent[-1]))
                trained = outcome == "trained"
                entry = Entry(
                    id=h.id, lease=1, actor="actor-0", version_min=V0, version_max=V0,
                    outcome=outcome, incarnation=0, version=2 if trained else None,
                    batch=3 if trained else None, rank=0, position=0, reward=h.reward,
                    file="000001.frames", offset=frames.tell(), bytes=len(data), time=0.0,
                )  # fmt: skip
                frames.write(data)
                index.write(msgspec.json.encode(entry) + b"\n")
        return sent

    return write


def test_what_was_never_trained_is_shown_as_that_after_what_was_settled(recorded, tmp_path):
    recorded(*((g, 0, "trained") for g in range(3)), (7, 0, "failed"),
             *((8, k, "held") for k in range(4)), (9, 0, "held"))  # fmt: skip
    for only, expected in (
        ("", [7, 2, 1, 0, 9, 8, 8]), ("trained", [2, 1, 0]), ("other", [7, 9, 8, 8])
    ):  # fmt: skip
        found = recent_samples(tmp_path, 8, only)
        assert [s.entry.id.index for s in found] == expected
    assert panels.samples(tmp_path, "other")[1]["head"].startswith("held, reward 0.500; actor-0")
    recorded((9, 0, "trained"))  # by the launch that went on
    assert [s.entry.id.index for s in recent_samples(tmp_path, 8, "other")] == [7, 8, 8]


def test_the_newest_come_first_two_of_a_group_and_before_those_that_were_held(recorded, tmp_path):
    recorded(*((g, k, "trained") for g in range(3) for k in range(4)), (9, 0, "held"))
    found = recent_samples(tmp_path, 4)
    assert [(s.entry.id.index, s.entry.id.sample) for s in found] == [
        (2, 3), (2, 2), (1, 3), (1, 2)
    ]  # fmt: skip
    with open(tmp_path / "trajectories" / "index.jsonl", "ab") as file:
        file.write(b'{"no": "entry"}\n{"torn')
    assert len(recent_samples(tmp_path, 4)) == 4
    (tmp_path / "trajectories" / "000001.frames").write_bytes(b"")
    assert recent_samples(tmp_path, 4) == []


def test_tokens_are_text_with_the_run_s_tokenizer_and_numbers_without(recorded, tmp_path):
    (sample,) = recorded((0, 0, "trained"))
    numbers = " ".join(map(str, sample.response_ids.tolist()))
    assert recent_samples(tmp_path, 1)[0].response == numbers
    shown = panels.samples(tmp_path)[0]
    assert shown["head"] == "trained, batch 3, reward 0.500, 2 behind; actor-0, p:0:0:0"
    (tmp_path / "config.yaml").write_text(f"model: {{name: {resolve('tiny')}}}\n")
    assert recent_samples(tmp_path, 1)[0].response != numbers
    assert not recent_samples(tmp_path, 1)[0].response.replace(" ", "").isdecimal()


def test_where_nothing_is_recorded_there_is_nothing(tmp_path):
    assert recent_samples(tmp_path, 4) == []
