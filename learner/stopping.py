"""When training ends before `run.steps`: a reward that is enough, or a loss that is lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config


class StopRules:
    """Looks at each batch's metrics (docs/metrics.md) and says when it is enough.

    >>> rules = StopRules(Config.model_validate({"stop": {"reward": 0.5, "reward_batches": 2}}))
    >>> rules.after_batch(1, {"reward/mean": 0.4})
    >>> rules.after_batch(2, {"reward/mean": 0.6})
    'stop.reward=0.5: the mean reward of batches 1 to 2 is 0.5'
    """

    def __init__(self, config: Config) -> None:
        self._stop = config.stop
        self._rewards: deque[tuple[int, float]] = deque(maxlen=config.stop.reward_batches)
        self._not_finite: list[int] = []  # the last batches, in a row

    def state(self) -> dict[str, Any]:
        """What the rules remember of the batches so far, for a checkpoint."""
        return {"rewards": [list(r) for r in self._rewards], "not_finite": [*self._not_finite]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._rewards.clear()
        self._rewards.extend((step, reward) for step, reward in state["rewards"])
        self._not_finite = list(state["not_finite"])

    def after_batch(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The reason to end the run after batch `step`, in one line; None to go on.

        A batch that trained no sample says nothing: it neither counts nor breaks a row.
        """
        return self._lost(step, metrics) or self._enough(step, metrics)

    def _enough(self, step: int, metrics: Mapping[str, float]) -> str | None:
        reward = metrics.get("reward/mean")
        if self._stop.reward is None or reward is None:
            return None
        self._rewards.append((step, reward))
        mean = math.fsum(r for _, r in self._rewards) / len(self._rewards)
        if len(self._rewards) < self._stop.reward_batches or not mean >= self._stop.reward:
            return None
        return (
            f"stop.reward={self._stop.reward:g}: the mean reward of batches "
            f"{self._rewards[0][0]} to {step} is {mean:.4g}"
        )

    def _lost(self, step: int, metrics: Mapping[str, float]) -> str | None:
        limit = self._stop.nonfinite_losses
        if limit is None:
            return None
        if _not_finite(metrics):
            self._not_finite.append(step)
        elif _has_loss(metrics):
            self._not_finite.clear()
        if len(self._not_finite) < limit:
            return None
        first = self._not_finite[0]
        return (
            f"stop.nonfinite_losses={limit}: no finite loss and gradient in batches {first} to "
            f"{step}: lower learner.optim.lr, or look at the rewards and at kl/mismatch_k3 before "
            f"batch {first}"
        )


def _has_loss(metrics: Mapping[str, float]) -> bool:
    return metrics.get("loss/tokens", 0.0) > 0 or "loss/policy" in metrics


def _not_finite(metrics: Mapping[str, float]) -> bool:
    """Whether the loss or a gradient was not finite; the learner leaves such a value out."""
    if metrics.get("loss/skipped", 0.0) > 0:
        return True
    absent = math.nan if metrics.get("loss/tokens", 0.0) > 0 else 0.0
    loss = metrics.get("loss/policy", absent)
    return not (math.isfinite(loss) and math.isfinite(metrics.get("loss/grad_norm", 0.0)))
