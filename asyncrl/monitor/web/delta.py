"""Of a figure that grew, only what is new.

{"rev": 7, "figure": {...}}                     whole
{"rev": 8, "base": 7, "layout": {...} | null,   to be applied to revision 7
 "data": [{} | {"set": trace} | {"grow": {"x": [keep, [new...]]}}, ...]}
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from asyncrl.monitor.figures.kit import Figure

KEYS = 512
"""Figures remembered, of all runs and axes that are looked at."""
REVISIONS = 4
"""Of a figure, for pages that are behind."""


def delta(old: Figure, new: Figure) -> dict[str, Any] | None:
    """What turns `old` into `new`; None where that is no less than all of it.

    >>> old = {"data": [{"name": "a", "x": [1, 2]}], "layout": {}}
    >>> delta(old, {"data": [{"name": "a", "x": [1, 2, 3]}], "layout": {}})
    {'layout': None, 'data': [{'grow': {'x': [2, [3]]}}]}
    """
    if len(old["data"]) != len(new["data"]):
        return None
    traces = [_trace(a, b) for a, b in zip(old["data"], new["data"], strict=True)]
    if new["data"] and all("set" in t for t in traces):
        return None
    return {"layout": new["layout"] if new["layout"] != old["layout"] else None, "data": traces}


def _trace(old: Figure, new: Figure) -> dict[str, Any]:
    if old == new:
        return {}
    if old.keys() != new.keys():
        return {"set": new}
    grow = {}
    for key, value in new.items():
        if value == old[key]:
            continue
        if not (isinstance(value, list) and isinstance(old[key], list)):
            return {"set": new}
        keep = common(old[key], value)
        grow[key] = [keep, value[keep:]]
    return {"grow": grow}


def common(old: list[Any], new: list[Any]) -> int:
    """How many first items are the same; may be told too low where much changed.

    >>> common([1, 2, 3], [1, 2, 4, 5]), common([1], [2])
    (2, 0)
    """
    n = min(len(old), len(new))
    for back in (0, 1, 2, 4, 16):
        if back < n and old[: n - back] == new[: n - back]:
            return n - back
    return 0


class Revisions:
    """Figures by key, each with a number that rises when it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not those of a server that ended: a page may still have them.
        self._next = int(time.time() * 1000)
        self._kept: OrderedDict[Hashable, tuple[Hashable, OrderedDict[int, Figure | None]]]
        self._kept = OrderedDict()

    def ask(
        self, key: Hashable, stamp: Hashable, draw: Callable[[], Figure | None], have: int | None,
        *, fresh: bool = True,
    ) -> dict[str, Any] | None:  # fmt: skip
        """What a page that has revision `have` needs; None if that is the newest.

        Args:
            key: which figure.
            stamp: of what it is drawn from; `draw` is called when it changed.
            fresh: else one that was drawn before will do.
        """
        with self._lock:
            before, revisions = self._kept.pop(key, (None, OrderedDict()))
            if not revisions or (fresh and before != stamp):
                figure = draw()
                newest = next(reversed(revisions.values()), None)
                if not revisions or figure != newest:
                    self._next += 1
                    revisions[self._next] = figure
                before = stamp
            self._kept[key] = (before, revisions)
            while len(revisions) > REVISIONS:
                revisions.popitem(last=False)
            while len(self._kept) > KEYS:
                self._kept.popitem(last=False)
            number, figure = next(reversed(revisions.items()))
            base = revisions.get(have) if have is not None else None
        if number == have:
            return None
        less = delta(base, figure) if base and figure else None
        return {"rev": number, "base": have} | less if less else {"rev": number, "figure": figure}
