"""The ledger's settings, and which of them cannot work (letters as in asyncrl.staleness)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl import staleness
from asyncrl.errors import ConfigError

FailedMember = Literal["shrink", "drop"]
PriorIncarnation = Literal["keep", "drop"]
ReplayBy = Literal["uniform", "advantage", "fresh"]


def filtered_cap(setting: int | None, groups_per_batch: int) -> int:
    """`buffer.max_filtered_in_a_row`, its default filled in: 16 batches of groups, at least 64."""
    return max(64, 16 * groups_per_batch) if setting is None else setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings, checked.

    Raises:
        ConfigError: a setting out of range, or one that would stop the run.
    """

    group_size: int
    """Samples of a group."""
    groups_per_batch: int
    """G."""
    batches_per_publication: int = 1
    """n_pub."""
    max_staleness: int
    """S, in versions."""
    window: int = 1
    """W; 1 is strict order."""
    ranks: int = 1
    """Learner ranks that share a batch."""
    lease_timeout_s: float = 120.0
    """A lease without progress for this long expires."""
    max_attempts: int = 3
    """Tries of a sample whose data or reward fails."""
    failed_member: FailedMember = "shrink"
    """After the last try the group goes on without the sample while two remain, or is removed."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal."""
    max_filtered_in_a_row: int
    """So many left out, and none kept in between, end the run."""
    prompts_end: str = ""
    """The setting that ends the prompts, e.g. "stop.epochs=2", for the reason; may be empty."""
    retain: bool = False
    """Keep committed batches until a checkpoint covers them."""
    prior_incarnation: PriorIncarnation = "keep"
    """After a rewind: samples that are in no batch stay, or are produced again."""
    max_bytes: int | None = None
    """Bytes that samples may take, those being produced counted as `sample_bytes` each; None: no
    limit. Held beyond it are at most the groups of one batch, and what checkpoints do not cover."""
    sample_bytes: int = 0
    """The most that a sample takes, SAMPLE_OVERHEAD included."""
    bytes_setting: str = ""
    """The setting behind `max_bytes`, e.g. "buffer.memory_gib=4", for messages; may be empty."""
    quarantine_after: int = 1
    """A prompt whose groups failed so often is left out from then on."""
    replay_groups: int = 0
    """R: replayed groups on top of the G fresh ones of a batch; 0 keeps nothing for replay."""
    replay_max_staleness: int = 1
    """In versions: an older group is not replayed any more."""
    replay_by: ReplayBy = "uniform"
    """How the replayed groups are drawn (asyncrl.buffer.replay)."""
    seed: int = 0
    """Of the draw."""

    def __post_init__(self) -> None:
        names = ["group_size", "groups_per_batch", "batches_per_publication", "ranks"]
        for name in (*names, "max_filtered_in_a_row"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_staleness < 0 or self.max_attempts < 1 or self.lease_timeout_s <= 0:
            raise ConfigError(
                f"max_staleness={self.max_staleness} must be at least 0, max_attempts="
                f"{self.max_attempts} at least 1, lease_timeout_s={self.lease_timeout_s} above 0"
            )
        if self.replay_groups < 0 or self.replay_max_staleness < 1 or self.quarantine_after < 1:
            raise ConfigError(
                f"replay_groups={self.replay_groups} must be at least 0, replay_max_staleness="
                f"{self.replay_max_staleness} and quarantine_after={self.quarantine_after} at "
                "least 1"
            )
        if self.max_bytes is not None and (self.max_bytes < 0 or self.sample_bytes < 1):
            raise ConfigError(
                f"max_bytes={self.max_bytes} must be at least 0 and needs sample_bytes="
                f"{self.sample_bytes} to be at least 1"
            )
        if self.filter_zero_variance and self.group_size < 2:
            raise ConfigError(
                "buffer.filter_zero_variance with rollout.group_size=1 would leave out every "
                "group: set group_size to 2 or more, or turn the filter off"
            )
        staleness.check_window(
            self.window, self.max_staleness, self.groups_per_batch, self.batches_per_publication
        )

    @property
    def max_live_groups(self) -> int:
        """The most groups that admission lets be alive at once: (S + 1) * G * n_pub."""
        return (self.max_staleness + 1) * self.groups_per_batch * self.batches_per_publication

    @property
    def group_bytes(self) -> int:
        """The most that a group takes."""
        return self.group_size * self.sample_bytes

    @property
    def capacity(self) -> int:
        """The most samples that may be alive at once: by admission, and by bytes at their longest
        (a batch always fits)."""
        groups = self.max_live_groups
        if self.max_bytes is not None:
            groups = min(groups, max(self.groups_per_batch, self.max_bytes // self.group_bytes))
        return groups * self.group_size
