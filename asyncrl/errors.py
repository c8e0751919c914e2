"""One hierarchy of errors.

Each error is also a standard one, so that callers may catch either, and each survives
a trip between processes (the constructor takes the message alone). `exit_code` is what
the command line ends with: 2 when the user can mend it, 1 otherwise.
"""

from __future__ import annotations


class AsyncRLError(Exception):
    """Base of all errors raised on purpose by asyncrl."""

    exit_code = 1


class UserError(AsyncRLError, ValueError):
    """Something the user asked for cannot be done; the message says what to change."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, inactive, or would deadlock the run."""


class DataError(UserError):
    """A prompt file is missing or malformed; the message names file and line."""


class ModelError(UserError):
    """A model or tokenizer is missing or cannot be used for the run."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is needed and not installed; the message names the extra."""


class WireError(AsyncRLError, ValueError):
    """A message does not follow the wire format (see docs/wire.md)."""


class HelloNeeded(WireError):
    """The buffer does not know who asks: a client says hello (again) and resends."""


class StoreError(AsyncRLError, RuntimeError):
    """The buffer's durable store is full, corrupt, another run's or in use; says what to do."""

    exit_code = 2


class DamagedStoreError(StoreError):
    """The store is gone, or holds what cannot be trusted."""


class CheckpointError(AsyncRLError, RuntimeError):
    """A checkpoint is missing, damaged or cannot be written; names the file, says what to do."""

    exit_code = 2


class LedgerError(AsyncRLError, RuntimeError):
    """A caller asked the ledger for something its state forbids."""


class ConservationError(LedgerError):
    """The ledger's counts disagree: a bug. Ends the buffer's server."""


class StalenessError(AsyncRLError, RuntimeError):
    """A sample over `buffer.max_staleness` reached the learner with `buffer.on_stale: raise`."""


class EngineError(AsyncRLError, RuntimeError):
    """The inference engine failed or was asked for something it cannot do."""


class EngineMemoryError(EngineError, MemoryError):
    """The engine found no memory, or was killed for it; names the settings that take it."""

    exit_code = 2


class WeightSyncError(AsyncRLError, RuntimeError):
    """A weight publication failed or did not end by its deadline."""


class AlreadyAppliedError(WeightSyncError):
    """An engine was offered a version that it runs already, or one below it."""


class DamagedWeightsError(WeightSyncError):
    """Tensors of a publication did not arrive as they were sent; the engine keeps the old ones."""


class DeadlineError(AsyncRLError, TimeoutError):
    """A wait passed its deadline; the message names who waited, for what, and on whom."""


class RoleDiedError(AsyncRLError, RuntimeError):
    """A role's process ended although the run had not; the message names its log."""


class RoleFailedError(RoleDiedError):
    """A role raised what nobody foresaw; it may only have met the end of another one."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function failed or did not return a finite number; the sample has no reward."""


class RewardValueError(RewardError, ValueError):
    """A reward function returned something that is no finite number: NaN, say."""


class RewardTimeout(RewardError, TimeoutError):
    """A reward function passed `task.reward_timeout_s` and was killed."""
