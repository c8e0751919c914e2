"""Rewards: what scores a response, and the killable process that runs it.

functions.py holds the built-in ones, registry.py finds one by name, worker.py runs it in a
child (child.py) with a deadline. Importing this loads no torch.
"""

from asyncrl.actors.rewards.inline import InlineReward
from asyncrl.actors.rewards.registry import resolve_reward, reward_spec
from asyncrl.actors.rewards.worker import RewardWorker

__all__ = ["InlineReward", "RewardWorker", "resolve_reward", "reward_spec"]
