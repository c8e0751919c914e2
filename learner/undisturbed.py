"""A process of which one thread trains, and is to be disturbed little by the others."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 1e-4
"""What training waits for the interpreter after an operation while another thread has it. .4 s of
Python beside operations of .4 or 3 ms cost them .40 or .26 s with Python's own 5 ms, .17 or .03 s
with this (two cores, medians of five)."""


def train_undisturbed() -> None:
    """Set up the interpreter once all is loaded; with --debug it is that of all roles.

    What is there stays: the collector does not look at it again, which took .2 s of some step.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
