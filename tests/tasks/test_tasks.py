"""Prompts: what they are, their order, and that held-out ones are never trained."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks import eval_prompts, make_prompts, make_source, prompts_end
from asyncrl.tasks.order import shuffled
from asyncrl.types import Prompt


def config(*overrides: str) -> Config:
    return load(None, overrides).config


def content(prompt: Prompt) -> str:
    assert prompt.messages is not None
    return prompt.messages[-1]["content"]


def operands(prompt: Prompt) -> tuple[int, int]:
    words = content(prompt).split()
    return int(words[2]), int(words[4].rstrip("?"))


@given(st.integers(1, 500), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_shuffle_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(n, seed, epoch)) == list(range(n))


def test_shuffle_depends_on_seed_epoch_and_purpose() -> None:
    orders = [
        list(shuffled(100, seed, epoch, purpose))
        for seed, epoch, purpose in [
            (0, 0, "train"),
            (1, 0, "train"),
            (0, 1, "train"),
            (0, 0, "eval"),
        ]
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    # Fixed for ever: a resumed run and another machine must see the same order.
    assert list(shuffled(8, 0, 0)) == [3, 1, 7, 4, 6, 0, 2, 5]


def test_arithmetic_prompts() -> None:
    c = config("task.max_operand=9", "eval.samples=10", "run.seed=3")
    source = make_source(c)
    train = list(islice(make_prompts(c), 2 * source.trainable()))
    for group, prompt in train:
        a, b = operands(prompt)
        assert content(prompt) == f"What is {a} + {b}? Answer with the number only."
        assert prompt.answer == str(a + b)
        assert 1 <= a <= 9
        assert 1 <= b <= 9
        assert group.source == "arithmetic"
    first, second = train[: source.trainable()], train[source.trainable() :]
    assert {g.epoch for g, _ in first} == {0}
    assert {g.epoch for g, _ in second} == {1}
    assert {g.index for g, _ in first} == {g.index for g, _ in second}
    assert len({g for g, _ in train}) == len(train)
    assert [g.index for g, _ in first] != [g.index for g, _ in second]
    assert list(islice(make_prompts(c), 20)) == train[:20]


def test_epochs_end_the_prompts_when_they_are_set() -> None:
    c = config("task.max_operand=5", "eval.samples=4", "stop.epochs=3")
    train = list(make_prompts(c))
    assert len(train) == 3 * make_source(c).trainable()
    assert [g.epoch for g, _ in train] == sorted(g.epoch for g, _ in train)
    endless = make_prompts(config("task.max_operand=5", "eval.samples=4"))
    assert list(islice(endless, len(train))) == train
    assert next(endless)[0].epoch == 3
    assert prompts_end(c) == "stop.epochs=3"
    assert prompts_end(config()) == ""


@pytest.mark.parametrize(("operand", "samples"), [(9, 10), (9, 54), (20, 256), (99, 256)])
def test_held_out_sums_are_never_trained_in_either_order(operand: int, samples: int) -> None:
    c = config(f"task.max_operand={operand}", f"eval.samples={samples}")
    asked = [operands(p) for _, p in eval_prompts(c)]
    assert len(set(asked)) == len(asked) == samples
    held = {tuple(sorted(pair)) for pair in asked}
    train = {operands(p) for _, p in islice(make_prompts(c), make_source(c).trainable())}
    assert not held & {tuple(sorted(pair)) for pair in train}
    assert len(train) + sum(1 if a == b else 2 for a, b in held) == operand**2


def test_eval_prompts_do_not_depend_on_the_seed_and_have_their_own_source() -> None:
    one, two = (eval_prompts(config("eval.samples=16", f"run.seed={s}")) for s in (0, 1))
    assert one == two
    assert {g.source for g, _ in one} == {"eval:arithmetic"}
    assert [g.index for g, _ in one] == list(range(16))
    assert eval_prompts(config()) == []


def test_a_large_operand_needs_no_list() -> None:
    c = config("task.max_operand=2000000000", "eval.samples=8")
    assert len(eval_prompts(c)) == 8
    assert len({g for g, _ in islice(make_prompts(c), 50)}) == 50


def test_even_digits_prompts() -> None:
    c = config("task.kind=even_digits", "eval.samples=32")
    held = {content(p) for _, p in eval_prompts(c)}
    train = {content(p) for _, p in islice(make_prompts(c), 500)}
    assert len(held) == 32
    assert len(train) == 224
    assert not held & train


def test_template_system_turn_and_plain_text() -> None:
    def first(*overrides: str) -> Prompt:
        return next(make_prompts(config(*overrides)))[1]

    assert content(first("task.prompt_template=Q: {prompt} {x}")).startswith("Q: What is ")
    assert first("task.system_prompt=").messages[0] == {"role": "system", "content": ""}  # type: ignore[index]
    assert [m["role"] for m in first().messages or []] == ["user"]
    plain = first("task.chat=false", "task.prompt_template={prompt}\nA:")
    assert plain.messages is None
    assert plain.text is not None
    assert plain.text.endswith("only.\nA:")


# --- jsonl ------------------------------------------------------------------------------------


def rows(path: Path, *lines: Any, raw: bytes | None = None) -> str:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_bytes(raw if raw is not None else text.encode())
    return str(path)


def jsonl(path: str, *overrides: str) -> Config:
    return config("task.kind=jsonl", f"task.path={path}", *overrides)


def test_jsonl_reads_columns_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    raw = (
        b'\xef\xbb\xbf{"question": "a\\u2028b", "answer": 7, "level": {"n": [1, null]}}\r\n\r\n  \n'
        b'{"question": "c", "answer": "x #### 8"}'
    )
    source = make_source(jsonl(rows(path, raw=raw)))
    assert source.size == 2
    assert (source.prompt(0).answer, source.prompt(1).answer) == ("7", "x #### 8")
    assert content(source.prompt(0)) == "a\u2028b"
    assert source.prompt(0).extra == {"level": {"n": [1, None]}}
    assert source.name == "p.jsonl"


def test_jsonl_messages_other_columns_and_no_answer(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"},
             {"role": "user", "content": "sum", "name": "x"}]  # fmt: skip
    path = rows(tmp_path / "p.jsonl", {"chat": turns, "question": "extra"})
    c = jsonl(path, "task.prompt_field=chat", "task.answer_field=null", "task.reward=m:f",
              "task.system_prompt=Be brief.", "task.prompt_template=<{prompt}>")  # fmt: skip
    prompt = make_source(c).prompt(0)
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."}, *turns[:2], {"role": "user", "content": "<sum>"}
    ]  # fmt: skip
    assert prompt.answer is None
    assert prompt.extra == {"question": "extra"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "a", "answer": "1"', ":2: malformed JSON at column 32: Expecting ',' delim"),
        ("[1]", ":2: expected a JSON object, got [1]"),
        ('{"qestion": "a", "answer": "1"}', ":2: no column 'question', which task.prompt_field "
         "names (did you mean qestion?)"),
        ('{"question": "a", "x": "1"}', ":2: no column 'answer', which task.answer_field names "
         "(columns: question, x)"),
        ('{"question": "  ", "answer": "1"}', ":2: 'question' is empty"),
        ('{"question": 5, "answer": "1"}', ":2: 'question' is 5, expected text or chat messages"),
        ('{"question": [], "answer": "1"}', ":2: 'question' is [], expected text"),
        ('{"question": [{"role": "user"}], "answer": "1"}', ":2: 'question': each message must be"),
        ('{"question": "a", "answer": null}', ":2: 'answer' is null, expected text or a number"),
        ('{"question": "a", "answer": true}', ":2: 'answer' is true, expected text or a number"),
        ('{"question": "a", "answer": NaN}', ":2: malformed JSON: NaN is not JSON"),
        ('{"question": "a", "answer": "1", "x": 99999999999999999999}', ":2: holds a value that"),
        ('{"question": "\\ud800", "answer": "1"}', ":2: holds a value that cannot be sent on"),
        ("[" * 100_000, ":2: malformed JSON"),
    ],
)  # fmt: skip
def test_jsonl_bad_lines_name_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    path = rows(tmp_path / "p.jsonl", {"question": "ok", "answer": "1"}, line)
    with pytest.raises(DataError) as e:
        make_prompts(jsonl(path))
    assert str(e.value).startswith(path + expected)


def test_jsonl_bad_bytes_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = rows(tmp_path / "p.jsonl", raw=b'\n{"question": "\xff", "answer": 1}\n')
    cases = {
        path: f"{path}:2: byte 0xff is not UTF-8",
        "none.jsonl": f"task.path=none.jsonl: no such file (looked in {tmp_path})",
        str(tmp_path): f"task.path={tmp_path}: cannot be read: Is a directory",
        rows(tmp_path / "e.jsonl", " ", ""): "the file has no prompts: a batch could never fill",
    }
    for given_path, expected in cases.items():
        with pytest.raises(DataError) as e:
            make_source(jsonl(given_path))
        assert expected in str(e.value)


def test_jsonl_system_turns_contradict(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = rows(tmp_path / "p.jsonl", {"question": turns, "answer": "1"})
    make_source(jsonl(path))
    with pytest.raises(DataError, match="has a system turn and task.system_prompt is set"):
        make_source(jsonl(path, "task.system_prompt=x"))
    with pytest.raises(DataError, match="which task.chat=false cannot render"):
        make_source(jsonl(path, "task.chat=false"))


def test_jsonl_rows_that_are_evaluated_are_not_trained(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", *({"question": f"q{i}", "answer": str(i)} for i in range(6)))
    c = jsonl(path, "eval.samples=2", f"eval.path={path}")
    assert [content(p) for _, p in eval_prompts(c)] == ["q0", "q1"]
    assert {content(p) for _, p in islice(make_prompts(c), 12)} == {"q2", "q3", "q4", "q5"}
    with pytest.raises(ConfigError, match="has only 6 prompts: lower it to 6"):
        make_source(jsonl(path, "eval.samples=7", f"eval.path={path}"))
    with pytest.raises(ConfigError, match="none is left to train on"):
        make_source(jsonl(path, "eval.samples=6", f"eval.path={path}"))
