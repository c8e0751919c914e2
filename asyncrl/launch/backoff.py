"""How long a role that died waits before it is started again."""

from __future__ import annotations

MAX_BACKOFF_S = 60.0
_DOUBLINGS = 30


def backoff_s(first_s: float, failures: int, *, at_once: bool = False) -> float:
    """Seconds after so many failures in a row (from 1); twice as long after each.

    Args:
        first_s: `cluster.restart_backoff_s`.
        at_once: the first time it does not wait at all, since everybody waits for it.

    >>> [backoff_s(1.0, n) for n in (1, 2, 3, 99)]
    [1.0, 2.0, 4.0, 60.0]
    >>> [backoff_s(1.0, n, at_once=True) for n in (1, 2, 3)]
    [0.0, 1.0, 3.0]
    """
    times = 2.0 ** min(failures - 1, _DOUBLINGS)
    return min(MAX_BACKOFF_S, first_s * (times - at_once))
