"""The plan of a run, for people."""

from __future__ import annotations

from asyncrl.buffer.rules import filtered_cap
from asyncrl.launch.placement import rows, weights_text
from asyncrl.preflight.checks import Preflight
from asyncrl.preflight.kept import checkpoint_lines, recording_line, replay_line


def describe(p: Preflight) -> str:
    """The plan of a run, for people."""
    c = p.config
    n, g, s, w = (
        c.rollout.group_size, c.groups_per_batch, c.buffer.max_staleness, c.buffer.window,
    )  # fmt: skip
    n_pub = c.learner.batches_per_publication
    ahead = (s + 1) * g * n_pub - w + 1
    capacity = c.cluster.actors * c.rollout.max_in_flight
    eval_text = f"{p.eval_prompts} held out" if p.eval_prompts else "no evaluation"
    used = f"uses {c.max_model_len} of {p.context}" if p.context else f"uses {c.max_model_len}"
    plan = [
        ("model", f"{c.model.name} ({p.model_type}), {used} tokens of context"),
        ("", str(p.model_path)),
        ("task", f"{c.task.kind}: {p.train_prompts} prompts an epoch, {eval_text}, "
                 f"reward {p.reward}"),
        ("training", f"{c.run.steps} batches of {c.learner.batch_size} samples = {g} groups of {n}"
                     f" (G = {g}), published every {n_pub}"),
        *_labelled("ends", _ends(p)),
        ("staleness", f"S = {s}, W = {w}: up to {ahead} groups ({ahead * n} samples) ahead of "
                      "training"),
        ("in flight", f"up to {capacity} samples ({c.cluster.actors} actors x "
                      f"{c.rollout.max_in_flight})"),
        ("weights", weights_text(c, p.placement)),
        ("files", str(p.run_path)),
        *_labelled("checkpoint", checkpoint_lines(c, p.run_path, p.model_path)),
        ("replay", replay_line(c)),
        ("recording", recording_line(c)),
        *_labelled("placement", _placement(p)),
    ]  # fmt: skip
    if capacity > ahead * n:
        plan.append(
            ("note", f"actors have room for {capacity} samples and at most {ahead * n} may be "
                     "ahead: raise buffer.max_staleness or lower rollout.max_in_flight")
        )  # fmt: skip
    return "\n".join(f"{label:<10} {text}" for label, text in plan)


def _labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if i == 0 else "", line) for i, line in enumerate(lines)]


def _ends(p: Preflight) -> list[str]:
    """What ends the run in order, and what ends it early because nothing is learned."""
    run, stop = p.config.run, p.config.stop
    ends = [f"after {run.steps} batches"]
    if stop.wall_s is not None:
        ends.append(f"after {stop.wall_s:g} s")
    if stop.epochs is not None:
        batches = p.train_prompts / p.config.groups_per_batch
        ends.append(f"after {stop.epochs} epochs ({batches:.1f} batches each)")
    if stop.reward is not None:
        ends.append(
            f"when the mean reward of {stop.reward_batches} batches reaches {stop.reward:g}"
        )
    broken = []
    if stop.nonfinite_losses is not None:
        broken.append(f"{stop.nonfinite_losses} batches in a row without a finite loss")
    buffer = p.config.buffer
    if buffer.filter_zero_variance:
        cap = filtered_cap(buffer.max_filtered_in_a_row, p.config.groups_per_batch)
        broken.append(f"{cap} groups in a row left out as all equal")
    return [", or ".join(ends), *(["or early: " + ", or ".join(broken)] if broken else [])]


def _placement(p: Preflight) -> list[str]:
    cluster = p.config.cluster
    table: list[tuple[str, ...]] = [("role", "node", "device", "threads")]
    table += rows(p.config, p.placement)
    if cluster.address is None:  # there is one node
        table = [(role, *rest) for role, _, *rest in table]
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    lines = ["".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
             for row in table]  # fmt: skip
    if cluster.address is not None:
        open_ = (
            "whether these machines and GPUs exist" if cluster.placement == "explicit"
            else f"the nodes ({cluster.placement})"
        )  # fmt: skip
        lines.append(f"known at the start, when {cluster.address} is asked: {open_}")
    return lines
