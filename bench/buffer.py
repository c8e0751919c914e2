"""The buffer against bare ZeroMQ and against a queue in a Ray actor, all on this machine in turns.

    producers x n ──push──► buffer process ──part──► consumer      closed loop: as fast as it goes
    the same frames through PUSH/PULL, directly and through a relay; through a Ray actor
    12 KB at 5,000/s, whether it keeps up or not                   open loop: push to ack

Peers do nothing but speak the wire (tests/helpers/lean_peers.py). `--profile` measures nothing: it
prints where the buffer's time goes at 20 KB.
"""

from __future__ import annotations

import argparse
import pstats
import sys
import tempfile

from buffer_sides import FULL, QUICK, load_of, sides, summarise, through_buffer
from harness import BenchError, Report, in_turns, parser, run_bench


def show_profile() -> None:
    """Where the time of the buffer's own thread goes; slower than without a profile."""
    with tempfile.NamedTemporaryFile(suffix=".prof") as file:
        load = load_of(20, 5.0)
        outcome = through_buffer(load, "none", profile=file.name)
        stats = pstats.Stats(file.name)
    assert outcome.us is not None
    print(
        f"20 KB, profiled: {outcome.rate:.0f} samples/s; processor time a sample: own thread "
        f"{outcome.us['main']:.1f} us, ZeroMQ's {outcome.us['others']:.1f} us"
    )
    stats.strip_dirs().sort_stats("tottime").print_stats(30)


def measure(report: Report, given: argparse.Namespace) -> None:
    """All sides in turns."""
    if given.profile:
        if given.json:
            raise BenchError("--profile measures nothing: it cannot write --json")
        show_profile()
        return
    plan = QUICK if given.quick else FULL
    runs = in_turns(sides(plan), given.repeats or plan.repeats)
    summarise(report, runs, plan)


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument("--profile", action="store_true", help="print where the time goes; no figures")
    return run_bench("buffer", p, measure)


if __name__ == "__main__":
    sys.exit(main())
