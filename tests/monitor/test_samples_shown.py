"""`asyncrl samples`: one sample in full, a group side by side, and text of any kind."""

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from asyncrl.monitor.samples import show
from asyncrl.monitor.samples.search import Search
from asyncrl.monitor.samples.texts import Texts, pieces
from asyncrl.monitor.samples.wanted import Wanted
from asyncrl.types import GroupId, Version
from tests.helpers.recorded import RecordedRun
from tests.helpers.samples_checks import printed


@pytest.fixture
def fresh(tmp_path):
    return RecordedRun(tmp_path)


def shown(sample, run, by):
    """As on a terminal with colours."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=300)
    for part in show.show(sample, Texts(run.folder), by):
        console.print(part, soft_wrap=True)
    return console.file.getvalue()


def test_tokens_are_coloured_by_probability_and_by_version(fresh):
    v3, v4 = Version(0, 3), Version(1, 4)
    fresh.trained(fresh.sample(
        0, 0, response="abcde", versions=[v3, v3, v4, None, v4],
        logprobs=[math.log(0.95), math.log(0.2), -9.0, math.nan, math.log(0.6)],
    ), version=5, incarnation=1)  # fmt: skip
    (sample,) = Search(fresh.folder, Wanted(), Texts(fresh.folder))
    text = shown(sample, fresh, "logprob")
    green, yellow, worst, dim = "\x1b[32m", "\x1b[33m", "\x1b[1;37;41m", "\x1b[2;35m"
    assert f"a{yellow}b\x1b[0m{worst}c\x1b[0m{dim}d\x1b[0m{green}e\x1b[0m\n" in text
    assert (
        f"probability: 9 in 10 or more (1), {green}from 1 in 2\x1b[0m (1), "
        f"{yellow}from 1 in 10\x1b[0m (1), {worst}less\x1b[0m (1), \x1b[35mnot known\x1b[0m (1); "
        "\x1b[2mdim\x1b[0m: not trained (1)"
    ) in text
    assert "behind 2 (newest token 1), versions 0:3 to 1:4" in text
    mean = (math.log(0.95) + math.log(0.2) - 9 + math.log(0.6)) / 4
    assert f"mean log-prob {mean:.4g}," in text
    text = shown(sample, fresh, "version")
    cyan = "\x1b[36m"
    tokens = [(cyan, "a"), (cyan, "b"), (yellow, "c"), ("\x1b[2m", "d"), (yellow, "e")]
    assert "".join(f"{style}{c}\x1b[0m" for style, c in tokens) in text
    assert f"version: {cyan}0:3\x1b[0m (2), {yellow}1:4\x1b[0m (2), no version" in text
    plain = printed(fresh, "one", "p:q:0:0:0", "logprob", tokens=True)
    assert [line.split() for line in plain.splitlines()[-2:]] == [
        ["3", str(fresh.ids("d")[0]), "nan", "-", "0", "'d'"],
        ["4", str(fresh.ids("e")[0]), f"{math.log(0.6):.4f}", "1:4", "1", "'e'"],
    ]


def test_the_mean_log_prob_is_that_of_trained_tokens(fresh):
    sample = fresh.sample(0, 0, response="abc", logprobs=[-1, -3, -50], mask=[1, 1, 0])
    assert show.mean_logprob(sample) == -2


def test_what_a_model_writes_cannot_play_with_the_terminal(fresh):
    evil = "ok\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202egone"
    fresh.trained(fresh.sample(0, 0, prompt=evil, response=evil, actor="a\x1b[1m"))
    outs = [printed(fresh, "one", "p:q:0:0:0", "logprob", tokens=True),
            printed(fresh, "group", "p:q:0:0"), printed(fresh, "table", "order", None)]  # fmt: skip
    for out in outs:
        assert "ok" in out
        assert not set("\x1b\x07\x9b\r\u202e") & set(out)
    assert "ok\\x1b]0;owned\\x07" in outs[0]


@pytest.mark.parametrize("text", ["plain", "é€🙂 and 🙂", "€", "a\n\tb"])
def test_pieces_joined_are_the_text_and_a_character_comes_whole(fresh, text):
    decode = Texts(fresh.folder).decode
    ids = fresh.ids(text)
    split = pieces(decode, ids)
    assert len(split) == len(ids) == len(text.encode())
    assert "".join(split) == text
    assert [piece for piece in split if piece] == list(text)


def test_a_line_of_the_table_fits_whatever_is_written(fresh, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    fresh.trained(*(
        fresh.sample(0, k, response=text, actor="演員-0" if k else "actor-0")
        for k, text in enumerate(["漢字" * 40, "two\nlines", r"a\n is no line end", "x" * 200])
    ))  # fmt: skip
    lines = printed(fresh, "table", "order", None).split("\n")[:5]
    assert max(map(cell_len, lines)) <= 100
    assert lines[2].endswith("two↵lines")
    assert lines[3].endswith(r"a\n is no line end")
    starts = [cell_len(line[: line.rindex("  ")]) for line in lines[1:]]
    assert len(set(starts)) == 1, "columns stand below one another"


def test_bytes_that_are_no_text_do_not_hold_up_the_rest(fresh):
    decode, euro = Texts(fresh.folder).decode, fresh.ids("€")
    longest = 0

    def counting(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    split = pieces(counting, [euro[1]] * 400 + fresh.ids("end"))
    assert "".join(split).endswith("end")
    assert longest <= 8


def test_a_group_is_side_by_side(fresh, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fresh.trained(*(
        fresh.sample(4, k, response=word, reward=k / 4, versions=[Version(0, k)] * len(word))
        for k, word in enumerate(["zero", "one", "two"])
    ), fresh.sample(5, 0, response="other"))  # fmt: skip
    lines = [line.split() for line in printed(fresh, "group", "p:q:0:4",
             wanted=Wanted(group=GroupId("p:q", 0, 4))).splitlines()]  # fmt: skip
    assert lines[:2] == [["prompt"], ["Say", "it."]]
    for row in ("sample 0 1", "reward 0 0.25", "tokens 4 3", "response zero one", "sample 2",
                "response two", "behind 2 (newest token 2) 1 (newest token 1)"):  # fmt: skip
        assert row.split() in lines
    assert not any("other" in line for line in lines)
