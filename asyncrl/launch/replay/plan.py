"""What a recording has for a learner alone: the run's batches, as its ranks pulled them.

    trajectories/index.jsonl ─► of each batch the line's incarnation ─► in consumption order
                                                                    └─► for each rank its part

A batch that was trained again, after a restart of the learner or a resume, counts as the run's line
has it (launch/resume/branches.py): that is the lineage of the final weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.balance import balance
from asyncrl.errors import DataError
from asyncrl.launch.resume.lineage import branches_of
from asyncrl.recording import Recorded, read_recording
from asyncrl.types import BatchPart, GroupId, SampleHeader, SampleId, Version

FOLDER = "trajectories"
"""Below the run's folder."""
_ByBatch = dict[int, dict[int, dict[SampleId, Recorded]]]
"""What is recorded of each batch, by the incarnation that trained it."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One batch of the run's line."""

    batch: int
    version: Version
    """Of the learner when it trained it."""
    samples: tuple[Recorded, ...]
    """In the order of consumption: the order of the manifest."""

    @property
    def ranks(self) -> int:
        """Learner ranks that trained it, at least."""
        return 1 + max(r.entry.rank or 0 for r in self.samples)

    def as_recorded(self, world: int) -> bool:
        """Whether so many ranks get what each of them got in the run."""
        return self.ranks == world or (self.ranks < world and len(self.samples) < world)

    def part(self, rank: int, world: int) -> BatchPart:
        """What a rank of `world` gets: as in the run; dealt anew for another number of ranks.

        Raises:
            DataError: its frames cannot be read, or are not those of the index.
        """
        envelopes = [r.envelope() for r in self.samples]
        manifest = tuple(e.header for e in envelopes)
        for recorded, header in zip(self.samples, manifest, strict=True):
            if recorded.entry.id != header.id:
                raise DataError(
                    f"{recorded.folder / recorded.entry.file} at byte {recorded.entry.offset} has "
                    f"sample {header.id}, the index says {recorded.entry.id}: it is damaged"
                )
        if self.as_recorded(world):
            mine = tuple(i for i, r in enumerate(self.samples) if r.entry.rank == rank)
        else:
            mine = balance(_by_group(manifest), world)[rank]
        return BatchPart(
            self.batch, rank, manifest, mine, tuple(envelopes[i] for i in mine), len(manifest)
        )


def _by_group(manifest: Sequence[SampleHeader]) -> list[list[int]]:
    groups: dict[GroupId, list[int]] = {}
    for header in manifest:
        groups.setdefault(header.id.group, []).append(header.tokens)
    return list(groups.values())


def read_batches(run: Path, first: int, last: int | None, ended: str = "") -> list[RecordedBatch]:
    """The batches `first` to `last` of the run's line.

    Args:
        run: its folder.
        last: None is the last one that is recorded.
        ended: why the recording ended early, for the message; "" if it did not.

    Raises:
        DataError: there is no recording, or a batch is not in it whole.
    """
    by_batch: _ByBatch = {}
    for recorded in read_recording(run / FOLDER):
        e = recorded.entry
        if e.batch is not None and e.outcome in ("trained", "dropped_stale"):
            by_batch.setdefault(e.batch, {}).setdefault(e.incarnation, {})[e.id] = recorded
    if last is None:
        last = max(by_batch, default=0)
    of = _incarnations(run, by_batch)
    missing = [k for k in range(first, last + 1) if k not in of]
    if missing or last < first:
        which = f"batch {missing[0]}" if missing else f"a batch from {first} on"
        if missing and missing[0] in by_batch:
            which += " of its own line, only one of a branch that the run left"
        why = f": recording ended early ({ended})" if ended else ""
        raise DataError(
            f"{run / FOLDER} has no {which}, the run trained {last}{why}; replay the batches "
            "before it with --steps, or from a later checkpoint with --from-step"
        )
    return [_ordered(k, of[k], by_batch[k][of[k]]) for k in range(first, last + 1)]


def _incarnations(run: Path, by_batch: _ByBatch) -> dict[int, int]:
    """Of each batch of the run's line that is recorded, the incarnation that trained it.

    Where lineage.json does not tell, the highest; but none that is lower than that of a batch
    before it: such a one is of a branch that the run left.
    """
    branches, found, reached = branches_of(run), {}, 0
    newest = max((i for tried in by_batch.values() for i in tried), default=0)
    for batch, tried in sorted(by_batch.items()):
        told = branches.incarnation_at(batch) if newest <= branches.newest else None
        incarnation = max(tried) if told is None else told
        if incarnation in tried and incarnation >= reached:
            found[batch] = reached = incarnation
    return found


def _ordered(batch: int, incarnation: int, lines: dict[SampleId, Recorded]) -> RecordedBatch:
    samples = sorted(lines.values(), key=lambda r: (r.entry.position or 0, r.entry.id.sample))
    version = samples[0].entry.version
    assert version is not None
    return RecordedBatch(batch, Version(incarnation, version), tuple(samples))
