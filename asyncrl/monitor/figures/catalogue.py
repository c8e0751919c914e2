"""Every figure, in the order in which they are read: what it is called and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncrl.monitor.figures import heat, learning, staleness, work
from asyncrl.monitor.figures.kit import Figure, Run
from asyncrl.monitor.reading.history import Axis

Draw = Callable[[Sequence[Run], Axis], Figure | None]


class Entry(NamedTuple):
    """A figure of the catalogue."""

    name: str
    section: str
    title: str
    tells: str
    """What to read in it, in a line."""
    draw: Draw
    """None where the runs have nothing to draw."""
    overlaid: bool = True
    """Whether it shows all runs; else the first alone."""


FIGURES = (
    Entry("reward", "Learning", "Reward",
          "Mean of each batch; diamonds: greedy answers to held-out prompts", learning.reward),
    Entry("signal", "Learning", "What the rewards teach",
          "Groups whose rewards are all equal have no advantage (grpo, dr_grpo, rloo)",
          learning.signal),
    Entry("loss", "Learning", "Loss", "Terms of the loss, mean of each batch", learning.loss),
    Entry("policy", "Learning", "Entropy and gradient",
          "An entropy that collapses ends exploration", learning.policy),
    Entry("rate", "Learning", "Learning rate", "Of the policy, with its schedule", learning.rate),
    Entry("length", "Learning", "Response length", "Of the samples trained", learning.length),
    Entry("version", "Learning", "Versions",
          "What the learner has published, and what each actor's engine runs", learning.version),
    Entry("staleness", "Staleness", "Head staleness",
          "Of the oldest token of each sample trained; the limit is never passed",
          staleness.head),
    Entry("staleness_heat", "Staleness", "Head staleness, all samples",
          "Each column is a batch: how much of it was how far behind", heat.staleness, False),
    Entry("token_heat", "Staleness", "Token staleness",
          "The same, each token by its own version", heat.tokens, False),
    Entry("staleness_parts", "Staleness", "Where it comes from",
          "In flight: versions that passed while it was generated; queued: until it was trained",
          staleness.parts),
    Entry("staleness_actors", "Staleness", "By actor",
          "All samples trained so far, from the recording", staleness.by_actor, False),
    Entry("replay", "Staleness", "Replayed samples",
          "Staleness of what was trained again, under its own limit", staleness.replay),
    Entry("tokens", "Throughput", "Tokens per second",
          "Generated, used and made for nothing: response tokens; trained: prompts included",
          work.tokens),
    Entry("samples", "Throughput", "Samples per second",
          "Delivered, trained, and lost: dropped, filtered, failed, requeued, duplicate",
          work.samples),
    Entry("time_learners", "Time", "Learner ranks",
          "Each second belongs to one state; waiting is get_wait and idle", work.learners, False),
    Entry("time_actors", "Time", "Actors",
          "Mean over the actors; waiting is put_wait, get_wait and idle", work.actors, False),
    Entry("time_processes", "Time", "Every process", "Its whole life so far", work.processes,
          False),
    Entry("waits", "Time", "Waiting for each other",
          "A learner that waits needs more samples; samples that wait need a faster learner",
          work.waits),
    Entry("depth", "Buffer", "Samples held", "And how many there may be at most", work.depth),
    Entry("bytes", "Buffer", "Bytes held", "Click on the limit to draw it, too",
          work.held_bytes),
    Entry("ends", "Buffer", "Ends other than training",
          "Samples that were dispatched for nothing, cumulative; what stays 0 is left out",
          work.ends),
    Entry("ess", "Importance weights", "Effective sample size",
          "Of the raw weights, by versions behind; a low share is work for nothing",
          staleness.ess),
    Entry("clipped", "Importance weights", "Weights cut off", "By versions behind",
          staleness.clipped),
    Entry("masked", "Importance weights", "Tokens masked", "By versions behind",
          staleness.masked),
    Entry("ratio_heat", "Importance weights", "Raw weights, all tokens",
          "Each column is a batch; 1 is on-policy", heat.ratio, False),
    Entry("quantiles", "Importance weights", "Raw weights", "Quantiles over the tokens of a batch",
          staleness.quantiles),
    Entry("divergence", "Importance weights", "Divergence",
          "Mismatch: engine against learner at one version; drift: what training changed",
          staleness.divergence),
    Entry("sync", "Weights", "A publication's seconds",
          "Actors pause within it; training goes on beside it", staleness.sync),
    Entry("lag", "Weights", "Lag and repeats",
          "Lag: 1 while a publication is on its way, more when an actor is late; repeats: 0 in a "
          "healthy run", staleness.lag),
    Entry("pauses", "Weights", "Engines held up, by actor", "By each update, as the actor saw it",
          work.pauses, False),
    Entry("idle", "Actors", "Waiting, by actor", "Share of each piece of time", heat.idle, False),
    Entry("speeds", "Actors", "Tokens per second, by actor", "Response tokens generated",
          work.speeds, False),
    Entry("in_flight", "Actors", "Samples under way, by actor",
          "Being generated, scored or delivered", work.in_flight, False),
    Entry("processor", "Actors", "Processor", "Cores kept busy by each process and those below it",
          work.processor, False),
    Entry("memory", "Actors", "Memory", "Resident, shared pages counted for each", work.memory,
          False),
    Entry("devices", "Actors", "Devices", "Share of the time in which a kernel ran", work.devices,
          False),
    Entry("device_memory", "Actors", "Device memory", "In use, by whomever", work.device_memory,
          False),
)  # fmt: skip

BY_NAME = {entry.name: entry for entry in FIGURES}
