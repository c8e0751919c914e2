"""The ledger's settings, and which of them cannot work (letters as in asyncrl.staleness)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl import staleness
from asyncrl.errors import ConfigError

FailedMember = Literal["shrink", "drop"]


def filtered_cap(setting: int | None, groups_per_batch: int) -> int:
    """`buffer.max_filtered_in_a_row`, its default filled in: 16 batches of groups, at least 64."""
    return max(64, 16 * groups_per_batch) if setting is None else setting


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings, checked.

    Raises:
        ConfigError: a setting out of range, or one that would stop the run.
    """

    group_size: int
    """Samples of a group."""
    groups_per_batch: int
    """G."""
    batches_per_publication: int
    """n_pub."""
    max_staleness: int
    """S, in versions."""
    window: int
    """W; 1 is strict order."""
    ranks: int
    """Learner ranks that share a batch."""
    lease_timeout_s: float
    """A lease without progress for this long expires."""
    max_attempts: int
    """Tries of a sample whose data or reward fails."""
    failed_member: FailedMember
    """After the last try the group goes on without the sample while two remain, or is removed."""
    filter_zero_variance: bool
    """Leave out groups whose rewards are all equal."""
    max_filtered_in_a_row: int
    """So many left out, and none kept in between, end the run."""
    prompts_end: str
    """The setting that ends the prompts, e.g. "stop.epochs=2", for the reason; may be empty."""

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
