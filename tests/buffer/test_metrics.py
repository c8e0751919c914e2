"""What the buffer reports, against docs/metrics.md."""

from __future__ import annotations

from asyncrl.types import Version
from tests.buffer.conftest import small_ledger
from tests.buffer.samples import envelope
from tests.helpers.metric_names import documented, undocumented


def test_the_page_has_exactly_the_buffers_metrics() -> None:
    ledger = small_ledger(
        groups_per_batch=1, replay_groups=1, max_bytes=10**6, sample_bytes=4096, retain=True
    )  # fmt: skip
    first, second = ledger.lease("a", Version(0, 0), 4, now=0)
    for lease, samples in ((first, (0, 1)), (second, (0,))):
        for k in samples:
            sample = lease.group.sample(k)
            ledger.accept(envelope(sample, lease.lease, "a", Version(0, 0), float(k)), now=0)
    ledger.assign(1)
    ledger.commit(1)
    ledger.rewind(0, incarnation=1)  # some metrics are of a learner that went back
    ledger.assign(1)
    ledger.commit(1)
    names = set(ledger.metrics(now=1))
    assert undocumented(names, "Buffer") == []
    assert {p.pattern for p in documented("Buffer")} == names
