"""The conservation law, kept in two independent ways (docs/architecture.md).

dispatched = trained + dropped_stale + filtered + failed + requeued + duplicate + held, where
`held` is the size of {leased, queued, assembling, assigned}. One count is kept by transitions
(`move`), the other by walking the live dispatches and adding what was retired: a transition that
was forgotten, doubled or made on a lost record makes them disagree.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.buffer.dispatch import HELD, TERMS, Dispatch, State


class Census:
    """Counts dispatches by state; memory is proportional to the live ones."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.by_state: dict[State, int] = dict.fromkeys(State, 0)
        self._live: set[Dispatch] = set()
        self._retired: Counter[State] = Counter()

    def dispatch(self, dispatch: Dispatch) -> None:
        """A new dispatch, in state LEASED."""
        self.dispatched += 1
        self.by_state[dispatch.state] += 1
        self._live.add(dispatch)

    def move(self, dispatch: Dispatch, state: State) -> None:
        """The dispatch goes to another state."""
        self.by_state[dispatch.state] -= 1
        self.by_state[state] += 1
        dispatch.state = state

    def retire(self, dispatch: Dispatch) -> None:
        """The dispatch has ended for good: remember its term, forget the record."""
        self._live.remove(dispatch)
        self._retired[dispatch.state] += 1

    @property
    def live(self) -> int:
        """Dispatches whose record is still kept."""
        return len(self._live)

    @property
    def held(self) -> int:
        """Dispatches that have not ended."""
        return sum(self.by_state[s] for s in HELD)

    def counts(self) -> dict[str, int]:
        """`dispatched`, every term, `held`, and the four parts of `held`."""
        return {
            "dispatched": self.dispatched,
            **{str(s): self.by_state[s] for s in TERMS},
            "held": self.held,
            **{str(s): self.by_state[s] for s in HELD},
        }

    def conserved(self) -> bool:
        """Whether both ways of counting agree, with each other and with `dispatched`."""
        walked = Counter(d.state for d in self._live) + self._retired
        agree = all(walked[s] == self.by_state[s] for s in State)
        ended = not any(self._retired[s] for s in HELD)
        return agree and ended and walked.total() == self.dispatched
