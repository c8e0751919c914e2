"""What an actor reports about itself once a second (docs/metrics.md)."""

from __future__ import annotations

import time

from asyncrl.actors.rewards import InlineReward, RewardWorker
from asyncrl.actors.rollout import RolloutLoop
from asyncrl.metrics import IdleMeter, TimeShares


class ActorMeter:
    """Rates since the last reading, and totals; read from the pulse's thread."""

    def __init__(
        self, loop: RolloutLoop, reward: RewardWorker | InlineReward, shares: TimeShares
    ) -> None:
        self._loop, self._reward, self._shares = loop, reward, shares
        self._idle = IdleMeter(shares)
        self._at = time.monotonic()
        self._tokens, self._pushes, self._push_s = 0, 0, 0.0

    def read(self) -> dict[str, float]:
        """The actor's metrics, without those of its process."""
        now, loop = time.monotonic(), self._loop
        tokens, pushes, push_s = loop.generated_tokens, loop.pushes, loop.push_s
        values: dict[str, float] = self._shares.metrics() | {
            "throughput/gen_tok_s": (tokens - self._tokens) / (now - self._at),
            "actor/in_flight": loop.in_flight,
            "actor/scoring": loop.scoring,
            "actor/generated_tokens": tokens,
            "actor/discarded_tokens": loop.discarded_tokens,
            "actor/samples_pushed": loop.samples_pushed,
            "reward/timeouts": self._reward.timeouts,
            "reward/errors": self._reward.errors,
        }
        values |= loop.ids.metrics()
        if self._reward.no_number:
            values["reward/no_number"] = self._reward.no_number
        if loop.scored_failures:
            values["reward/scored_failures"] = loop.scored_failures
        values |= {f"failures/{kind}": n for kind, n in list(loop.failures.items())}
        if pushes > self._pushes:
            values["queue/put_wait_s"] = (push_s - self._push_s) / (pushes - self._pushes)
        share = self._idle.read()
        if share is not None:
            values["idle/actors_frac"] = share
        self._at, self._tokens, self._pushes, self._push_s = now, tokens, pushes, push_s
        return values
