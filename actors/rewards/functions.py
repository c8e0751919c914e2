"""The built-in rewards, as pure functions of prompt, response and finish reason."""

from __future__ import annotations

import re
from fractions import Fraction

from asyncrl.errors import RewardError
from asyncrl.types import Prompt

_NUMBER = re.compile(
    r"""
    (?=[-+$€£.0-9])
    (?P<sign>(?<![0-9A-Za-z)\]])[-+])?    # a minus behind a digit or a name is a subtraction
    [$€£]?
    (?P<sign2>(?<=[$€£])[-+])?
    (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?
    (?P<part>\.[0-9]+)?
    (?:/(?P<below>[0-9]+))?
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 400
"""A longer number is nobody's answer, and slow to compare."""
_SAME = str.maketrans({"−": "-", "–": "-", "\N{FULLWIDTH DOLLAR SIGN}": "$"})


def last_number(prompt: Prompt, response: str, finish_reason: str) -> float:
    """1 if the last number of the response equals the ground truth, else 0.

    The ground truth is the last number behind the last "####" of `prompt.answer` (GSM8K's
    format, Cobbe et al. 2021), or of the whole answer if there is no such mark. Numbers are
    compared by value: 72, 72.0, $72, "72." and 1,000 = 1000; a/b is a fraction.

    Raises:
        RewardError: the prompt has no ground truth with a number in it.
    """
    truth = find_last_number((prompt.answer or "").rpartition("####")[2])
    if truth is None:
        raise RewardError(f"the ground truth {prompt.answer!r} has no number to compare with")
    return float(find_last_number(response) == truth)


def find_last_number(text: str) -> Fraction | None:
    """The last number of a text, by value; None if it has none.

    >>> find_last_number("so $1,234.50 in all.")
    Fraction(2469, 2)
    >>> find_last_number("4-9") == 9, find_last_number("it is -9") == -9
    (True, True)
    """
    text = text.translate(_SAME).replace("{,}", ",")
    last = None
    for match in _NUMBER.finditer(text):
        if match["whole"] or match["part"]:
            last = match
    return None if last is None else _value(last)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_DIGITS:
        return None
    digits = (match["whole"] or "0").replace(",", "") + (match["part"] or "")
    value = Fraction(digits)
    below = int(match["below"] or 1)
    if below == 0:
        return None
    negative = "-" in (match["sign"], match["sign2"])
    return (-value if negative else value) / below


def even_digits(prompt: Prompt, response: str, finish_reason: str) -> float:
    """The share of the response's digits that are even; 0 without digits.

    >>> even_digits(Prompt(text=""), "1 2 4", "stop") == 2 / 3
    True
    """
    digits = [c for c in response if c in "0123456789"]
    return sum(c in "02468" for c in digits) / len(digits) if digits else 0.0
