"""One rank of a publication's gloo group: joins it, hears what rank 0 broadcasts. No vLLM needed.

    sender ──bucket by bucket──► room(bucket) ──broadcast──► filled(bucket)
                                 (the next bucket is on its way while one is being dealt with)

Waits for the sender's word to join, released by it or by the joining deadline; for each bucket,
released by the transfer's deadline or at once when a peer leaves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import BroadcastOptions, ProcessGroup

from asyncrl.weights import ARRIVED, GO, Bucket, TransferPlan, uses_loopback


class Sink(Protocol):
    """Where buckets go."""

    def room(self, bucket: Bucket) -> torch.Tensor:
        """Where to receive it; another place than for the bucket before it."""

    def filled(self, bucket: Bucket, part: torch.Tensor) -> None:
        """It is there."""


class GlooReceiver:
    """Holds the group, if there is one."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None

    def join(self, info: Mapping[str, Any], worker: int = 0) -> None:
        """Join the group as this worker of the ranks that were given to us; leaves an earlier one.

        Raises:
            RuntimeError: the sender called it off, since another member failed, or is gone, or
                has not come by the deadline.
        """
        self.leave()
        joined: Future[ProcessGroup] = Future()
        # torch's store waits without end for a server that is stopped, whatever its timeout. The
        # thread ends when that process goes on or ends, and its group with it.
        threading.Thread(
            target=_join_into, args=(joined, info, worker + int(info["rank_offset"])),
            name="weights-join", daemon=True,
        ).start()  # fmt: skip
        try:
            self.group = joined.result(info["timeout_s"])
        except TimeoutError as e:
            raise RuntimeError(
                "gloo weight transfer: the sender stands still or cannot be reached, no group "
                f"within {info['timeout_s']:g} s"
            ) from e
        finally:
            del joined  # its error refers to this frame: a cycle would keep the connection

    def receive(
        self, plan: TransferPlan, sink: Sink, *, bucket_bytes: int, timeout_s: float
    ) -> None:
        """Receive every bucket of a publication.

        Raises:
            RuntimeError: a peer left, or the deadline passed; the group is then of no use.
        """
        if self.group is None:
            raise RuntimeError("gloo weight transfer: not joined, or its group broke earlier")
        deadline = time.monotonic() + timeout_s
        options = BroadcastOptions()
        options.rootRank = 0
        last: tuple[Bucket, torch.Tensor] | None = None
        try:
            for bucket in plan.buckets(bucket_bytes):
                options.timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
                part = sink.room(bucket)
                work = self.group.broadcast([part], options)
                if last is not None:
                    sink.filled(*last)
                work.wait()
                last = bucket, part
            if last is not None:
                sink.filled(*last)
        except Exception:
            self.leave()  # half a bucket may be on the wire
            raise

    def leave(self) -> None:
        """Leave the group; its other members notice."""
        self.group = None


def _join_into(joined: Future[ProcessGroup], info: Mapping[str, Any], rank: int) -> None:
    try:
        joined.set_result(_join(info, rank))
    except BaseException as e:
        joined.set_exception(e)
    finally:
        del joined  # as above


def _join(info: Mapping[str, Any], rank: int) -> ProcessGroup:
    from torch.distributed.distributed_c10d import PrefixStore
    from vllm.distributed.utils import create_tcp_store, init_gloo_process_group

    if uses_loopback(info["master_address"]):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=info["timeout_s"])
    store = create_tcp_store(
        info["master_address"], info["master_port"], world_size=info["world_size"],
        is_master=False, wait_for_workers=False, timeout=timeout,
    )  # fmt: skip
    store.set(ARRIVED.format(rank=rank), "")
    if store.get(GO) != b"yes":
        raise RuntimeError("gloo weight transfer: another member failed to join the group")
    group: ProcessGroup = init_gloo_process_group(
        PrefixStore("gloo", store), rank, info["world_size"], timeout
    )
    return group


def damaged(
    plan: TransferPlan, raw: Mapping[str, memoryview], checksums: Sequence[int]
) -> list[str]:
    """Names of the tensors whose bytes are not those that were sent."""
    names = (spec.name for spec in plan.params)
    return [n for n, a, b in zip(names, plan.checksums(raw), checksums, strict=True) if a != b]
