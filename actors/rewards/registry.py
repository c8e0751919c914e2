"""Finds a reward by what `task.reward` says."""

from __future__ import annotations

from typing import cast

from asyncrl.actors.rewards import functions
from asyncrl.config.schema import TaskConfig
from asyncrl.errors import UserError
from asyncrl.protocols import Reward
from asyncrl.user_function import load

BUILT_IN: dict[str, Reward] = {
    "last_number": functions.last_number,
    "even_digits": functions.even_digits,
}
_ARGUMENTS = ("prompt", "response", "finish_reason")


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
    if ":" not in spec:
        raise UserError(f"task.reward={spec}: expected {', '.join(BUILT_IN)} or module:function")
    return cast(Reward, load(spec, "task.reward", _ARGUMENTS))
