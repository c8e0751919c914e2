"""A sample and one message of each kind, with the bytes that docs/wire.md says they have."""

from __future__ import annotations

import numpy as np

from asyncrl import wire
from asyncrl.types import (
    FailureKind,
    FinishReason,
    GroupId,
    Lease,
    Prompt,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)

HEADER = SampleHeader(
    id=SampleId("sums", 0, 12, 3), lease=812, actor="actor-0", prompt_tokens=2, response_tokens=3,
    policy_tokens=3, version_min=Version(0, 3), version_max=Version(0, 4),
    version_dispatch=Version(0, 3), version_finish=Version(0, 4), reward=1.0,
    finish_reason=FinishReason.STOP, temperature=1.0,
)  # fmt: skip
TRAJECTORY = Trajectory(
    header=HEADER,
    prompt_ids=np.array([1, 258], np.int32),
    response_ids=np.array([3, 4, 2], np.int32),
    behaviour_logprobs=np.array([-0.5, -1.0, 0.0], np.float32),
    versions=np.array([3, 3, 4], np.int32),
    incarnations=np.array([0, 0, 0], np.int32),
    loss_mask=np.array([1, 1, 1], np.uint8),
)

GOLDEN_HEADER = (
    b"\x8e"
    b"\xa2id\x94\xa4sums\x00\x0c\x03"
    b"\xa5lease\xcd\x03\x2c"
    b"\xa5actor\xa7actor-0"
    b"\xadprompt_tokens\x02"
    b"\xafresponse_tokens\x03"
    b"\xadpolicy_tokens\x03"
    b"\xabversion_min\x92\x00\x03"
    b"\xabversion_max\x92\x00\x04"
    b"\xb0version_dispatch\x92\x00\x03"
    b"\xaeversion_finish\x92\x00\x04"
    b"\xa6reward\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    b"\xadfinish_reason\xa4stop"
    b"\xabtemperature\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    b"\xa8kv_mixed\xc2"
)
GOLDEN_PAYLOAD = bytes.fromhex(
    "01000000 02010000"  # prompt_ids
    "03000000 04000000 02000000"  # response_ids
    "000000bf 000080bf 00000000"  # behaviour_logprobs
    "03000000 03000000 04000000"  # versions
    "00000000 00000000 00000000"  # incarnations
    "010101"  # loss_mask
)

GOLDEN: list[tuple[wire.Message, bytes]] = [
    (
        wire.Hello(
            req=1, run_id="r1", role="actor", rank=0, pid=4711, resumed=True, leases=(7, 812)
        ),
        b"\x89\xa4type\xa5hello\xa6schema\x03\xa3req\x01"
        b"\xa6run_id\xa2r1"
        b"\xa4role\xa5actor"
        b"\xa4rank\x00"
        b"\xa3pid\xcd\x12g"
        b"\xa7resumed\xc3"
        b"\xa6leases\x92\x07\xcd\x03,",
    ),
    (
        wire.LeaseRequest(req=2, actor="actor-0", applied=Version(1, 3), capacity=8, wait_s=5.0),
        b"\x87\xa4type\xadlease_request\xa6schema\x03\xa3req\x02"
        b"\xa5actor\xa7actor-0"
        b"\xa7applied\x92\x01\x03"
        b"\xa8capacity\x08"
        b"\xa6wait_s\xcb@\x14\x00\x00\x00\x00\x00\x00",
    ),
    (
        wire.Push(req=7, header=HEADER),
        b"\x84\xa4type\xa4push\xa6schema\x03\xa3req\x07\xa6header" + GOLDEN_HEADER,
    ),
    (
        wire.Progress(req=3, actor="actor-0", tokens={812: 300}),
        b"\x85\xa4type\xa8progress\xa6schema\x03\xa3req\x03"
        b"\xa5actor\xa7actor-0"
        b"\xa6tokens\x81\xcd\x03,\xcd\x01,",
    ),
    (
        wire.Fail(
            req=4,
            actor="actor-0",
            lease=812,
            id=SampleId("sums", 0, 12, 3),
            kind=FailureKind.DATA,
            reason="empty",
        ),
        b"\x88\xa4type\xa4fail\xa6schema\x03\xa3req\x04"
        b"\xa5actor\xa7actor-0"
        b"\xa5lease\xcd\x03,"
        b"\xa2id\x94\xa4sums\x00\x0c\x03"
        b"\xa4kind\xa4data"
        b"\xa6reason\xa5empty",
    ),
    (
        wire.Pull(req=5, rank=1, batch=31, wait_s=10.0),
        b"\x86\xa4type\xa4pull\xa6schema\x03\xa3req\x05"
        b"\xa4rank\x01"
        b"\xa5batch\x1f"
        b"\xa6wait_s\xcb@$\x00\x00\x00\x00\x00\x00",
    ),
    (
        wire.Commit(req=6, batch=31, dropped=(SampleId("sums", 0, 12, 3),), incarnation=2),
        b"\x86\xa4type\xa6commit\xa6schema\x03\xa3req\x06"
        b"\xa5batch\x1f"
        b"\xa7dropped\x91\x94\xa4sums\x00\x0c\x03"
        b"\xabincarnation\x02",
    ),
    (
        wire.Published(req=8, version=Version(0, 31)),
        b"\x84\xa4type\xa9published\xa6schema\x03\xa3req\x08\xa7version\x92\x00\x1f",
    ),
    (
        wire.Covered(req=9, batch=30),
        b"\x84\xa4type\xa7covered\xa6schema\x03\xa3req\t\xa5batch\x1e",
    ),
    (
        wire.Rewind(req=10, batch=30, incarnation=1),
        b"\x85\xa4type\xa6rewind\xa6schema\x03\xa3req\n\xa5batch\x1e\xabincarnation\x01",
    ),
    (
        wire.SaveLedger(req=15, path="/runs/r/ledger", batch=30),
        b"\x85\xa4type\xabsave_ledger\xa6schema\x03\xa3req\x0f"
        b"\xa4path\xae/runs/r/ledger"
        b"\xa5batch\x1e",
    ),
    (
        wire.Saved(req=15, samples=64, nbytes=4096),
        b"\x85\xa4type\xa5saved\xa6schema\x03\xa3req\x0f\xa7samples@\xa6nbytes\xcd\x10\x00",
    ),
    (
        wire.Stop(req=11, reason="done", final=Version(0, 31), evaluate=True),
        b"\x86\xa4type\xa4stop\xa6schema\x03\xa3req\x0b"
        b"\xa6reason\xa4done"
        b"\xa5final\x92\x00\x1f"
        b"\xa8evaluate\xc3",
    ),
    (
        wire.Gone(req=12, actor="actor-0", reason="exit 1"),
        b"\x85\xa4type\xa4gone\xa6schema\x03\xa3req\x0c\xa5actor\xa7actor-0\xa6reason\xa6exit 1",
    ),
    (
        wire.Scale(req=14, run_id="r1", actors=3, leaving=("actor-3",)),
        b"\x86\xa4type\xa5scale\xa6schema\x03\xa3req\x0e"
        b"\xa6run_id\xa2r1"
        b"\xa6actors\x03"
        b"\xa7leaving\x91\xa7actor-3",
    ),
    (
        wire.Scaled(req=14, before=4, actors=3, starting=(), leaving=("actor-3",)),
        b"\x87\xa4type\xa6scaled\xa6schema\x03\xa3req\x0e"
        b"\xa6before\x04"
        b"\xa6actors\x03"
        b"\xa8starting\x90"
        b"\xa7leaving\x91\xa7actor-3",
    ),
    (
        wire.StatsRequest(req=13),
        b"\x83\xa4type\xadstats_request\xa6schema\x03\xa3req\r",
    ),
    (
        wire.Ok(req=1, checkpoint=True),
        b"\x84\xa4type\xa2ok\xa6schema\x03\xa3req\x01\xaacheckpoint\xc3",
    ),
    (
        wire.Error(req=2, error="HelloNeeded", message="say hello"),
        b"\x85\xa4type\xa5error\xa6schema\x03\xa3req\x02"
        b"\xa5error\xabHelloNeeded"
        b"\xa7message\xa9say hello",
    ),
    (
        wire.Leases(
            req=2,
            leases=(
                Lease(
                    lease=812,
                    group=GroupId("sums", 0, 12),
                    samples=(2, 3),
                    version=Version(0, 3),
                    deadline_s=60.0,
                    prompt=Prompt(text="2 + 3 =", answer="5", extra={"level": 1}),
                ),
            ),
            state="running",
            final=None,
            evaluate=False,
            held_back=True,
            leave=True,
            actors=3,
        ),
        b"\x8a\xa4type\xa6leases\xa6schema\x03\xa3req\x02"
        b"\xa6leases\x91\x86\xa5lease\xcd\x03,\xa5group\x93\xa4sums\x00\x0c\xa7samples\x92\x02\x03"
        b"\xa7version\x92\x00\x03\xaadeadline_s\xcb@N\x00\x00\x00\x00\x00\x00"
        b"\xa6prompt\x84\xa8messages\xc0\xa4text\xa72 + 3 =\xa6answer\xa15"
        b"\xa5extra\x81\xa5level\x01"
        b"\xa5state\xa7running"
        b"\xa5final\xc0"
        b"\xa8evaluate\xc2"
        b"\xa9held_back\xc3"
        b"\xa5leave\xc3"
        b"\xa6actors\x03",
    ),
    (
        wire.Ack(req=7, status="accepted"),
        b"\x84\xa4type\xa3ack\xa6schema\x03\xa3req\x07\xa6status\xa8accepted",
    ),
    (
        wire.Part(req=9, batch=31, rank=1, manifest=(HEADER,), fresh=1, mine=(0,)),
        b"\x88\xa4type\xa4part\xa6schema\x03\xa3req\t"
        b"\xa5batch\x1f"
        b"\xa4rank\x01"
        b"\xa8manifest\x91" + GOLDEN_HEADER + b"\xa5fresh\x01"
        b"\xa4mine\x91\x00",
    ),
    (
        wire.NotYet(req=5, waiting_for="12 samples"),
        b"\x84\xa4type\xa7not_yet\xa6schema\x03\xa3req\x05\xabwaiting_for\xaa12 samples",
    ),
    (
        wire.Stopped(req=5, reason="done"),
        b"\x84\xa4type\xa7stopped\xa6schema\x03\xa3req\x05\xa6reason\xa4done",
    ),
    (
        wire.Stats(
            req=13,
            counts={"trained": 8},
            gauges={"queue/depth": 2.0},
            conserved=True,
            state="done",
            final=Version(0, 31),
            evaluate=True,
            reason="end",
            waiting_for="",
        ),
        b"\x8b\xa4type\xa5stats\xa6schema\x03\xa3req\r"
        b"\xa6counts\x81\xa7trained\x08"
        b"\xa6gauges\x81\xabqueue/depth\xcb@\x00\x00\x00\x00\x00\x00\x00"
        b"\xa9conserved\xc3"
        b"\xa5state\xa4done"
        b"\xa5final\x92\x00\x1f"
        b"\xa8evaluate\xc3"
        b"\xa6reason\xa3end"
        b"\xabwaiting_for\xa0",
    ),
    (
        wire.Announce(
            name="actor-0",
            pid=4711,
            endpoint="tcp://127.0.0.1:5",
            workers=1,
            applied=Version(0, 3),
            ready=True,
        ),
        b"\x89\xa4type\xa8announce\xa6schema\x03\xa3req\x00"
        b"\xa4name\xa7actor-0"
        b"\xa3pid\xcd\x12g"
        b"\xa8endpoint\xb1tcp://127.0.0.1:5"
        b"\xa7workers\x01"
        b"\xa7applied\x92\x00\x03"
        b"\xa5ready\xc3",
    ),
    (
        wire.WeightsInit(req=1, info={"port": 5}, rank_offset=2),
        b"\x85\xa4type\xacweights_init\xa6schema\x03\xa3req\x01"
        b"\xa4info\x81\xa4port\x05"
        b"\xabrank_offset\x02",
    ),
    (
        wire.WeightsBegin(req=2, version=Version(0, 4)),
        b"\x84\xa4type\xadweights_begin\xa6schema\x03\xa3req\x02\xa7version\x92\x00\x04",
    ),
    (
        wire.WeightsReceive(req=3, info={"names": ["w"]}),
        b"\x84\xa4type\xafweights_receive\xa6schema\x03\xa3req\x03\xa4info\x81\xa5names\x91\xa1w",
    ),
    (
        wire.WeightsCommit(req=4, version=Version(0, 4)),
        b"\x84\xa4type\xaeweights_commit\xa6schema\x03\xa3req\x04\xa7version\x92\x00\x04",
    ),
    (
        wire.Record(
            role="actor",
            rank=1,
            step=30,
            version=30,
            incarnation=0,
            metrics={"time/train_s": 0.5},
            hist={"staleness/head": {"edges": [0.0, 1.0], "counts": [3.0]}},
            event={"event": "ready"},
            waits=(wire.OpenWait(what="a push", on="buffer-0", age_s=1.5, deadline_s=None),),
            pid=4711,
        ),
        b"\x8d\xa4type\xa6record\xa6schema\x03\xa3req\x00"
        b"\xa4role\xa5actor"
        b"\xa4rank\x01"
        b"\xa4step\x1e"
        b"\xa7version\x1e"
        b"\xabincarnation\x00"
        b"\xa7metrics\x81\xactime/train_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa4hist\x81\xaestaleness/head\x82"
        b"\xa5edges\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb?\xf0\x00\x00\x00\x00\x00\x00"
        b"\xa6counts\x91\xcb@\x08\x00\x00\x00\x00\x00\x00"
        b"\xa5event\x81\xa5event\xa5ready"
        b"\xa5waits\x91\x84\xa4what\xa6a push\xa2on\xa8buffer-0"
        b"\xa5age_s\xcb?\xf8\x00\x00\x00\x00\x00\x00\xaadeadline_s\xc0"
        b"\xa3pid\xcd\x12g",
    ),
]
"""Each message and its header."""
GOLDEN_OF = {type(message): header for message, header in GOLDEN}
GOLDEN_PUSH = GOLDEN_OF[wire.Push]
