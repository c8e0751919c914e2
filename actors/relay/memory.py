"""A version of the weights in memory that all processes of a machine share.

    receiver   Draft: received bucket by bucket, compared ─► sealed ─► offered (a small file)
    engine     the offer ─► open the memory through /proc ─► checks ─► mapped, as long as it loads

The memory is a file without a name (memfd): the kernel frees it when the last process that holds it
lets go, however that process ended, so that nothing is ever left behind, and no mount limits its
size. Sealed it cannot change any more, not by its writer either: who opens it has a whole version.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.actors.relay.spare import SEALS, Spare
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import DTYPE_BYTES, Bucket, Slot, TransferPlan, checksum

_ALIGN = 64
"""Bytes: where the flat buffer of a type may begin."""


def places(plan: TransferPlan) -> tuple[dict[str, int], int]:
    """Where the flat buffer of each type begins, and the size of all, in bytes.

    >>> from asyncrl.weights import ParamSpec
    >>> places(TransferPlan((ParamSpec("a", "float16", (3,)), ParamSpec("b", "float32", (2,)))))
    ({'float16': 0, 'float32': 64}, 72)
    """
    found, end = {}, 0
    for dtype, numel in plan.sizes.items():
        found[dtype] = -(-end // _ALIGN) * _ALIGN
        end = found[dtype] + numel * DTYPE_BYTES[dtype]
    return found, end


class Draft:
    """A version as it arrives: a bucket is received into its place, and the tensors that are
    complete with it are compared while the next one is on its way.

    Raises:
        OSError: no memory is left.
    """

    def __init__(
        self, version: Version, plan: TransferPlan, checksums: Sequence[int], spare: Spare
    ) -> None:
        self.version = version
        self._starts, self.nbytes = places(plan)
        self._waiting: dict[str, deque[tuple[Slot, int]]] = {dtype: deque() for dtype in plan.sizes}
        """Of each type, what is not compared yet, in the order in which it comes."""
        for slot, sent in zip(plan.slots, checksums, strict=True):
            self._waiting[slot.spec.dtype].append((slot, sent))
        self._damaged: list[str] = []
        self.pages = spare.take(self.nbytes)

    def room(self, bucket: Bucket) -> torch.Tensor:
        """The place of a bucket.

        Raises:
            OSError: no memory is left.
        """
        start, stop = self._bytes(bucket.dtype, bucket.start, bucket.stop)
        self.pages.allocate(stop)
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        numel = bucket.stop - bucket.start
        return torch.frombuffer(self.pages.map, dtype=dtype, count=numel, offset=start)

    def filled(self, bucket: Bucket, part: torch.Tensor) -> None:
        """Compare what is complete with it."""
        self._compare(bucket.dtype, bucket.stop)

    def seal(self) -> list[str]:
        """Let nobody write any more, once all has come.

        Returns:
            Names of the tensors that are not as they were sent; the draft is then of no use.
        """
        for dtype, waiting in self._waiting.items():
            if waiting:
                self._compare(dtype, waiting[-1][0].stop)
        if not self._damaged:
            self.pages.seal()
        return self._damaged

    def close(self) -> None:
        """Hold it no longer; who has opened it still does."""
        self.pages.close()

    def _compare(self, dtype: str, stop: int) -> None:
        """Compare the tensors of a type that end by element `stop`."""
        waiting = self._waiting[dtype]
        with memoryview(self.pages.map) as raw:
            while waiting and waiting[0][0].stop <= stop:
                slot, sent = waiting.popleft()
                start, end = self._bytes(dtype, slot.start, slot.stop)
                with raw[start:end] as tensor:
                    if checksum(tensor) != sent:
                        self._damaged.append(slot.spec.name)

    def _bytes(self, dtype: str, start: int, stop: int) -> tuple[int, int]:
        """Where these elements of a type lie."""
        at, size = self._starts[dtype], DTYPE_BYTES[dtype]
        return at + start * size, at + stop * size


class Offer(NamedTuple):
    """What the receiver holds for its machine's engines."""

    version: Version
    pid: int
    """Of the receiver."""
    fd: int
    """There."""
    name: str
    nbytes: int
    info: dict[str, Any]
    """As it was sent to the receiver: plan, checksums, adapters."""

    @classmethod
    def of(cls, draft: Draft, info: Mapping[str, Any]) -> Offer:
        """A sealed version of this process."""
        pages = draft.pages
        return cls(draft.version, os.getpid(), pages.fd, pages.name, pages.nbytes, dict(info))

    def write(self, path: Path) -> None:
        """Let engines find it, in place of the last one."""
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(self._asdict() | {"version": str(self.version)}))
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Offer | None:
        """What is offered now; None if nothing is."""
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**said | {"version": Version.parse(said["version"])})

    def open(self) -> int:
        """A descriptor of the whole version, to be closed by the caller.

        Raises:
            WeightSyncError: the receiver has gone on to a newer one, or has ended.
        """
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise WeightSyncError(f"version {self.version} is not held any more: {e}") from e
        with contextlib.suppress(OSError):
            called = os.readlink(f"/proc/self/fd/{fd}")
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
            whole = os.fstat(fd).st_size == self.nbytes
            if called.startswith(f"/memfd:{self.name} ") and sealed and whole:
                return fd
        os.close(fd)  # another file has that number by now
        raise WeightSyncError(f"version {self.version} is not held any more")


def mapped(path: str, plan: TransferPlan) -> dict[str, torch.Tensor]:
    """The flat buffer of each type: views of the file's own pages, which live as long as they."""
    starts, nbytes = places(plan)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Copy on write, since torch knows no tensors that are read-only; nobody writes.
        view = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    return {
        dtype: torch.frombuffer(
            view, dtype=getattr(torch, dtype), count=numel, offset=starts[dtype]
        )
        for dtype, numel in plan.sizes.items()
    }
