"""A version of the weights in memory that all processes of a machine share.

    receiver   Draft: written bucket by bucket ─► compared ─► sealed ─► offered (a small file)
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.actors.gloo_receiver import damaged
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import DTYPE_BYTES, Bucket, TransferPlan

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
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
    """A version as it arrives. Buckets go through two buffers that are kept: to write them costs
    half of what receiving into new memory would."""

    def __init__(self, version: Version, plan: TransferPlan, buffers: Buffers) -> None:
        self.version, self.plan, self._buffers = version, plan, buffers
        self.name = f"asyncrl-{os.getpid()}-{version}"
        self._starts, self.nbytes = places(plan)
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def room(self, bucket: Bucket) -> torch.Tensor:
        """Where to receive a bucket."""
        return self._buffers.next(bucket)

    def filled(self, bucket: Bucket, part: torch.Tensor) -> None:
        """Write it to its place.

        Raises:
            OSError: no memory is left.
        """
        at = self._starts[bucket.dtype] + bucket.start * DTYPE_BYTES[bucket.dtype]
        left = part.view(torch.uint8).numpy().data
        while left:
            written = os.pwrite(self.fd, left, at)
            left, at = left[written:], at + written

    def seal(self, checksums: Sequence[int]) -> list[str]:
        """Compare each tensor and let nobody write any more.

        Returns:
            Names of the tensors that are not as they were sent; the draft is then of no use.
        """
        with mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_READ) as view:
            raw = memoryview(view)
            parts = {
                dtype: raw[start : start + self.plan.sizes[dtype] * DTYPE_BYTES[dtype]]
                for dtype, start in self._starts.items()
            }
            try:
                wrong = damaged(self.plan, parts, checksums)
            finally:
                for part in (*parts.values(), raw):
                    part.release()
        if not wrong:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        return wrong

    def close(self) -> None:
        """Hold it no longer; who has opened it still does."""
        os.close(self.fd)


class Buffers:
    """Two buffers of a bucket, taken in turns."""

    def __init__(self) -> None:
        self._pair = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def next(self, bucket: Bucket) -> torch.Tensor:
        """Room for a bucket; what was in it two buckets ago is gone."""
        nbytes = (bucket.stop - bucket.start) * DTYPE_BYTES[bucket.dtype]
        self._pair.reverse()
        if self._pair[0].numel() < nbytes:
            self._pair[0] = torch.empty(nbytes, dtype=torch.uint8)
        return self._pair[0][:nbytes].view(getattr(torch, bucket.dtype))


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
        return cls(draft.version, os.getpid(), draft.fd, draft.name, draft.nbytes, dict(info))

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
