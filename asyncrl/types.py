"""The records that roles exchange. Each field says its shape, dtype and unit.

Axis letters: P prompt tokens, T response tokens of one sample.
`asyncrl.wire` is the only codec for these records; docs/wire.md is its specification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_VERSION = -1
"""The version of a token that no policy produced (tool or environment tokens)."""


class Version(NamedTuple):
    """A weight version (i, v): incarnation, then publications so far; ordered as a pair.

    >>> Version(0, 7) < Version(1, 3)
    True
    >>> str(Version(1, 3))
    '1:3'
    """

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read what `str` wrote.

        >>> Version.parse("1:3")
        Version(incarnation=1, version=3)
        """
        incarnation, _, version = text.partition(":")
        return cls(int(incarnation), int(version))


INITIAL = Version(0, 0)
"""The version of the weights in the model's folder."""


class GroupId(NamedTuple):
    """One prompt, once: which source, which pass over it, which row.

    >>> GroupId("arithmetic", 0, 12).sample(3)
    SampleId(source='arithmetic', epoch=0, index=12, sample=3)
    """

    source: str
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def sample(self, k: int) -> SampleId:
        """The id of the group's k-th sample."""
        return SampleId(self.source, self.epoch, self.index, k)


class SampleId(NamedTuple):
    """One response; also the key by which a second result for it is a duplicate."""

    source: str
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    sample: int

    @property
    def group(self) -> GroupId:
        """The group this sample belongs to."""
        return GroupId(self.source, self.epoch, self.index)


class FinishReason(StrEnum):
    """Why a response ended: a stop token, the length limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FailureKind(StrEnum):
    """What failed: the machinery (retried elsewhere), the prompt's data, or the reward."""

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"
    REWARD = "reward"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sample answers. Text only: the actor tokenises, once, with its tokenizer.

    >>> Prompt(messages=[{"role": "user", "content": "2 + 3?"}], answer="5").answer
    '5'
    """

    messages: list[dict[str, str]] | None = None
    """Chat turns, rendered by the tokenizer's chat template; or None when `text` is set."""
    text: str | None = None
    """A plain prompt, tokenised as it stands; or None when `messages` is set."""
    answer: str | None = None
    """The ground truth handed to the reward, if the task has one."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of the row, handed to the reward as they are (JSON types)."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to produce some samples of one group, given to one actor.

    >>> Lease(lease=1, group=GroupId("sums", 0, 0), samples=(0, 1), version=Version(0, 0),
    ...       deadline_s=60.0, prompt=Prompt(text="2 + 3 =")).samples
    (0, 1)
    """

    lease: int
    """Number of the lease, unique in the run."""
    group: GroupId
    samples: tuple[int, ...]
    """Which of the group's samples to produce (0-based)."""
    version: Version
    """The version that admission counted on: an engine below it must refuse the lease."""
    deadline_s: float
    """Seconds without tokens, rewards or results after which the lease expires."""
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class SampleHeader:
    """What the buffer reads of a sample; the arrays travel beside it, undecoded.

    >>> h = SampleHeader(id=SampleId("sums", 0, 0, 1), lease=1, actor="actor-0",
    ...     prompt_tokens=4, response_tokens=2, policy_tokens=2, version_min=Version(0, 3),
    ...     version_max=Version(0, 4), version_dispatch=Version(0, 3),
    ...     version_finish=Version(0, 4), reward=1.0, finish_reason=FinishReason.STOP,
    ...     temperature=1.0)
    >>> h.tokens
    6
    """

    id: SampleId
    lease: int
    actor: str
    """Name of the actor, e.g. "actor-0"."""
    prompt_tokens: int
    """P."""
    response_tokens: int
    """T."""
    policy_tokens: int
    """Response tokens that carry loss (sum of the loss mask)."""
    version_min: Version
    """Version of a policy token with the lowest version number (of those: lowest incarnation).
    Numbers are compared across incarnations, since staleness and its bound are."""
    version_max: Version
    """Likewise the highest number (of those: highest incarnation)."""
    version_dispatch: Version
    """Version applied by the engine when the request was issued.
    No token is of a lower incarnation."""
    version_finish: Version
    """Version of the last token: its own stamp."""
    reward: float
    finish_reason: FinishReason
    temperature: float
    """Sampling temperature; the learner divides its logits by it."""
    kv_mixed: bool = False
    """True if a token may rest on keys and values of an older version (`weights.in_flight`)."""

    @property
    def tokens(self) -> int:
        """P + T, what the learner's memory and time depend on."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response with all that the learner needs. Arrays have shape [P] or [T].

    >>> t = Trajectory(header=None, prompt_ids=np.array([1, 2], np.int32),
    ...     response_ids=np.array([3], np.int32), behaviour_logprobs=np.array([-.5], np.float32),
    ...     versions=np.array([0], np.int32), incarnations=np.array([0], np.int32),
    ...     loss_mask=np.array([1], np.uint8))
    >>> t.response_ids.shape
    (1,)
    """

    header: SampleHeader
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids."""
    response_ids: npt.NDArray[np.int32]
    """[T] token ids."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[T] log mu of each sampled token, in nats, of the distribution that was sampled from."""
    versions: npt.NDArray[np.int32]
    """[T] version of the forward pass that produced the token; NO_VERSION for tool tokens."""
    incarnations: npt.NDArray[np.int32]
    """[T] incarnation that goes with `versions`; NO_VERSION for tool tokens."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 where the token is trained on."""


ARRAY_FIELDS: tuple[tuple[str, str], ...] = (
    ("prompt_ids", "<i4"),
    ("response_ids", "<i4"),
    ("behaviour_logprobs", "<f4"),
    ("versions", "<i4"),
    ("incarnations", "<i4"),
    ("loss_mask", "|u1"),
)
"""Trajectory arrays in wire order, with their little-endian numpy dtypes; those of one byte an
element come last, so that back to back all are aligned."""

PROMPT_TOKEN_BYTES = 4
"""Bytes in a sample's payload for each prompt token: the first of ARRAY_FIELDS."""
RESPONSE_TOKEN_BYTES = 17
"""Bytes in a sample's payload for each response token: the rest of ARRAY_FIELDS."""
SAMPLE_OVERHEAD = 2048
"""Bytes that the buffer counts for a sample besides its payload: its header and its records."""


class Envelope:
    """A sample as the buffer keeps it: its header decoded, its arrays as they came.

    A subclass may have its payload elsewhere and override `payload` and `nbytes`.

    >>> Envelope(None, bytes(25)).nbytes
    25
    """

    __slots__ = ("_payload", "header")

    def __init__(self, header: SampleHeader, payload: bytes | memoryview) -> None:
        self.header = header
        self._payload = payload

    @property
    def payload(self) -> bytes | memoryview:
        """The arrays of ARRAY_FIELDS back to back: 4 P + 17 T bytes."""
        return self._payload

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self._payload)

    def __eq__(self, other: object) -> bool:
        """Equal header and equal bytes, wherever these are."""
        if not isinstance(other, Envelope):
            return NotImplemented
        return self.header == other.header and self.payload == other.payload

    def __hash__(self) -> int:
        return hash(self.header)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.header!r}, <{self.nbytes} bytes>)"


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What one learner rank trains of a batch, and the facts about the whole batch.

    `manifest` is the same on every rank and in consumption order; advantages, denominators
    and the staleness check are functions of it, so that no rank needs another's samples.
    """

    batch: int
    """Batch number k, from 1: the learner's idempotency key."""
    rank: int
    manifest: tuple[SampleHeader, ...]
    mine: tuple[int, ...]
    """Indexes into `manifest` of the samples that this rank holds."""
    envelopes: tuple[Envelope, ...]
    """The samples of `mine`, in that order."""
    fresh: int
    """`manifest[:fresh]` are fresh samples, `manifest[fresh:]` were trained before (replay)."""
