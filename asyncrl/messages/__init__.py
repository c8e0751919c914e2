"""The messages: one class each, by plane, with a comment on every field (docs/wire.md).

What travels is a map of these fields; `asyncrl.wire` encodes and decodes it. Callers import them
from there.
"""

from __future__ import annotations

from asyncrl.messages.data import DataMessage
from asyncrl.messages.records import Record
from asyncrl.messages.weights import WeightsMessage

AnyMessage = DataMessage | WeightsMessage | Record
"""Whatever may arrive."""
