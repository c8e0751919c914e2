"""What every bench has in common: its command line, turns, medians, the table and the JSON file.

    sides ─in turns─► values of each repeat ─► Report: medians, ratios ─► table, NAME.json

A bench is a script with a function `measure(report, given)`. A side that fails ends the bench with
exit code 1 and writes nothing: there is no value that was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
Better = Literal["higher", "lower"]
T = TypeVar("T")


class BenchError(Exception):
    """A side failed; says which and why."""


@dataclass(frozen=True, slots=True)
class Value:
    """One figure.

    >>> Value.of([1.0, 4.0, 2.0], "s", "lower").value
    2.0
    """

    value: float
    """Median of the repeats."""
    unit: str
    better: Better
    n: int
    """Repeats."""
    spread: float
    """Largest less smallest repeat, in the value's unit."""
    params: dict[str, Any] = field(default_factory=dict)
    """What was run, and under `each` every repeat."""

    @classmethod
    def of(cls, each: Sequence[float], unit: str, better: Better, **params: Any) -> Value:
        """The figure of some repeats.

        Raises:
            BenchError: there are none.
        """
        if not each:
            raise BenchError("a value without a single repeat")
        return cls(
            value=significant(statistics.median(each)), unit=unit, better=better, n=len(each),
            spread=significant(max(each) - min(each)),
            params=params | {"each": [significant(v) for v in each]},
        )  # fmt: skip


def significant(value: float, digits: int = 5) -> float:
    """A number without digits that nobody measured.

    >>> significant(1234.5678), significant(0.000123456)
    (1234.6, 0.00012346)
    """
    return float(f"{value:.{digits}g}")


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Repeat by repeat, as the two ran next to each other.

    >>> ratios([2.0, 9.0], [1.0, 3.0])
    [2.0, 3.0]
    """
    return [a / b for a, b in zip(above, below, strict=True)]


def in_turns(
    sides: Mapping[str, Callable[[], T]], repeats: int, say: Callable[[str], None] = print
) -> dict[str, list[T]]:
    """Run every side once a repeat; every second repeat backwards, so that no side is always last.

    Raises:
        BenchError: a side raised; its name is in front.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        for name in order:
            say(f"[{repeat + 1}/{repeats}] {name} ...")
            try:
                results[name].append(sides[name]())
            except Exception as e:
                raise BenchError(f"{name}, repeat {repeat + 1}: {e}") from e
    return results


class Report:
    """What a bench found."""

    def __init__(self, bench: str) -> None:
        self.bench = bench
        self.load = os.getloadavg()[0]
        self.values: dict[str, Value] = {}
        self.notes: list[str] = []
        self.rows: list[tuple[str, ...]] = []

    def add(
        self, key: str, each: Sequence[float], unit: str, better: Better, **params: Any
    ) -> Value:
        """Take a figure from its repeats."""
        try:
            self.values[key] = value = Value.of(each, unit, better, **params)
        except BenchError as e:
            raise BenchError(f"{key}: {e}") from e
        return value

    def note(self, line: str) -> None:
        """A line above the table."""
        self.notes.append(line)

    def row(self, *cells: object) -> None:
        """A line of the table; the first is its head."""
        self.rows.append(tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))

    def table(self) -> str:
        """The rows that the bench gave, then every value with its spread."""
        values: list[tuple[str, ...]] = [("key", "value", "unit", "better", "n", "spread")]
        for key, v in self.values.items():
            values.append((key, f"{v.value:.4g}", v.unit, v.better, str(v.n), f"{v.spread:.3g}"))
        tables = [aligned(rows) for rows in (self.rows, values) if rows]
        return "\n\n".join((["\n".join(self.notes)] if self.notes else []) + tables)

    def as_dict(self) -> dict[str, Any]:
        """The content of NAME.json."""
        return {
            "bench": self.bench,
            "hardware": hardware() | {"load_before": round(self.load, 2)},
            "commit": commit(),
            "values": {key: asdict(v) for key, v in self.values.items()},
        }

    def write(self, path: Path) -> None:
        """Write NAME.json whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of equal width.

    >>> print(aligned([("a", "bb"), ("ccc", "d")]))
    a    bb
    ccc  d
    """
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )


def hardware() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        for line in f:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _gpus() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")
    names = []
    for info in sorted(folder.glob("*/information")):
        lines = info.read_text(encoding="utf-8").splitlines()
        names += [x.partition(":")[2].strip() for x in lines if x.startswith("Model:")]
    return names


def commit(tree: Path = ROOT) -> str:
    """The commit of a tree, with "-dirty" behind it if files differ; "unknown" outside git."""
    try:
        head = _git(tree, "rev-parse", "HEAD")
        dirty = _git(
            tree, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("-dirty" if dirty else "")


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=tree, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def parser(about: str) -> argparse.ArgumentParser:
    """The command line that all benches have."""
    p = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="fewer repeats: less than five minutes")
    p.add_argument("--repeats", type=int, metavar="N", help="repeats of each side")
    p.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    return p


def run_bench(
    name: str, p: argparse.ArgumentParser, measure: Callable[[Report, argparse.Namespace], None]
) -> int:
    """Measure, print, write; the exit code: 1 if any side failed, and then nothing is written."""
    given = p.parse_args()
    report = Report(name)
    # So that a side that runs is ended too: each ends its own in a `finally`.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        measure(report, given)
    except BenchError as e:
        if os.environ.get("ASYNCRL_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"error: bench {name}: {e}", file=sys.stderr)
        return 1
    print(f"\n{report.table()}")
    if given.json:
        report.write(given.json)
        print(f"\nwritten: {given.json}")
    return 0
