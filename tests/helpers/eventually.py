"""Waiting for what another thread or process does and nobody signals."""

import time

LOOK_EVERY_S = 0.001


def eventually(condition, what="", timeout_s=30.0):
    """Return once `condition()` is true; fails with `what` past the deadline.

    The pause only spares the processor: nothing depends on its length.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(LOOK_EVERY_S)
