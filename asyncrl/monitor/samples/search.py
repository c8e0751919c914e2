"""Finding the samples that are asked for, in recordings of any size.

index.jsonl ─► a pass: where each line is, its sample, its place in the order asked for
                 │ the last line of each sample counts
                 ├─► a pass over the frames, if the index does not say all ──► those that match
                 └────────────────────────────────────────────────────────► read when shown

What is kept is some 30 bytes a sample, whatever the samples hold. What is appended meanwhile is
left for the next look.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.errors import AsyncRLError, DataError
from asyncrl.monitor.samples.texts import Texts
from asyncrl.monitor.samples.wanted import Wanted
from asyncrl.recording import INDEX, Entry, Recorded
from asyncrl.types import Trajectory

Key = Literal["order", "reward", "staleness", "batch", "length"]
KEYS: tuple[Key, ...] = ("order", "reward", "staleness", "batch", "length")
_decode = msgspec.json.Decoder(Entry).decode


class Sample(NamedTuple):
    """A recorded sample."""

    entry: Entry
    trajectory: Trajectory


@dataclass(slots=True)
class Counts:
    """What a search met."""

    samples: int = 0
    """Different ones in the index."""
    malformed: int = 0
    """Lines of the index that could not be read; a torn last one is not meant."""
    superseded: int = 0
    """Lines of samples that have a later one."""
    unreadable: int = 0
    """Samples whose frames could not be read, as far as they were wanted."""

    def lines(self) -> Iterator[str]:
        """What was left out, for people."""
        if self.malformed:
            yield f"{self.malformed} lines of the index could not be read"
        if self.unreadable:
            yield f"{self.unreadable} samples are left out, their frames could not be read"
        if self.superseded:
            yield f"{self.superseded} lines are left out, their samples have later ones"


@dataclass(slots=True)
class _Lines:
    """Of each line that could be read; NaN is last in any order."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    keys: array[float] = field(default_factory=lambda: array("d"))
    wanted: array[int] = field(default_factory=lambda: array("b"))


class Search:
    """The samples of a run that are wanted, found when made; iterated, they are read.

    Args:
        folder: of the run.
        wanted: what they must be.
        texts: the run's.
        sort: in which order; "order" is that in which their fate was settled.
        descending: the highest first.

    Raises:
        DataError: nothing is recorded there.
    """

    def __init__(
        self, folder: Path, wanted: Wanted, texts: Texts, sort: Key = "order", *,
        descending: bool = False,
    ) -> None:  # fmt: skip
        self.counts = Counts()
        self._folder, self._wanted, self._texts, self._sort = (
            folder / "trajectories", wanted, texts, sort
        )  # fmt: skip
        lines = self._read_index()
        found = self._last_ones(lines)
        keys = np.frombuffer(lines.keys, np.float64)[found]
        offsets = np.frombuffer(lines.offsets, np.int64)[found]
        if wanted.needs_frames or sort == "length":
            offsets, keys = self._match_frames(offsets, keys)
        if sort == "order":
            self._offsets = offsets[::-1] if descending else offsets
        else:
            self._offsets = offsets[np.argsort(-keys if descending else keys, kind="stable")]

    def __len__(self) -> int:
        """How many match; of those whose frames nobody looked at, some may turn out unreadable."""
        return len(self._offsets)

    def __iter__(self) -> Iterator[Sample]:
        for _, sample in self._readable(self._offsets):
            yield sample

    def _readable(self, offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, Sample]]:
        """The samples of these lines, each with its place among them."""
        with open(self._folder / INDEX, "rb") as file:
            for k, offset in enumerate(offsets):
                file.seek(int(offset))
                try:
                    entry = _decode(file.readline())
                    trajectory = Recorded(entry, self._folder).trajectory()
                except (AsyncRLError, ValueError, OverflowError):
                    self.counts.unreadable += 1
                    continue
                yield k, Sample(entry, trajectory)

    def _read_index(self) -> _Lines:
        lines, offset = _Lines(), 0
        for line in self._raw_lines():
            try:
                entry = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.counts.malformed += 1
            else:
                lines.offsets.append(offset)
                lines.digests.append(xxhash.xxh3_64_intdigest(msgspec.json.encode(entry.id)))
                lines.keys.append(_key(self._sort, entry))
                lines.wanted.append(self._wanted.in_index(entry))
            offset += len(line)
        return lines

    def _raw_lines(self) -> Iterator[bytes]:
        index = self._folder / INDEX
        try:
            file = open(index, "rb")  # noqa: SIM115
        except OSError as e:
            raise DataError(
                f"{index}: no recording can be read there ({e.strerror}): the run has "
                "record.trajectories=false, or the fate of no sample is settled yet"
            ) from e
        with file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _last_ones(self, lines: _Lines) -> npt.NDArray[np.bool_]:
        """[lines] the last line of each sample, if it is wanted."""
        n = len(lines.digests)
        _, from_behind = np.unique(np.frombuffer(lines.digests, np.uint64)[::-1], return_index=True)
        last = np.zeros(n, bool)
        last[n - 1 - from_behind] = True
        self.counts.samples = len(from_behind)
        self.counts.superseded = n - len(from_behind)
        last &= np.frombuffer(lines.wanted, np.int8) != 0
        return last

    def _match_frames(
        self, offsets: npt.NDArray[np.int64], keys: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Those of them whose frames are wanted, with their keys."""
        kept, lengths = array("q"), array("d")
        for k, (_, trajectory) in self._readable(offsets):
            if self._wanted.in_frames(trajectory, self._texts):
                kept.append(k)
                lengths.append(trajectory.header.response_tokens)
        chosen = np.frombuffer(kept, np.int64)
        by_length = self._sort == "length"
        return offsets[chosen], np.frombuffer(lengths, np.float64) if by_length else keys[chosen]


def _key(sort: Key, entry: Entry) -> float:
    value: float | None = None
    if sort == "reward":
        value = entry.reward
    elif sort == "staleness":
        value = entry.head_staleness
    elif sort == "batch":
        value = entry.batch
    return math.nan if value is None else float(value)
