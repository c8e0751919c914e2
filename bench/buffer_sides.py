"""The sides of bench/buffer.py: what each runs, and the figures that come of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from harness import ROOT, BenchError, Report, ratios

sys.path.insert(1, str(ROOT))
from tests.helpers.buffer_load import run_load
from tests.helpers.buffer_process import BufferProcess, BufferSpec
from tests.helpers.lean_peers import GROUP, GROUPS, Load

SIZES_KB = (2, 20, 200)
OPEN_KB, OPEN_RATE = 12, 5000.0
"""About what 1,000 GPUs produce."""
YARDSTICK = Path(__file__).with_name("buffer_raw.py")
LIMIT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    repeats: int
    seconds: float
    open_seconds: float


FULL = Plan(repeats=5, seconds=3.0, open_seconds=10.0)
QUICK = Plan(repeats=1, seconds=1.0, open_seconds=3.0)


@dataclass(frozen=True)
class Outcome:
    """Of one side, once."""

    rate: float
    """Samples/s."""
    us: dict[str, float] | None = None
    """Of the buffer's process, microseconds of processor time a sample, by thread."""
    latencies_s: np.ndarray | None = None


def load_of(kb: int, seconds: float) -> Load:
    """As fast as it goes; as many bytes under way whatever their size."""
    if kb >= 200:
        return Load(kb * 1000, seconds, window=16, stock=128, max_staleness=5)
    return Load(kb * 1000, seconds)


def through_buffer(load: Load, durability: str, profile: str = "") -> Outcome:
    """One run of a fresh buffer.

    Raises:
        BenchError: a peer failed, or the ledger does not close.
    """
    with tempfile.TemporaryDirectory(prefix="bench-buffer-") as scratch:
        folder = Path(scratch)
        spec = BufferSpec(
            ledger=load.ledger, durability=durability, folder=str(folder / "store"),
            profile=profile,
        )  # fmt: skip
        buffer = BufferProcess(spec, folder / "log")
        try:
            before = buffer.thread_seconds()
            loaded = run_load(buffer, load, folder)
            used = buffer.thread_seconds()
            if buffer.end():
                raise BenchError(f"the buffer failed: {(folder / 'log').read_text()[-500:]}")
        except RuntimeError as e:
            raise BenchError(str(e)) from e
        finally:
            buffer.close()
    if not loaded.stats["conserved"] or loaded.stats["counts"]["malformed"]:
        raise BenchError(f"the buffer's counts: {loaded.stats}")
    us = {name: 1e6 * (used[name] - before[name]) / loaded.pushed for name in used}
    return Outcome(loaded.samples_s, us, loaded.latencies_s)


def yardstick(kind: str, load: Load) -> Outcome:
    """One run of another side, in a process of its own.

    Raises:
        BenchError: it failed.
    """
    done = subprocess.run(
        [sys.executable, str(YARDSTICK), kind, json.dumps(asdict(load))],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"{kind}: {done.stderr.strip()[-500:]}")
    return Outcome(json.loads(done.stdout.splitlines()[-1])["samples_s"])


def sides(plan: Plan) -> dict[str, Callable[[], Outcome]]:
    """All that is run, by name."""
    loads = {kb: load_of(kb, plan.seconds) for kb in SIZES_KB}
    found: dict[str, Callable[[], Outcome]] = {}
    for kb, load in loads.items():
        found[f"raw {kb}"] = partial(yardstick, "raw", load)
        found[f"none {kb}"] = partial(through_buffer, load, "none")
        found[f"relay {kb}"] = partial(yardstick, "relay", load)
    for durability in ("process", "disk"):
        found[f"{durability} 20"] = partial(through_buffer, loads[20], durability)
    for kind in ("actor", "queue"):
        found[f"ray {kind} 20"] = partial(yardstick, kind, loads[20])
    steady = Load(OPEN_KB * 1000, plan.open_seconds, warm_s=1.0, rate=OPEN_RATE, max_staleness=63)
    for durability in ("none", "process"):
        found[f"open {durability}"] = partial(through_buffer, steady, durability)
    return found


def summarise(report: Report, runs: dict[str, list[Outcome]], plan: Plan) -> None:
    """Tables and figures from all repeats."""
    rates = {name: [o.rate for o in each] for name, each in runs.items()}
    middle = {name: float(np.median(each)) for name, each in rates.items()}
    producers = load_of(20, plan.seconds).producers
    report.note(
        f"{producers} producers, 1 consumer; groups of {GROUP}, batches of {GROUPS}. raw: PUSH to "
        "PULL; relay: through a PULL-PUSH process; Ray: the faster of a lean actor and of "
        "ray.util.queue"
    )
    report.row("20 KB = 20,000 bytes", "samples/s", "MB/s", "of raw", "own us", "ZeroMQ's us")
    for name in rates:
        kind, _, kb = name.rpartition(" ")
        size = OPEN_KB if kind == "open" else int(kb)
        below = middle.get(f"raw {size}")
        us = [o.us for o in runs[name] if o.us]
        spent = [float(np.median([u[t] for u in us])) if us else "" for t in ("main", "others")]
        share = middle[name] / below if below else ""
        report.row(name, middle[name], middle[name] * size / 1000, share, *spent)
    common = {"producers": producers, "group": GROUP, "groups_per_batch": GROUPS}

    def versus(key: str, one: str, other: str, **more: object) -> None:
        report.add(
            key, ratios(rates[one], rates[other]), "ratio", "higher", **common,
            samples_s=middle[one], other_samples_s=middle[other], **more,
        )  # fmt: skip

    versus("msgs_vs_raw_20k", "none 20", "raw 20")
    versus("bytes_vs_raw_200k", "none 200", "raw 200")
    versus("msgs_vs_relay_20k", "none 20", "relay 20")
    versus("bytes_vs_relay_200k", "none 200", "relay 200")
    ray = max(("ray actor 20", "ray queue 20"), key=lambda name: middle[name])
    versus("msgs_vs_ray_queue_20k", "none 20", ray, faster=ray)
    versus("msgs_vs_ray_util_queue_20k", "none 20", "ray queue 20")
    versus("process_vs_none_20k", "process 20", "none 20")
    versus("disk_vs_none_20k", "disk 20", "none 20")
    for kb in SIZES_KB:
        report.add(f"msgs_s_{kb}k", rates[f"none {kb}"], "samples/s", "higher", **common)
    for durability, suffix in (("none", ""), ("process", "_process")):
        each = runs[f"open {durability}"]
        late = [np.quantile(o.latencies_s, (0.5, 0.99, 1.0)) * 1000 for o in each]
        about = {"offered_s": OPEN_RATE, "durability": durability, "kb": OPEN_KB}
        report.add(
            f"msgs_s_{OPEN_KB}k{suffix}", rates[f"open {durability}"], "samples/s", "higher",
            **about,
        )  # fmt: skip
        report.add(
            f"p99_ms{suffix}", [q[1] for q in late], "ms", "lower", **about,
            p50_ms=[round(float(q[0]), 3) for q in late], max_ms=[float(q[2]) for q in late],
        )  # fmt: skip
