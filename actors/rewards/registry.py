"""Finds a reward by what `task.reward` says."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys

from asyncrl.actors.rewards import functions
from asyncrl.config.schema import TaskConfig
from asyncrl.errors import UserError
from asyncrl.protocols import Reward

BUILT_IN: dict[str, Reward] = {
    "last_number": functions.last_number,
    "even_digits": functions.even_digits,
}


def reward_spec(task: TaskConfig) -> str:
    """`task.reward` with auto resolved: a built-in name or `module:function`.

    >>> reward_spec(TaskConfig())
    'last_number'
    """
    if task.reward != "auto":
        return task.reward
    return "even_digits" if task.kind == "even_digits" else "last_number"


def resolve_reward(spec: str) -> Reward:
    """The function of a spec; the current folder is on the import path.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise UserError(f"task.reward={spec}: expected {', '.join(BUILT_IN)} or module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except BaseException as e:  # a user's module may do anything, SystemExit included
        if isinstance(e, ModuleNotFoundError) and e.name == module_name.split(".")[0]:
            why = f"no module {module_name!r} (looked in {os.getcwd()} and the environment)"
        else:
            why = f"importing {module_name} failed: {type(e).__name__}: {e}"
        raise UserError(f"task.reward={spec}: {why}") from e
    for name in path.split("."):
        if not hasattr(found, name):
            raise UserError(f"task.reward={spec}: {module_name} has no {path!r}")
        found = getattr(found, name)
    if not callable(found):
        raise UserError(
            f"task.reward={spec}: is a {type(found).__name__}, expected a function "
            "(prompt, response, finish_reason) -> float"
        )
    try:
        inspect.signature(found).bind(None, "", "")
    except TypeError as e:
        raise UserError(
            f"task.reward={spec}: cannot be called with (prompt, response, finish_reason): {e}"
        ) from e
    except ValueError:  # a builtin without a signature: the first call will tell
        pass
    return found


def as_reward(value: object) -> float:
    """A finite float from what a reward function returned.

    Raises:
        TypeError, ValueError: it is no number, or not a finite one.
    """
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("returned a coroutine: make it a plain function")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        shown = " ".join(repr(value).split())[:80]
        raise TypeError(f"returned {shown} ({type(value).__name__}), expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number


def describe(error: BaseException) -> str:
    """A reward's exception in one line.

    >>> describe(KeyError("answer")), describe(ValueError())
    ("KeyError: 'answer'", 'ValueError')
    """
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
