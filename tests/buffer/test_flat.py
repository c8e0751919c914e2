"""Minutes at 5,000 samples a second leave the buffer as small as they found it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer.store_file import DATA_FILE
from tests.helpers.buffer_load import run_load
from tests.helpers.buffer_process import BufferProcess, BufferSpec
from tests.helpers.lean_peers import Load

RATE = 5000.0
PAYLOAD_BYTES = 4000
MIB = 1 << 20
GROWTH_BYTES_A_SAMPLE = 8
"""Less than a pointer: whatever was kept of every sample would be more."""
NOISE_BYTES = 4 * MIB
"""What the fit may be off by: a burst in flight is 5,000/s x 4 KB x some 100 ms."""


@dataclass
class Watch:
    """Sizes over time, looked at about twice a second."""

    buffer: BufferProcess
    file: Path
    began: float = field(default_factory=time.monotonic)
    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def __call__(self) -> None:
        file_bytes = self.file.stat().st_size if self.file.exists() else 0
        self.seen.append((time.monotonic() - self.began, self.buffer.rss_bytes, file_bytes))

    def growth(self, after_s: float) -> float:
        """Bytes that RSS grew by from then on, along a straight line through all sizes."""
        late = [(at, rss) for at, rss, _ in self.seen if at >= after_s]
        at, rss = np.array(late, dtype=float).T
        return float(np.polyfit(at, rss, 1)[0] * (at[-1] - at[0]))

    def file_bytes(self, share: float) -> int:
        """The file's size after a share of the time."""
        return self.seen[int(share * (len(self.seen) - 1))][2]


def steady(tmp_path: Path, durability: str, seconds: float, warm_s: float) -> None:
    """Put the load on; look at the sizes and at what came out."""
    load = Load(PAYLOAD_BYTES, seconds, warm_s=warm_s, rate=RATE, max_staleness=63)
    spec = BufferSpec(ledger=load.ledger, durability=durability, folder=str(tmp_path / "store"))
    buffer = BufferProcess(spec, tmp_path / "log")
    watch = Watch(buffer, tmp_path / "store" / DATA_FILE)
    try:
        loaded = run_load(buffer, load, tmp_path, watch)
    finally:
        buffer.close()
    growth, p99 = watch.growth(warm_s), float(np.quantile(loaded.latencies_s, 0.99)) * 1000
    sizes = ", ".join(f"{rss / MIB:.1f}" for _, rss, _ in watch.seen[:: len(watch.seen) // 10])
    half, end = (watch.file_bytes(share) / MIB for share in (0.5, 1.0))
    print(
        f"\n{durability}: {loaded.pushed} samples, {loaded.samples_s:.0f}/s, p99 {p99:.1f} ms; RSS "
        f"{sizes} MiB; along a line it grew {growth / MIB:.2f} MiB, "
        f"{growth / (seconds * RATE):.2f} bytes a sample; store {half:.1f} MiB half way, "
        f"{end:.1f} at the end"
    )
    assert loaded.stats["conserved"]
    assert loaded.stats["counts"]["dropped_stale"] == 0
    assert loaded.samples_s > 0.98 * RATE
    assert growth < GROWTH_BYTES_A_SAMPLE * seconds * RATE + NOISE_BYTES
    assert end <= 1.1 * half + 1.0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("durability", ["none", "process"])
def test_ten_minutes_leave_it_as_it_was(tmp_path: Path, durability: str) -> None:
    steady(tmp_path, durability, seconds=600.0, warm_s=30.0)
