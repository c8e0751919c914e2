"""A user's function by its name, `module:function`, and the number that it returns.

    python -m asyncrl.user_function SPEC KEY ARGUMENT...

loads one and tells how that went: the process of `try_load`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import asyncrl
from asyncrl.errors import ConfigError

LOAD_TIMEOUT_S = 60.0
"""A module that has not been imported by then is given up."""
_LOADED = "loaded"


def load(spec: str, key: str, arguments: Sequence[str]) -> Callable[..., object]:
    """The function that `key`=`spec` names; its module may lie in the current folder.

    Args:
        spec: `module:function`; the function may be dotted, such as `Class.method`.
        key: the setting, for messages.
        arguments: what it is called with, by position; named for messages.

    Raises:
        ConfigError: its module cannot be imported, or has no function that takes the arguments;
            one line.
    """
    where, call = f"{key}={spec}", f"({', '.join(arguments)})"
    module, _, path = spec.partition(":")
    if not module or not path:
        raise ConfigError(f"{where}: expected module:function, called with {call}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except KeyboardInterrupt:  # the user's Ctrl-C
        raise
    except BaseException as e:  # a user's module may raise anything, SystemExit included
        raise ConfigError(f"{where}: {_why(e, module, path)}") from e
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{where}: is a {kind}, expected a function {call} -> float")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{where}: is a coroutine function: make it a plain one")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as e:
        raise ConfigError(f"{where}: cannot be called with {call}: {e}") from e
    except ValueError:  # a builtin without a signature: the first call will tell
        pass
    return found


def _why(error: BaseException, module: str, path: str) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"no module {error.name!r} (looked in {os.getcwd()} and the environment)"
    if isinstance(error, AttributeError) and module in sys.modules:
        return f"{module} has no {path!r}"
    return f"importing {module} failed: {describe(error)}"


def try_load(spec: str, key: str, arguments: Sequence[str]) -> None:
    """`load` in a process of its own, which may hang or crash and loads what it likes.

    Raises:
        ConfigError: as `load`; or the process crashed, or took longer than `LOAD_TIMEOUT_S`.
    """
    root = str(Path(asyncrl.__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.user_function", spec, key, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace",
            timeout=LOAD_TIMEOUT_S, check=False, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ConfigError(
            f"{key}={spec}: importing it took longer than {LOAD_TIMEOUT_S:g} s"
        ) from e
    if done.stdout == _LOADED:
        return
    code = done.returncode
    how = f"died of signal {-code} ({signal.strsignal(-code)})" if code < 0 else (
        f"ended with exit code {code}"
    )  # fmt: skip
    raise ConfigError(done.stdout or f"{key}={spec}: its process {how} on import")


def as_number(value: object) -> float:
    """A finite float from what a user's function returned.

    >>> as_number(True), as_number(2)
    (1.0, 2.0)

    Raises:
        TypeError, ValueError: it is no number, or not a finite one; what was "returned ...".
    """
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("returned a coroutine: make it a plain function")
    number = math.nan
    try:
        if isinstance(value, (str, bytes, bytearray)):  # "1" is no number
            raise TypeError
        number = float(cast(float, value))
    except Exception as e:  # an array of two, say: libraries raise what they like
        shown = " ".join(repr(value).split())[:80]
        kind = type(value).__name__
        raise TypeError(f"returned {shown} ({kind}), expected a number") from e
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number


def describe(error: BaseException) -> str:
    """An exception of a user's function in one line.

    >>> describe(KeyError("answer")), describe(ValueError())
    ("KeyError: 'answer'", 'ValueError')
    """
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _main(spec: str, key: str, arguments: Sequence[str]) -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the module prints is no answer
    try:
        load(spec, key, arguments)
        answer.write(_LOADED)
    except ConfigError as e:
        answer.write(str(e))
    answer.flush()
    os._exit(0)  # whatever threads the module has left


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
