"""Memory for the version that comes next, made while nothing else goes on.

    commit ──► the last version is let go ──► allocated and mapped, piece by piece ──► receive
               (a thread that gives way to others)              takes it, as far as it has come

To allocate and clear memory costs as much as to receive into it. Whoever takes it waits for one
piece at most, and allocates the rest as it fills it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import threading

import torch

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PIECE_BYTES = 1 << 20
NICE = 10
"""The thread that makes it gives way to engines, which load just then, by so much."""
_numbers = itertools.count()


class Pages:
    """A file without a name (memfd) of `nbytes`, mapped until it is sealed.

    Raises:
        OSError: no descriptor or address is left.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name = f"asyncrl-{os.getpid()}-{next(_numbers)}"
        self.lock = threading.Lock()
        """Of whoever allocates while it has no owner."""
        self.allocated = 0
        """So many bytes from the start have memory."""
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            self._map: mmap.mmap | None = mmap.mmap(self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def map(self) -> mmap.mmap:
        """Its bytes; what refers to them must not be used once it is sealed."""
        assert self._map is not None, "sealed or closed"
        return self._map

    def allocate(self, stop: int) -> None:
        """Have memory up to byte `stop`.

        Raises:
            OSError: no memory is left; to write there would then kill the process.
        """
        if stop > self.allocated:
            os.posix_fallocate(self.fd, self.allocated, stop - self.allocated)
            self.allocated = stop

    def touch(self, start: int, stop: int) -> None:
        """Have the kernel clear and map these bytes now; they are 0 afterwards."""
        torch.frombuffer(self.map, dtype=torch.uint8)[start : stop : mmap.PAGESIZE].zero_()

    def seal(self) -> None:
        """Let nobody write any more, not even this process: nothing may be on its way to it."""
        self.map.close()
        self._map = None
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Hold it no longer; who has opened it still does.

        What it was mapped for may still be written by a broken transfer, so that the map goes with
        the last tensor that lies in it.
        """
        self._map = None
        os.close(self.fd)


class Spare:
    """Pages of the size that was last needed, if there are any; one at a time."""

    def __init__(self) -> None:
        self._swap = threading.Lock()
        self._pages: Pages | None = None
        self._thread: threading.Thread | None = None
        self._told = False

    def prepare(self, nbytes: int, last: Pages | None) -> None:
        """Close `last`, then make room for `nbytes`, both in a thread of its own."""
        self._drop()
        try:
            pages = self._pages = Pages(nbytes)
        except OSError as e:
            pages = None
            self._failed(nbytes, e)
        self._thread = threading.Thread(
            target=self._make, args=(pages, last), name="relay-spare", daemon=True
        )
        self._thread.start()

    def take(self, nbytes: int) -> Pages:
        """So many bytes, prepared or not; those of another size are dropped.

        Raises:
            OSError: as `Pages`.
        """
        pages = self._withdraw()
        if pages is not None and pages.nbytes != nbytes:
            pages.close()
            pages = None
        return pages or Pages(nbytes)

    def close(self) -> None:
        """Have none; returns when the thread has ended."""
        self._drop()
        if self._thread is not None:
            self._thread.join()

    def _drop(self) -> None:
        if (pages := self._withdraw()) is not None:
            pages.close()

    def _withdraw(self) -> Pages | None:
        """What there is, once its thread has let go of it: that takes a piece at most."""
        with self._swap:
            pages, self._pages = self._pages, None
        if pages is not None:
            with pages.lock:
                pass
        return pages

    def _make(self, pages: Pages | None, last: Pages | None) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        if last is not None:
            last.close()
        if pages is None:
            return
        try:
            while self._one_piece(pages):
                pass
        except OSError as e:
            with self._swap:
                ours = self._pages is pages
                if ours:
                    self._pages = None
            if ours:  # else whoever took it finds out
                pages.close()
                self._failed(pages.nbytes, e)

    def _one_piece(self, pages: Pages) -> bool:
        """Whether there may be another."""
        with pages.lock:
            if self._pages is not pages or pages.allocated == pages.nbytes:
                return False
            start, stop = pages.allocated, min(pages.allocated + PIECE_BYTES, pages.nbytes)
            pages.allocate(stop)
            pages.touch(start, stop)
            return True

    def _failed(self, nbytes: int, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "no memory for the next version (%d bytes) ahead of it: %s; it is allocated as "
                "it comes, which takes longer", nbytes, error,
            )  # fmt: skip
