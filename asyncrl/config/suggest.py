"""The "did you mean" of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice nearest to `word`; "" if none is near.

    >>> nearest("smolm2", ["smollm2", "tiny"])
    'smollm2'
    """
    near = difflib.get_close_matches(word.lower(), list(choices), n=1, cutoff=0.7)
    return near[0] if near else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A note naming the choice nearest to `word`, with a leading space; "" if none is near.

    >>> did_you_mean("smolm2", ["smollm2", "tiny"])
    ' (did you mean smollm2?)'
    """
    near = nearest(word, choices)
    return f" (did you mean {near}?)" if near else ""


def short(value: object, limit: int = 60) -> str:
    """A value on one line, cut to `limit` characters.

    >>> short("a" * 99, 10)
    'aaaaaaa...'
    """
    text = " ".join(str(value).split()) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
