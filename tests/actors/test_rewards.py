"""Reward functions, and the worker that runs them where they may hang or crash."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actors.rewards import RewardWorker, resolve_reward, reward_spec
from asyncrl.actors.rewards.functions import even_digits, find_last_number, last_number
from asyncrl.config.schema import TaskConfig
from asyncrl.errors import RewardError, RewardTimeout, UserError
from asyncrl.types import Prompt

ROOT = Path(__file__).parents[2]
RUNNERS: list[Callable[[Coroutine[Any, Any, None]], None]] = [asyncio.run, uvloop.run]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72), ("72.", 72), ("72.0", 72), ("It is $1,234.50.", Fraction("1234.5")),
        ("-5", -5), ("$-5", -5), ("-$5", -5), ("\N{MINUS SIGN}5", -5), ("5-3", 3), ("x -3", -3),
        ("4 + 9 = 13", 13), ("1,2,3", 3), ("1,000,000", 1_000_000), ("10{,}000", 10_000),
        ("3/4", Fraction(3, 4)), (".5", Fraction(1, 2)), ("1/0", None), ("50%", 50),
        ("\\boxed{42}", 42), ("", None), ("none", None), ("- $ , . /", None), ("+7", 7),
        ("9" * 500, None), ("٣", None), ("a.b", None), ("007", 7),
    ],
)  # fmt: skip
def test_the_last_number(text: str, value: Fraction | None) -> None:
    assert find_last_number(text) == value


@settings(deadline=None)
@given(
    st.integers(-(10**15), 10**15), st.sampled_from(["{}", "{}.", "{}.00", "${}", "= {} apples"])
)
def test_numbers_are_compared_by_value(n: int, form: str) -> None:
    grouped = form.format(f"{n:,}")
    assert find_last_number(f"first 12, then {grouped}") == n
    assert last_number(Prompt(answer=f"work\n#### {n}"), grouped, "stop") == 1.0
    assert last_number(Prompt(answer=f"work\n#### {n + 1}"), grouped, "stop") == 0.0


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_scored(text: str) -> None:
    assert last_number(Prompt(answer="5"), text, "stop") in (0.0, 1.0)
    assert 0.0 <= even_digits(Prompt(), text, "stop") <= 1.0


def test_ground_truth_of_gsm8k_and_none() -> None:
    prompt = Prompt(answer="48/2 = <<48/2=24>>24\n#### 1,072")
    assert last_number(prompt, "so the answer is $1072.00.", "stop") == 1.0
    assert last_number(prompt, "24", "stop") == 0.0
    for answer in (None, "no number", "5 #### none"):
        with pytest.raises(RewardError, match="has no number to compare with"):
            last_number(Prompt(answer=answer), "5", "stop")


@pytest.mark.parametrize(
    ("text", "share"), [("", 0), ("abc", 0), ("13", 0), ("2468", 1), ("1 2", 0.5)]
)
def test_even_digits(text: str, share: float) -> None:
    assert even_digits(Prompt(), text, "length") == share


def test_names() -> None:
    assert reward_spec(TaskConfig()) == "last_number"
    assert reward_spec(TaskConfig(kind="jsonl")) == "last_number"
    assert reward_spec(TaskConfig(kind="even_digits")) == "even_digits"
    assert reward_spec(TaskConfig(reward="a:b")) == "a:b"
    assert resolve_reward("even_digits") is even_digits
    with pytest.raises(UserError, match="expected last_number, even_digits or module:function"):
        resolve_reward("nothing")


MODULE = """
import ctypes, os, signal, subprocess, sys, time

def act(prompt, response, finish_reason):
    match response:
        case "hang": time.sleep(1000)
        case "hang-with-child":
            grandchild = subprocess.Popen(["sleep", "1000"])
            open(prompt.extra["pid_file"], "w").write(str(grandchild.pid))
            time.sleep(1000)
        case "exit": os._exit(3)
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "nan": return float("nan")
        case "none": return None
        case "text": return "1.0"
        case "raise": raise ValueError("bad\\nthing")
        case "sys.exit": sys.exit(4)
        case "async":
            async def later(): return 1.0
            return later()
        case "noise":
            print("x" * 100_000); os.write(1, b"raw"); sys.stdout.write("y"); sys.stdout.flush()
        case "stdin": return float(len(sys.stdin.read()))
        case "heavy": return float(bool({"torch", "vllm", "ray"} & set(sys.modules)))
        case "extra": return prompt.extra["n"] + len(prompt.messages) + len(finish_reason)
        case "pid": return os.getpid()
        case "bool": return True
    return 1.0

class Table:
    @staticmethod
    def method(prompt, response, finish_reason): return 7

number = 3
def one_argument(prompt): return 1.0
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_reward.py").write_text(MODULE)
    (tmp_path / "user_broken.py").write_text("import sys\nsys.exit('no')\n")
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def worker(timeout_s: float = 60.0, size: int = 1) -> AsyncIterator[RewardWorker]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    made = RewardWorker(
        TaskConfig(reward="user_reward:act", reward_timeout_s=timeout_s, reward_workers=size)
    )
    try:
        yield made
    finally:
        await made.close()
        after = {p.pid for p in psutil.Process().children(recursive=True)}
        assert after <= before


async def act(w: RewardWorker, what: str, **extra: Any) -> float:
    prompt = Prompt(messages=[{"role": "user", "content": "q"}], extra=extra)
    return await w.score(prompt, what, "stop")


FAILURES = [
    ("exit", "its process ended with exit code 3"),
    ("crash", "its process died of signal 11"),
    ("nan", "ValueError: returned nan, expected a finite number"),
    ("none", "TypeError: returned None (NoneType), expected a number"),
    ("text", "TypeError: returned '1.0' (str), expected a number"),
    ("raise", "ValueError: bad thing"),
    ("sys.exit", "SystemExit: 4"),
    ("async", "returned a coroutine: make it a plain function"),
]


@pytest.mark.parametrize("run", RUNNERS)
def test_failures_are_reported_and_survived(run: Callable[..., None]) -> None:
    async def main() -> None:
        async with worker() as w:
            for what, expected in FAILURES:
                with pytest.raises(RewardError) as e:
                    await act(w, what)
                assert expected in str(e.value)
                assert "user_reward:act" in str(e.value)
                assert await act(w, "fine") == 1.0
            assert (w.timeouts, w.errors, w.restarts) == (0, len(FAILURES), 2)
            assert w.no_number == 4, "nan, none, text, async"

    run(main())


@pytest.mark.parametrize("run", RUNNERS)
def test_what_the_function_prints_reads_and_imports(run: Callable[..., None]) -> None:
    async def main() -> None:
        async with worker() as w:
            assert await act(w, "noise") == 1.0
            assert await act(w, "stdin") == 0.0
            assert await act(w, "heavy") == 0.0
            assert await act(w, "extra", n=10) == 15.0
            assert await act(w, "bool") == 1.0
            assert w.errors == 0

    run(main())


@pytest.mark.parametrize("run", RUNNERS)
def test_a_function_that_hangs_is_killed_with_what_it_started(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def main() -> None:
        async with worker(timeout_s=2.0) as w:
            with pytest.raises(
                RewardTimeout, match="longer than task.reward_timeout_s=2 s and was"
            ):
                await act(w, "hang-with-child", pid_file=str(tmp_path / "pid"))
            grandchild = int((tmp_path / "pid").read_text())
            assert not psutil.pid_exists(grandchild) or (
                psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
            )
            assert await act(w, "fine") == 1.0
            assert (w.timeouts, w.errors, w.restarts) == (1, 0, 1)

    run(main())


def test_waiting_for_a_free_child_is_not_counted() -> None:
    async def main() -> None:
        async with worker(timeout_s=1.0) as w:
            calls = [act(w, what) for what in ("hang", "fine", "hang", "fine")]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(r) for r in results] == [RewardTimeout, float, RewardTimeout, float]

    asyncio.run(main())


def test_a_pool_runs_calls_side_by_side() -> None:
    async def main() -> None:
        async with worker(size=2) as w:
            stuck = asyncio.create_task(act(w, "hang"))
            assert await act(w, "fine") == 1.0
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            # Both places work after the cancelled call, which left no answer behind.
            assert await asyncio.gather(*(act(w, "bool") for _ in range(4))) == [1.0] * 4

    asyncio.run(main())


def test_close_fails_the_calls_under_way_and_later_ones() -> None:
    async def main() -> None:
        async with worker() as w:
            first = await act(w, "pid")
            calls = [asyncio.create_task(act(w, "hang")) for _ in range(3)]
            await asyncio.sleep(0)  # each has begun
            await w.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(r) for r in results] == [RewardError] * 3
            with pytest.raises(RewardError, match="is closed"):
                await act(w, "fine")
            assert not psutil.pid_exists(int(first))
            await w.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("user_reward:nope", "task.reward=user_reward:nope: user_reward has no 'nope'"),
        ("user_reward:number", "is a int, expected a function"),
        ("user_reward:one_argument", "cannot be called with (prompt, response, finish_reason)"),
        ("no_such_module:f", "no module 'no_such_module' (looked in "),
        ("user_broken:f", "importing user_broken failed: SystemExit: no"),
    ],
)
def test_a_function_that_cannot_be_imported(spec: str, expected: str) -> None:
    async def main() -> None:
        made = RewardWorker(TaskConfig(reward=spec))
        with pytest.raises(UserError) as e:
            await made.start()
        await made.close()
        assert expected in str(e.value)
        assert e.value.exit_code == 2

    asyncio.run(main())


def test_a_method_by_its_dotted_name() -> None:
    async def main() -> None:
        made = RewardWorker(TaskConfig(reward="user_reward:Table.method"))
        assert await made.score(Prompt(text="q"), "", "stop") == 7.0
        await made.close()

    asyncio.run(main())


PARENT = """
import asyncio, os, sys
from asyncrl.actors.rewards import RewardWorker
from asyncrl.config.schema import TaskConfig
from asyncrl.types import Prompt

async def main():
    w = RewardWorker(TaskConfig(reward="user_reward:act", reward_timeout_s=900.0))
    print(int(await w.score(Prompt(text="q"), "pid", "stop")), flush=True)
    await w.score(Prompt(text="q"), "hang", "stop")

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_child_dies_with_a_parent_that_is_killed() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env
    ) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
        gone, alive = psutil.wait_procs([child], timeout=30)
        assert gone, alive
