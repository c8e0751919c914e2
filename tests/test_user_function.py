"""A user's function: loaded by its name, here or in a process of its own, and what it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import user_function
from asyncrl.errors import ConfigError
from asyncrl.user_function import as_number, load, try_load

MODULES = {
    "mine.py": """
import os, sys
print("noise"); os.write(1, b"raw")
def two(a, b): return a + b
def any_number(*args): return args
def one(a): return a
def keyword(a, b, *, c): return a
async def later(a, b): return 1.0
class Holder:
    @staticmethod
    def two(a, b): return a * b
constant = 3
def __getattr__(name):
    if name == "lazy":
        raise ImportError("not\\n  here")
    raise AttributeError(name)
""",
    "syntax.py": "def f(:\n",
    "lines.py": "raise ValueError('first\\nsecond')\n",
    "ends.py": "import sys; sys.exit('no')\n",
    "base.py": "class Odd(BaseException): pass\nraise Odd('x')\n",
    "attribute.py": "import os; os.nothing\n",
    "lacks.py": "import no_such_thing\n",
    "quits.py": "import os; os._exit(0)\n",
    "crashes.py": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "threads.py": """
import threading
threading.Thread(target=threading.Event().wait).start()
def two(a, b): return 1.0
""",
}
REFUSED = [
    ("mine", "expected module:function, called with (a, b)"),
    (":two", "expected module:function"),
    ("mine:", "expected module:function"),
    ("nowhere:f", "no module 'nowhere' (looked in "),
    ("mine.sub:f", "no module 'mine.sub' (looked in "),
    (".mine:f", "importing .mine failed: TypeError: "),
    ("mine:nope", "mine has no 'nope'"),
    ("mine:Holder.nope", "mine has no 'Holder.nope'"),
    ("mine:lazy", "importing mine failed: ImportError: not here"),
    ("mine:constant", "is a int, expected a function (a, b) -> float"),
    ("mine:later", "is a coroutine function: make it a plain one"),
    ("mine:one", "cannot be called with (a, b): too many positional arguments"),
    ("mine:keyword", "cannot be called with (a, b): missing a required"),
    ("syntax:f", "importing syntax failed: SyntaxError: invalid syntax"),
    ("lines:f", "importing lines failed: ValueError: first second"),
    ("ends:f", "importing ends failed: SystemExit: no"),
    ("base:f", "importing base failed: Odd: x"),
    ("attribute:f", "importing attribute failed: AttributeError: module 'os' has no"),
    ("lacks:f", "importing lacks failed: ModuleNotFoundError: No module named 'no_such_thing'"),
]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(("spec", "result"), [("mine:two", 5), ("mine:Holder.two", 6)])
def test_a_function_is_found_by_its_name(spec: str, result: int) -> None:
    assert load(spec, "some.key", ("a", "b"))(2, 3) == result


@pytest.mark.parametrize("spec", ["mine:any_number", "builtins:min"])
def test_any_that_takes_the_arguments_will_do(spec: str) -> None:
    assert callable(load(spec, "some.key", ("a", "b")))


@pytest.mark.parametrize(("spec", "why"), REFUSED)
def test_what_is_wrong_is_told_in_one_line(spec: str, why: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(spec, "some.key", ("a", "b"))
    assert str(e.value).startswith(f"some.key={spec}: {why}")
    assert len(str(e.value).splitlines()) == 1


def test_ctrl_c_during_an_import_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "pressed.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("pressed:f", "some.key", ())


@pytest.mark.parametrize("spec", ["mine:two", "threads:two"])
def test_a_process_of_its_own_loads_it(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    try_load(spec, "some.key", ("a", "b"))
    assert capfd.readouterr().out == ""  # a command's output is for its own words
    assert spec.partition(":")[0] not in sys.modules


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("lines:f", "importing lines failed: ValueError: first second"),
        ("quits:f", "its process ended with exit code 0 on import"),
        ("crashes:f", "its process died of signal 9 (Killed) on import"),
    ],
)
def test_a_process_of_its_own_may_fail(spec: str, why: str) -> None:
    with pytest.raises(ConfigError) as e:
        try_load(spec, "some.key", ("a", "b"))
    assert str(e.value) == f"some.key={spec}: {why}"


def test_a_process_of_its_own_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(user_function, "LOAD_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match="some.key=hangs:f: importing it took longer than 1 s"):
        try_load("hangs:f", "some.key", ())


@pytest.mark.parametrize(
    "value", [1, True, 1.0, Fraction(1), Decimal(1), np.float32(1), np.bool_(True), np.array(1.0)]
)
def test_a_number_is_a_float(value: Any) -> None:
    number = as_number(value)
    assert type(number) is float
    assert number == 1.0


async def _coroutine() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda: "1", TypeError, "returned '1' (str), expected a number"),
        (lambda: b"1", TypeError, "returned b'1' (bytes), expected a number"),
        (lambda: None, TypeError, "returned None (NoneType), expected a number"),
        (lambda: [1.0], TypeError, "returned [1.0] (list), expected a number"),
        (lambda: 1j, TypeError, "returned 1j (complex), expected a number"),
        (lambda: 10**400, TypeError, "returned 1000"),
        (lambda: np.zeros(2), TypeError, "returned array([0., 0.]) (ndarray), expected a number"),
        (lambda: float("nan"), ValueError, "returned nan, expected a finite number"),
        (lambda: -np.inf, ValueError, "returned -inf, expected a finite number"),
        (_coroutine, TypeError, "returned a coroutine: make it a plain function"),
    ],
)
def test_what_is_no_finite_number_is_refused(
    make: Callable[[], object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error) as e:
        as_number(make())
    assert str(e.value).startswith(why)
    assert len(str(e.value).splitlines()) == 1
