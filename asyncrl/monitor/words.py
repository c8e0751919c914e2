"""Times, names and waits as the console and `asyncrl status` write them. Light to import."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def clock(seconds: float | None) -> str:
    """m:ss, from an hour on h:mm:ss, or a dash.

    >>> clock(65.2), clock(7_205), clock(None)
    ('1:05', '2:00:05', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def age(seconds: float) -> str:
    """Seconds up to two minutes, then m:ss.

    >>> age(0.4), age(41.2), age(130)
    ('0.4 s', '41 s', '2:10')
    """
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else clock(seconds)


def share(value: float | None) -> str:
    """A fraction as a percentage, or a dash."""
    return "-" if value is None else f"{value * 100:.0f} %"


def wait(what: str, on: str, age_s: float, deadline_s: float | None = None) -> str:
    """One wait in words.

    >>> wait("batch 31", "buffer-0", 41.0, 19.0)
    '41 s for batch 31 on buffer-0, gives up in 19 s'
    """
    target = f"{what} on {on}" if on else what
    left = "" if deadline_s is None else f", gives up in {max(deadline_s, 0):.0f} s"
    return f"{age(age_s)} for {target}{left}"


def wait_of(told: Mapping[str, Any]) -> str:
    """A wait of status.json in words, whatever else a later asyncrl says of it."""
    return wait(told["what"], told["on"], told["age_s"], told.get("deadline_s"))


def names(roles: Sequence[str]) -> str:
    """Roles of one kind, briefly.

    >>> names(["actor-0", "actor-2", "learner-0"]), names([f"actor-{k}" for k in range(6)])
    ('actor-0,2 learner-0', 'actor-0..5')
    """
    kinds: dict[str, list[int]] = {}
    alone = []
    for role in roles:
        kind, rank = numbered(role)
        if rank is None:
            alone.append(role)
        else:
            kinds.setdefault(kind, []).append(rank)
    return " ".join(alone + [f"{kind}-{_ranks(sorted(ranks))}" for kind, ranks in kinds.items()])


def by_number(role: str) -> tuple[str, int]:
    """A key that puts roles in order.

    >>> sorted(["actor-10", "actor-9"], key=by_number)
    ['actor-9', 'actor-10']
    """
    kind, rank = numbered(role)
    return kind, rank or 0


def named(role: str, rank: int) -> str:
    """A process by name; there is one launcher.

    >>> named("actor", 3), named("launcher", 0)
    ('actor-3', 'launcher')
    """
    return role if role == "launcher" else f"{role}-{rank}"


def numbered(name: str) -> tuple[str, int | None]:
    """Kind and rank of a role by its name, or all of a name that has no rank.

    >>> numbered("actor-3"), numbered("launcher"), numbered("actor-x")
    (('actor', 3), ('launcher', None), ('actor-x', None))
    """
    kind, dash, end = name.rpartition("-")
    rank = whole(end) if dash else None
    return (name, None) if rank is None else (kind, rank)


def whole(found: str) -> int | None:
    """A whole number below a milliard, written in figures; None for anything else.

    >>> whole("12"), whole("x"), whole("\u00b2")
    (12, None, None)
    """
    return int(found) if found.isascii() and found.isdecimal() and len(found) <= 9 else None


def text(found: str) -> str:
    r"""Text of others that can be encoded: half a character, which is also what a file's name has
    in the place of a byte that is none of UTF-8, is written out.

    >>> text("a\udcff")
    'a\\udcff'
    """
    return found.encode("utf-8", "backslashreplace").decode()


def run_name(folder: Path, taken: Container[str]) -> str:
    """A run's name: that of its folder, after that of the one above it where another run has it.

    >>> run_name(Path("/a/runs/tiny"), []), run_name(Path("/b/runs/tiny"), ["tiny"])
    ('tiny', 'runs-tiny')
    """
    name = text(folder.name)
    while name in taken:
        name = f"{text(folder.parent.name)}-{name}"
    return name


def clean(text: str, keep: str = "") -> str:
    r"""Text of others, safe in a terminal: what is not printable is shown as what it is.

    >>> clean("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() else ascii(c)[1:-1] for c in text)


def say(lines: Iterable[str]) -> None:
    """Print lines that quote others: whatever a command tells of a run."""
    for line in lines:
        print(clean(line))


def _ranks(ranks: list[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == list(range(first, last + 1)):
        return f"{first}..{last}"
    return ",".join(map(str, ranks))
