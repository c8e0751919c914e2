"""The conservation law, kept in two independent ways (docs/architecture.md).

dispatched = trained + dropped_stale + filtered + failed + requeued + duplicate + held, where
`held` is the size of {leased, queued, assembling, assigned}. One count is kept by transitions
(`move`), the other by walking the live dispatches and adding what was retired: a transition that
was forgotten, doubled or made on a lost record makes them disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from operator import attrgetter

from asyncrl.buffer.dispatch import HELD, TERMS, Dispatch, State

_state = attrgetter("state")


class Census:
    """Counts dispatches by state; memory is proportional to the live ones."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.by_state: dict[State, int] = dict.fromkeys(State, 0)
        self.moves = 0
        """Changes of state so far: a call that made none had no effect on a dispatch."""
        self._live: set[Dispatch] = set()
        self._retired: Counter[State] = Counter()

    def dispatch(self, dispatch: Dispatch) -> None:
        """A new dispatch, in state LEASED."""
        self.dispatched += 1
        self.by_state[dispatch.state] += 1
        self._live.add(dispatch)

    def move(self, dispatch: Dispatch, state: State) -> None:
        """The dispatch goes to another state."""
        self.moves += 1
        self.by_state[dispatch.state] -= 1
        self.by_state[state] += 1
        dispatch.state = state

    def retire(self, dispatch: Dispatch) -> None:
        """The dispatch has ended for good: remember its term, forget the record."""
        self._live.remove(dispatch)
        self._retired[dispatch.state] += 1

    def revive(self, dispatch: Dispatch) -> None:
        """Undo `retire`."""
        self._retired[dispatch.state] -= 1
        self._live.add(dispatch)

    def restore(
        self, dispatched: int, retired: Mapping[State, int], live: Collection[Dispatch]
    ) -> None:
        """Put back what was: the numbers of the retired by their state, and the live ones."""
        self.dispatched = dispatched
        self._retired = Counter(retired)
        self._live = set(live)
        walked = Counter(d.state for d in live) + self._retired
        self.by_state = {state: walked[state] for state in State}

    @property
    def retired(self) -> dict[State, int]:
        """Numbers of those whose record is gone, by the state they ended in."""
        return {state: self._retired[state] for state in State if self._retired[state]}

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
        walked = Counter(map(_state, self._live)) + self._retired
        agree = all(walked[s] == self.by_state[s] for s in State)
        ended = not any(self._retired[s] for s in HELD)
        return agree and ended and walked.total() == self.dispatched
