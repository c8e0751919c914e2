"""Bytes: what samples take, what is set aside for those being produced, whether more fits.

    open a group ─► every sample of it set aside at its longest ─► accept: its real size instead
                                                               └─► given up, group removed: free
    real sizes are free again when nobody holds the sample: its batch, the replay pool, a replay

Only the opening of a group asks for room. Whoever takes up a sample of an open group again needs
none, so that bytes never hold back what an older group waits for.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.buffer.rules import Rules
from asyncrl.types import SAMPLE_OVERHEAD, Envelope

Key = tuple[int, int]
"""A dispatch, and the sample it brought: number of the lease, index of the sample."""


class Room:
    """Counts the bytes that `Rules.max_bytes` limits."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.payload_bytes = 0
        """Of the samples held."""
        self.missing = 0
        """Samples of open groups neither accepted nor given up."""
        self._holders: dict[Key, int] = {}  # (lease, sample) -> how many hold it

    def takes(self, envelope: Envelope) -> bool:
        """Whether a result is as short as what was set aside for it; always without a limit."""
        r = self._rules
        return r.max_bytes is None or envelope.nbytes + SAMPLE_OVERHEAD <= r.sample_bytes

    def hold(self, envelope: Envelope) -> None:
        """Somebody holds the sample (once more)."""
        key = key_of(envelope)
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if not holders:
            self.payload_bytes += envelope.nbytes

    def release(self, envelope: Envelope) -> None:
        """One of its holders is done with the sample."""
        key = key_of(envelope)
        holders = self._holders[key] - 1
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]
            self.payload_bytes -= envelope.nbytes

    def shared(self, envelope: Envelope) -> bool:
        """Whether more than one hold it."""
        return self._holders[key_of(envelope)] > 1

    @property
    def reserved_bytes(self) -> int:
        """Set aside for the samples that open groups miss."""
        return self.missing * self._rules.sample_bytes

    @property
    def used_bytes(self) -> int:
        """What counts against the limit: payloads, SAMPLE_OVERHEAD for each, what is set aside."""
        return self.payload_bytes + len(self._holders) * SAMPLE_OVERHEAD + self.reserved_bytes

    def within_limit(self) -> bool:
        """Whether the limit is kept now."""
        return self._rules.max_bytes is None or self.used_bytes <= self._rules.max_bytes

    def fits_group(self, without: Iterable[Envelope] = ()) -> bool:
        """Whether one more group, at its longest, keeps the limit.

        Args:
            without: samples with one holder each, counted as released.
        """
        r = self._rules
        if r.max_bytes is None:
            return True
        freed = sum(e.nbytes + SAMPLE_OVERHEAD for e in without)
        return self.used_bytes - freed + r.group_bytes <= r.max_bytes


def key_of(envelope: Envelope) -> Key:
    """The key of a sample."""
    return envelope.header.lease, envelope.header.id.sample
