"""What actors do to a ledger and to its model alike (for test_ledger_machine)."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from asyncrl.buffer.journal import Journaled
from asyncrl.recording import Retired
from asyncrl.types import Envelope, FailureKind, SampleHeader, SampleId, Version
from tests.buffer.ledger_model import (
    ACTORS,
    TIMEOUT_S,
    Key,
    MGroup,
    MLease,
    Model,
    Source,
    choose,
)
from tests.buffer.samples import envelope


def number(version: Version) -> tuple[int, int]:
    return version.version, version.incarnation


class ActorEvents(Model):
    """One method an event; each asserts what the ledger answers."""

    @initialize(data=st.data())
    def start(self, data: Source, prompts: int | None = None) -> None:
        self.begin(data, prompts)
        self.ledger = Journaled(prompts=self.prompts(), **self.settings)
        self.ledger.keep_retired()
        self.snapshot: bytes | None = None
        self.entries: list[bytes] = []  # since the snapshot
        self.retired: dict[SampleId, Retired] = {}
        self.steps: Counter[str] = Counter()  # events of walks, by name
        self.seen: Counter[str] = Counter()  # what is rare

    # --- actors -----------------------------------------------------------------------------

    @rule(actor=st.sampled_from(ACTORS), capacity=st.integers(0, 7))
    def lease(self, actor: str, capacity: int) -> None:
        applied = self.history[actor][-1]
        expected = self.expected_grants(applied, capacity)
        got = self.ledger.lease(actor, applied, capacity, self.now)
        assert [(g.group, list(g.samples)) for g in got] == expected
        assert all(g.version == applied and g.deadline_s == TIMEOUT_S for g in got)
        if applied.incarnation < self.version.incarnation:
            assert self.ledger.held_back(actor) == "admission"
        groups = {g.id: g for g in self.groups}
        for grant in got:
            if grant.group not in groups:
                self.groups.append(MGroup(grant.group, self.size))
                groups[grant.group] = self.groups[-1]
            assert grant.prompt.text == str(grant.group)
            self.leases[grant.lease] = MLease(
                actor, applied, len(self.history[actor]) - 1, groups[grant.group],
                self.now + TIMEOUT_S,
            )  # fmt: skip
            for k in grant.samples:
                self.state[grant.lease, k] = "leased"

    @precondition(lambda self: self.state)
    @rule(data=st.data(), reward=st.sampled_from((0.0, 1.0)))
    def deliver(self, data: Source, reward: float) -> None:
        self.accept(choose(data, sorted(self.state)[-40:]), data, reward)

    @precondition(lambda self: "leased" in self.state.values())
    @rule(data=st.data(), reward=st.sampled_from((0.0, 1.0)), most=st.integers(1, 9))
    def deliver_leased(self, data: Source, reward: float, most: int) -> None:
        for _ in range(most):
            if leased := self.of_state("leased"):
                self.accept(choose(data, leased), data, reward)

    @rule()
    def all_catch_up_and_lease(self) -> None:
        for actor in ACTORS:
            if self.history[actor][-1] != self.version:
                self.history[actor].append(self.version)
            self.lease(actor, 5)

    @precondition(lambda self: "leased" in self.state.values())
    @rule(data=st.data(), same=st.booleans())
    def deliver_group(self, data: Source, same: bool) -> None:
        leased = self.of_state("leased")
        group = self.leases[choose(data, leased)[0]].group
        for key in leased:
            if self.leases[key[0]].group is group:
                self.accept(key, data, 1.0 if same else float(key[1]))

    def late(self) -> list[Key]:
        """Dispatches that ended without a result, while their sample is still wanted."""
        return [k for k in self.of_state("requeued") if self.leases[k[0]].group.wants(k[1])]

    @precondition(lambda self: self.late())
    @rule(data=st.data(), reward=st.sampled_from((0.0, 1.0)))
    def deliver_late(self, data: Source, reward: float) -> None:
        """Another actor may be at the same sample; the learner may have restarted in between."""
        self.accept(choose(data, self.late()), data, reward)

    def accept(self, key: Key, data: Source, reward: float) -> None:
        lease, group, before = self.leases[key[0]], self.leases[key[0]].group, self.state[key]
        result = self.result(key, data, reward)
        status = self.ledger.accept(result, self.now)
        gone = self.prior_drop and lease.version.incarnation < self.version.incarnation
        if not group.wants(key[1]) or before not in ("leased", "requeued") or gone:
            assert status == "duplicate"
            if before == "leased":
                self.end(key)
        elif not self.admitted(self.position(group), result.header.version_min.version):
            # Only a rewind lowers version numbers, and it ends all leases.
            assert (status, before) == ("unknown", "requeued")
            self.seen["refused"] += 1
        else:
            assert status == "accepted"
            self.seen["of an earlier lineage"] += lease.version < self.restarted_at
            h = result.header
            self.seen["of two lineages"] += h.version_min.incarnation != h.version_max.incarnation
            self.completed += 1
            self.sent[result.header.id] = result
            self.state[key] = "assembling"
            group.rewards[key[1]], group.winner[key[1]] = reward, key
            if before == "leased":
                lease.deadline_s = self.now + TIMEOUT_S
            if group.complete:
                self.completed_group(group)

    def result(self, key: Key, data: Source, reward: float) -> Envelope:
        """Tokens of some of the versions that the actor has had since it was granted the lease."""
        lease = self.leases[key[0]]
        versions = self.history[lease.actor][lease.since :]
        first = choose(data, range(len(versions)))
        last = choose(data, (first, len(versions) - 1))
        some = versions[first : last + 1]
        bare = envelope(lease.group.id.sample(key[1]), key[0], lease.actor, some[0], reward)
        fields = {name: getattr(bare.header, name) for name in SampleHeader.__slots__}
        fields |= {"version_min": min(some, key=number), "version_max": max(some, key=number)}
        fields |= {"version_finish": some[-1]}
        return Envelope(SampleHeader(**fields), bare.payload)

    @precondition(lambda self: self.state)
    @rule(data=st.data(), kind=st.sampled_from(FailureKind))
    def fail(self, data: Source, kind: FailureKind) -> None:
        key = choose(data, sorted(self.state)[-40:])
        lease, group, k = self.leases[key[0]], self.leases[key[0]].group, key[1]
        wanted = group.wants(k)
        sample = group.id.sample(k)
        status = self.ledger.fail(lease.actor, key[0], sample, kind, "because", self.now)
        if self.state[key] != "leased" or not wanted:
            assert status == "duplicate"
            if self.state[key] == "leased":
                self.end(key)
            return
        assert status == "accepted"
        if kind is FailureKind.INFRASTRUCTURE:
            self.state[key] = "requeued"
            return
        lease.deadline_s = self.now + TIMEOUT_S
        self.state[key] = "failed"
        group.failures[k] += 1
        if group.failures[k] == self.attempts:
            self.given_up(group, k)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), bad=st.sampled_from(("lease", "actor", "sample", "group")))
    def stray_result(self, data: Source, bad: str) -> None:
        number = choose(data, sorted(self.leases)[-20:])
        lease = self.leases[number]
        sample = lease.group.id.sample(self.size if bad == "sample" else 0)
        if bad == "group":
            sample = sample._replace(source="other")
        stray = envelope(
            sample, 10**6 if bad == "lease" else number,
            "nobody" if bad == "actor" else lease.actor, Version(0, 99), 0.0,
        )  # fmt: skip
        before, state = self.ledger.counts(), self.ledger.state()
        assert self.ledger.accept(stray, self.now) in ("unknown", "duplicate")
        after = self.ledger.counts()
        assert sum(after[n] - before[n] for n in ("unknown_results", "repeated_results")) == 1
        assert self.ledger.state() == state

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def progress(self, data: Source, tokens: int) -> None:
        number = choose(data, sorted(self.leases)[-20:])
        lease = self.leases[number]
        open_ = any(s == "leased" for (n, _), s in self.state.items() if n == number)
        self.ledger.progress(lease.actor, {number: tokens}, self.now)
        self.ledger.progress("nobody", {number: 99}, self.now)
        if open_ and tokens > lease.tokens:
            lease.tokens, lease.deadline_s = tokens, self.now + TIMEOUT_S

    @rule(seconds=st.sampled_from((1.0, 4.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        for key in self.of_state("leased"):
            if self.leases[key[0]].deadline_s <= self.now:
                self.end(key)

    @rule(actor=st.sampled_from(ACTORS))
    def actor_dies(self, actor: str) -> None:
        self.ledger.drop_actor(actor)
        self.end_leases(actor, known=[])

    @rule(actor=st.sampled_from(ACTORS), data=st.data())
    def actor_comes_back(self, actor: str, data: Source) -> None:
        """It says which leases it knows; of some the buffer's reply was lost."""
        held = sorted({n for n, _ in self.of_state("leased") if self.leases[n].actor == actor})
        known = [n for n in held if choose(data, (True, True, False))]
        assert self.ledger.resume_actor(actor, known) == len(held) - len(known)
        self.end_leases(actor, known)

    def end_leases(self, actor: str, known: list[int]) -> None:
        for key in self.of_state("leased"):
            if self.leases[key[0]].actor == actor and key[0] not in known:
                self.end(key)

    @rule(actor=st.sampled_from(ACTORS), data=st.data())
    def actor_applies(self, actor: str, data: Source) -> None:
        """A later version, of its own incarnation or of the last one."""
        i, v = self.history[actor][-1]
        options = [self.history[actor][-1]]
        if i < self.version.incarnation:
            options += [Version(i, n) for n in range(v + 1, self.last_versions.get(i, v) + 1)]
            v = self.restarted_at.version - 1
        i = self.version.incarnation
        options += [Version(i, n) for n in range(v + 1, self.version.version + 1)]
        if (version := choose(data, options)) != self.history[actor][-1]:
            self.history[actor].append(version)
