"""Load on a buffer in a process of its own, by lean peers in theirs; what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.buffer_process import ROOT, BufferProcess
from tests.helpers.lean_peers import END_S, Load


@dataclass(frozen=True)
class Loaded:
    """What came of it."""

    samples_s: float
    """Committed in the counted time."""
    pushed: int
    latencies_s: np.ndarray
    """With `rate`: from the time that a push was due to its ack, those due in the counted time."""
    stats: dict[str, Any]
    """Of the buffer at the end: counts, gauges, conserved."""


def run_load(
    buffer: BufferProcess, load: Load, scratch: Path, watch: Callable[[], None] = lambda: None
) -> Loaded:
    """Put the load on the buffer; its run is stopped at the end.

    Args:
        watch: called about twice a second.

    Raises:
        RuntimeError: a peer failed; its words are in front.
    """
    version = scratch / "version"
    version.write_bytes(bytes(8))
    common = asdict(load) | {"endpoint": buffer.endpoint, "version": str(version)}
    peers = [_start("consumer", common)]
    for rank in range(load.producers):
        peers.append(_start("producer", common | {"rank": rank, "scratch": str(scratch)}))
    try:
        until = time.monotonic() + load.warm_s + load.seconds + 2 * END_S
        while any(p.poll() is None for p in peers):
            watch()
            if time.monotonic() > until:
                raise RuntimeError("the load did not end by itself")
            if any(p.poll() for p in peers):
                break
            peers[0].poll() is None and _wait(peers[0], 0.5)
        results = [_result(p) for p in peers]
    finally:
        for p in peers:
            p.kill()
            p.communicate()
    late = [np.load(r["latencies"]) for r in results[1:] if load.rate]
    return Loaded(
        samples_s=results[0]["samples_s"], pushed=sum(r["pushed"] for r in results[1:]),
        latencies_s=np.concatenate(late) if late else np.zeros(0), stats=results[0]["stats"],
    )  # fmt: skip


def _start(role: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.lean_peers", role, json.dumps(spec)], cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=END_S)
    if process.returncode:
        raise RuntimeError(f"{process.args[3]}: {err.strip()[-500:]}")  # type: ignore[index]
    return json.loads(out)  # type: ignore[no-any-return]
