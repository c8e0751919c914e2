"""The prompts, in order: read one ahead, and past those whose groups keep failing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from asyncrl.errors import DataError, LedgerError
from asyncrl.types import GroupId, Prompt

PromptKey = tuple[str, int]
"""Source and index: a prompt, whatever the epoch."""


class Cursor:
    """Where the ledger is in its prompts.

    Args:
        prompts: from the first one on.
        quarantine_after: a prompt whose groups were given up so often is left out from then on.
    """

    def __init__(self, prompts: Iterator[tuple[GroupId, Prompt]], quarantine_after: int) -> None:
        self.taken = 0
        """Prompts read, up to the last one that was taken."""
        self.last_taken: GroupId | None = None
        self.failures: Counter[PromptKey] = Counter()
        """Groups given up for data or reward."""
        self.quarantined: dict[PromptKey, str] = {}
        """With the reason of the last failure."""
        self.news: list[PromptKey] = []
        """Of the quarantined, those that were not handed out yet."""
        self.ended = False
        """Whether there is known to be no further prompt."""
        self.all_quarantined = False
        """Whether that is because a whole epoch was in quarantine."""
        self._prompts = prompts
        self._quarantine_after = quarantine_after
        self._peeked: tuple[GroupId, Prompt] | None = None
        self._read = 0
        self._skipping_since: int | None = None  # epoch of the first prompt of a row left out

    def has_prompt(self) -> bool:
        """Whether there is another prompt (reads one ahead, past those in quarantine)."""
        while True:
            if self._peeked is None and not self.ended:
                self._peeked = next(self._prompts, None)
                self.ended = self._peeked is None
                self._read += not self.ended
            if self._peeked is None or not self._leave_out(self._peeked[0]):
                return self._peeked is not None
            self._peeked = None

    def _leave_out(self, prompt: GroupId) -> bool:
        """Whether a prompt is in quarantine; when a whole epoch of them is, the prompts end."""
        if (prompt.source, prompt.index) not in self.quarantined:
            self._skipping_since = None
            return False
        if self._skipping_since is None:
            self._skipping_since = prompt.epoch
        if prompt.epoch > self._skipping_since + 1:
            self.ended = self.all_quarantined = True
        return True

    def take(self) -> tuple[GroupId, Prompt]:
        """The next prompt.

        Raises:
            LedgerError: there is none.
        """
        if not self.has_prompt() or self._peeked is None:
            raise LedgerError("no prompt left to open a group for")
        taken, self._peeked = self._peeked, None
        self.taken, self.last_taken = self._read, taken[0]
        return taken

    def count_failure(self, group: GroupId, reason: str) -> None:
        """A group was given up, for data or reward: its prompt may go into quarantine."""
        key = (group.source, group.index)
        self.failures[key] += 1
        if self.failures[key] == self._quarantine_after:
            self.quarantined[key] = reason
            self.news.append(key)

    def skip(self, wanted: set[GroupId]) -> dict[GroupId, Prompt]:
        """Go to where `taken` says, from the first prompt; returns the prompts wanted.

        Raises:
            DataError: these are not the prompts that were taken.
        """
        found: dict[GroupId, Prompt] = {}
        last = None
        for last, prompt in islice(self._prompts, self.taken):
            self._read += 1
            if last in wanted:
                found[last] = prompt
        if self._read < self.taken or last != self.last_taken or len(found) < len(wanted):
            missing = next(iter(sorted(wanted - found.keys())), self.last_taken)
            raise DataError(
                f"the prompts are not those of the stored run: it had taken {self.taken} of them, "
                f"with {missing} among them and {self.last_taken} the last; now these are "
                f"{self._read}, the last {last}: give it the same prompts in the same order"
            )
        return found
