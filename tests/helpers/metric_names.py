"""The names in docs/metrics.md, as patterns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented(section: str | tuple[str, ...] = "") -> list[re.Pattern[str]]:
    """A pattern for each name in the first column of the tables (of sections that begin so)."""
    patterns = []
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        if part.startswith(section):
            for name in re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE):
                patterns += [_pattern(one) for one in _alternatives(name)]
    return patterns


def undocumented(names: Iterable[str], section: str | tuple[str, ...] = "") -> list[str]:
    """Those of `names` that the page does not have."""
    patterns = documented(section)
    return sorted(n for n in names if not any(p.fullmatch(n) for p in patterns))


def _alternatives(name: str) -> list[str]:
    """`a/{x,y}` as a/x and a/y."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", name)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _pattern(name: str) -> re.Pattern[str]:
    """`<k>` stands for one part of a name."""
    return re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", name))))
