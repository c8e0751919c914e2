"""Gives every role member a node: a pure function of the settings and the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.places import Role, Wish, wishes
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.nodes import Node, this_machine
from asyncrl.launch.placement.seats import Assignment, Placement, Seat


def assign(
    config: Config, placement: Placement, nodes: Sequence[Node], keep: Assignment | None = None
) -> Assignment:
    """Give every role member a node and, where `cluster.*_places` names them, its GPUs.

    packed   learners together, then actors, one node after the other
    spread   evenly over the nodes (by members; then where most is free)
    explicit what `cluster.actor_places` and `cluster.learner_places` say

    On CPU a node takes members by its cores; more members than cores share them evenly.

    Args:
        config: checked.
        placement: what `place` returned.
        nodes: the cluster's; without `cluster.address` they are not looked at. What members that
            are kept use counts as free.
        keep: seats of members that run: they stay where they are.

    Raises:
        ConfigError: naming the role member that has no room, and where how much is free.
    """
    local = config.cluster.address is None
    alive = [this_machine()] if local else [n for n in nodes if n.alive]
    if not alive:
        raise ConfigError(
            f"cluster.address={config.cluster.address}: the cluster has no node that is alive"
        )
    assigner = _Assigner(config, placement, alive)
    if keep is not None:
        assigner.keep(keep, local)
    if config.cluster.placement == "explicit":
        chosen = assigner.explicit()
    else:
        assigner.check_total()
        chosen = assigner.packed() if config.cluster.placement == "packed" else assigner.spread()
    return assigner.seats(chosen, local)


@dataclass(frozen=True, slots=True)
class _Member:
    role: Role
    rank: int
    need: int
    """GPUs, or one core."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


_Choice = dict[_Member, tuple[Node, tuple[str, ...]]]
"""Node and named GPUs of each member."""


class _Assigner:
    """The nodes with what is free on each, and the ways to fill them."""

    def __init__(self, config: Config, placement: Placement, nodes: Sequence[Node]) -> None:
        self.config, self.placement, self.nodes = config, placement, nodes
        self.cuda = placement.device == "cuda"
        c = config.cluster
        self.actors = [_Member("actor", r, placement.actor_gpus or 1) for r in range(c.actors)]
        self.learners = [
            _Member("learner", r, placement.learner_gpus or 1) for r in range(c.learners)
        ]
        names = Counter(n.hostname for n in nodes)
        self.labels = {
            n.id: n.hostname if names[n.hostname] == 1 else f"{n.hostname}/{n.id[:6]}"
            for n in nodes
        }

        self.kept: dict[_Member, Seat] = {}
        self.choice = _Choice()
        """Of the members that are kept; those that follow are added to a copy."""

    def keep(self, seats: Assignment, local: bool) -> None:
        """Leave members on their seats, unless the node is gone."""
        members = (*zip(self.learners, seats.learners, strict=False),
                   *zip(self.actors, seats.actors, strict=False))  # fmt: skip
        for member, seat in members:
            node = next((n for n in self.nodes if local or n.id == seat.node), None)
            if node is not None:
                self.kept[member], self.choice[member] = seat, (node, seat.gpus)

    def begin(self) -> tuple[dict[str, int], _Choice]:
        """What is free besides the members that are kept, and the choice with them in it."""
        free = self.free()
        for member, (node, _) in self.choice.items():
            free[node.id] -= member.need
        return free, dict(self.choice)

    def free(self) -> dict[str, int]:
        """Room of each node by id: GPUs, or members on CPU."""
        if self.cuda:
            return {n.id: n.room for n in self.nodes}
        cores = {n.id: int(n.resources.get("CPU", 0)) for n in self.nodes}
        if not any(cores.values()):
            cores = dict.fromkeys(cores, 1)
        rounds = -(-(len(self.actors) + len(self.learners)) // sum(cores.values()))
        return {node: count * rounds for node, count in cores.items()}

    def check_total(self) -> None:
        """Raise when there are too few GPUs in all."""
        if not self.cuda:
            return
        p, c = self.placement, self.config.cluster
        need, have = p.gpus(c.actors, c.learners), sum(self.free().values())
        if need <= have:
            return
        each = f" x {p.actor_gpus} GPUs" if p.actor_gpus > 1 else ""
        fix = "lower cluster.actors or cluster.learners"
        if c.address is None:
            there, fix = f"this machine has {have}", f"{fix}, or set cluster.address to a cluster"
        else:
            there = f"{have} of the cluster's are free"
        raise ConfigError(
            f"cluster: {c.actors} actors{each} + {c.learners} learners need {need} GPUs, "
            f"{there}: {fix}"
        )

    def packed(self) -> _Choice:
        """First fit, from the node that keeps the learners on the fewest nodes."""
        found: list[_Choice] = []
        failed: list[ConfigError] = []
        for k in range(len(self.nodes)):
            try:
                found.append(self._first_fit([*self.nodes[k:], *self.nodes[:k]]))
            except ConfigError as e:
                failed.append(e)
                continue
            if self._learner_nodes(found[-1]) == 1:
                break
        if not found:
            raise failed[0]
        return min(found, key=self._learner_nodes)

    def _learner_nodes(self, choice: _Choice) -> int:
        return len({choice[m][0].id for m in self.learners})

    def _first_fit(self, order: Sequence[Node]) -> _Choice:
        free, choice = self.begin()
        for member in (*self.learners, *self.actors):
            if member in choice:
                continue
            node = next((n for n in order if free[n.id] >= member.need), None)
            if node is None:
                raise self._short(member, free)
            free[node.id] -= member.need
            choice[member] = (node, ())
        return choice

    def spread(self) -> _Choice:
        """Actors first, since they may need several GPUs of one node."""
        free, choice = self.begin()
        members: Counter[str] = Counter(node.id for node, _ in choice.values())
        for group in (self.actors, self.learners):
            for member in group:
                if member in choice:
                    continue
                fits = [n for n in self.nodes if free[n.id] >= member.need]
                if not fits:
                    raise self._short(member, free)
                node = min(fits, key=lambda n: (members[n.id], -free[n.id]))
                members[node.id] += 1
                free[node.id] -= member.need
                choice[member] = (node, ())
        return choice

    def explicit(self) -> _Choice:
        """What the settings name."""
        free, choice = self.begin()
        taken = {(n.id, gpu): m.name for m, (n, gpus) in choice.items() for gpu in gpus}
        wanted = (*wishes(self.config, "learner"), *wishes(self.config, "actor"))
        for member, wish in zip((*self.learners, *self.actors), wanted, strict=True):
            if member in choice:
                continue
            node = self._named(member, wish, free, taken)
            choice[member] = (node, wish.gpus)
            free[node.id] -= member.need
            taken |= {(node.id, gpu): member.name for gpu in wish.gpus}
        self._check_not_mixed(choice)
        return choice

    def _named(
        self, member: _Member, wish: Wish, free: dict[str, int], taken: dict[tuple[str, str], str]
    ) -> Node:
        key = f"cluster.{member.role}_places"
        nodes = [n for n in self.nodes if n.called(wish.node)]
        if not nodes:
            known = ", ".join(f"{self.labels[n.id]} ({n.address})" for n in self.nodes)
            raise ConfigError(
                f"{key}: no machine is called {wish.node} (for {member.name}); there are: {known}"
            )
        if not wish.gpus:
            fits = [n for n in nodes if free[n.id] >= member.need]
            if not fits and self.cuda:
                raise self._short(member, {n.id: free[n.id] for n in nodes})
            return (fits or nodes)[0]
        node = next((n for n in nodes if set(wish.gpus) <= set(n.gpu_ids)), None)
        if node is None:
            missing = next(g for g in wish.gpus if g not in nodes[0].gpu_ids)
            ids = ", ".join(nodes[0].gpu_ids) or "none"
            raise ConfigError(
                f"{key}: {wish.node} has no GPU {missing} (for {member.name}): its GPUs are {ids}"
            )
        for gpu in wish.gpus:
            if (node.id, gpu) in taken:
                raise ConfigError(
                    f"{key}: GPU {gpu} of {wish.node} (for {member.name}) is that of "
                    f"{taken[node.id, gpu]}: give another"
                )
        return node

    def _check_not_mixed(self, choice: _Choice) -> None:
        """Ray does not know of GPUs that are named, and would give them to others."""
        if not self.cuda:
            return
        listed = {node.id: m for m, (node, gpus) in choice.items() if gpus}
        for member, (node, gpus) in choice.items():
            if not gpus and node.id in listed:
                other = listed[node.id]
                raise ConfigError(
                    f"cluster.{member.role}_places: {member.name} lists no GPUs and {other.name} "
                    f"on the same machine ({self.labels[node.id]}) does: list GPUs for all or none "
                    "of its roles"
                )

    def _short(self, member: _Member, free: Mapping[str, int]) -> ConfigError:
        there = ", ".join(f"{self.labels[node]} {count}" for node, count in free.items())
        fix = "lower engine.tensor_parallel or cluster.actors"
        if member.role == "learner":
            fix = "lower cluster.learners or cluster.actors"
        gpus = "1 GPU" if member.need == 1 else f"{member.need} GPUs on one node"
        return ConfigError(f"cluster: {member.name} needs {gpus}; free: {there}: {fix}")

    def seats(self, choice: _Choice, local: bool) -> Assignment:
        """The choice as seats."""
        on_node = Counter(node.id for node, _ in choice.values())

        def threads(member: _Member, node: Node) -> int:
            p = self.placement
            own = p.actor_threads if member.role == "actor" else p.learner_threads
            section = self.config.engine if member.role == "actor" else self.config.learner
            if local or section.threads is not None:
                return own
            return max(1, int(node.resources.get("CPU", 1)) // on_node[node.id])

        def seat(member: _Member) -> Seat:
            if member in self.kept:
                return self.kept[member]
            node, gpus = choice[member]
            return Seat(
                node=None if local else node.id,
                label=self.labels[node.id],
                threads=threads(member, node),
                num_gpus=member.need if self.cuda and not gpus else 0,
                gpus=gpus,
            )

        return Assignment(tuple(map(seat, self.actors)), tuple(map(seat, self.learners)))
