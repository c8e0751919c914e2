"""Scores in the actor's own process: for `--debug`, where a breakpoint in the reward must work."""

from __future__ import annotations

import bdb

from asyncrl.actors.rewards.registry import resolve_reward, reward_spec
from asyncrl.config.schema import TaskConfig
from asyncrl.errors import RewardError, RewardValueError, UserError
from asyncrl.types import Prompt
from asyncrl.user_function import as_number, describe


class InlineReward:
    """A `Scorer` without a child: no deadline, nothing is killed."""

    def __init__(self, task: TaskConfig) -> None:
        self.spec = reward_spec(task)
        self.timeouts = 0
        self.errors = 0
        self.no_number = 0

    async def start(self) -> None:
        """Import the function.

        Raises:
            UserError: it cannot be imported.
        """
        self._function = resolve_reward(self.spec)

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """The reward of a response.

        Raises:
            RewardError: the function raised, or returned no finite number.
            UserError: the user quit the debugger in it.
        """
        kind = RewardError
        try:
            value = self._function(prompt, response, finish_reason)
            kind = RewardValueError
            return as_number(value)
        except bdb.BdbQuit:
            raise UserError("quit in the debugger") from None
        except Exception as e:
            self.errors += 1
            self.no_number += kind is RewardValueError
            raise kind(f"reward {self.spec}: {describe(e)}") from e

    async def close(self) -> None:
        """Nothing to end."""
