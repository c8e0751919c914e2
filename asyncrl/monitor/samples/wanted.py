"""Which samples are asked for: conditions, and whether a sample meets them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import UserError
from asyncrl.monitor.samples.texts import Texts
from asyncrl.recording import Entry, Outcome
from asyncrl.types import FinishReason, GroupId, SampleId, Trajectory

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne,
    ">": operator.gt, "<": operator.lt, "=": operator.eq, "": operator.eq,
}  # fmt: skip
OUTCOMES: tuple[str, ...] = get_args(Outcome)
FINISHES = tuple(map(str, FinishReason))
_WHOLE = r"([0-9]{1,18})"
_PART = re.compile(r"\s*(>=|<=|!=|>|<|=|)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """What a number must be; one that is not there meets nothing.

    >>> Condition.parse("--reward", ">0.2,<=1")(0.5), Condition.parse("--batch", "3..5")(6)
    (True, False)
    """

    parts: tuple[tuple[str, float], ...]
    """Operator and bound; all must hold."""

    def __call__(self, value: float | None) -> bool:
        """Whether it is met."""
        return value is not None and all(OPERATORS[op](value, x) for op, x in self.parts)

    @classmethod
    def parse(cls, option: str, text: str) -> Condition:
        """Read e.g. `>0.5`, `2`, `3..5` or `>=1,!=4`.

        Raises:
            UserError: it is none; names the option.
        """
        parts: list[tuple[str, float]] = []
        for piece in text.split(","):
            low, dots, high = piece.partition("..")
            for op, side in ((">=", low), ("<=", high)) if dots else (("", low),):
                found = _PART.fullmatch(side)
                if found is None or (dots and found[1]):
                    raise UserError(
                        f"{option} {text}: a number is asked for, or a condition on one, "
                        "e.g. '>0.5', '<=2', '3..5' or '>=1,!=4'"
                    )
                parts.append((op or found[1], float(found[2])))
        return cls(tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What samples must be; what is left out leaves them free.

    >>> Wanted().needs_frames, Wanted(prompt="sum").needs_frames
    (False, True)
    """

    reward: Condition | None = None
    staleness: Condition | None = None
    """Of the head, in versions."""
    batch: Condition | None = None
    length: Condition | None = None
    """Response tokens."""
    outcomes: Sequence[str] = ()
    actor: str | None = None
    finish: str | None = None
    prompt: str | None = None
    """Text within, in whatever case; so is the next."""
    response: str | None = None
    group: GroupId | None = None
    sample: SampleId | None = None

    @property
    def needs_frames(self) -> bool:
        """Whether the index does not say all that is asked."""
        asked = (self.length, self.finish, self.prompt, self.response)
        return any(condition is not None for condition in asked)

    def in_index(self, entry: Entry) -> bool:
        """Whether the sample's line meets what can be told from it."""
        return (
            (self.reward is None or self.reward(entry.reward))
            and (self.staleness is None or self.staleness(entry.head_staleness))
            and (self.batch is None or self.batch(entry.batch))
            and (not self.outcomes or entry.outcome in self.outcomes)
            and self.actor in (None, entry.actor)
            and (self.group is None or entry.id.group == self.group)
            and (self.sample is None or entry.id == self.sample)
        )

    def in_frames(self, t: Trajectory, texts: Texts) -> bool:
        """Whether the sample itself meets the rest."""
        return (
            (self.length is None or self.length(t.header.response_tokens))
            and self.finish in (None, t.header.finish_reason)
            and (self.prompt is None or _within(self.prompt, texts.prompt(t)))
            and (self.response is None or _within(self.response, texts.response(t)))
        )


def _within(text: str, whole: str) -> bool:
    return text.casefold() in whole.casefold()


def outcomes(text: str) -> tuple[str, ...]:
    """Read what --outcome names.

    Raises:
        UserError: one of them is none.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in OUTCOMES:
            raise UserError(
                f"--outcome {name}: one or more of {', '.join(OUTCOMES)} are asked for"
                f"{did_you_mean(name, OUTCOMES)}"
            )
    return names


def group_id(option: str, text: str) -> GroupId:
    """Read SOURCE:EPOCH:INDEX.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(rf"(.+):{_WHOLE}:{_WHOLE}", text)
    if found is None:
        raise UserError(f"{option} {text}: a group is SOURCE:EPOCH:INDEX, as in the table's ids")
    return GroupId(found[1], int(found[2]), int(found[3]))


def sample_id(option: str, text: str) -> SampleId:
    """Read SOURCE:EPOCH:INDEX:SAMPLE.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(rf"(.+):{_WHOLE}:{_WHOLE}:{_WHOLE}", text)
    if found is None:
        raise UserError(f"{option} {text}: an id is SOURCE:EPOCH:INDEX:SAMPLE, as in the table")
    return SampleId(found[1], int(found[2]), int(found[3]), int(found[4]))
