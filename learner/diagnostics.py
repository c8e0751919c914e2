"""What a step reports about its batch: names of the metrics contract, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.learner.maths.corrections import LOG_RATIO_CLAMP, k3, weight_statistics
from asyncrl.learner.maths.critic_loss import explained_variance
from asyncrl.staleness import sample_staleness
from asyncrl.types import FinishReason, GroupId, SampleHeader, Version

Metrics = dict[str, float]
Hist = dict[str, dict[str, list[float]]]

_RATIO_EDGES = np.concatenate([[0.0], np.geomspace(0.1, 10.0, 21)])


def manifest_metrics(
    headers: Sequence[SampleHeader], version: Version, batches_per_publication: int
) -> tuple[Metrics, Hist]:
    """Staleness, rewards and lengths of the samples trained, from their headers alone."""
    metrics: Metrics = {}
    hist: Hist = {}
    if not headers:
        return metrics, hist
    per_sample = [sample_staleness(h, version, batches_per_publication) for h in headers]
    for name in ("head", "tail", "span", "dispatch", "in_flight", "in_queue", "steps"):
        values = np.array([getattr(s, name) for s in per_sample])
        metrics |= _stats(f"staleness/{name}", values)
        hist[f"staleness/{name}"] = _integers(values)
    metrics |= _by_actor(headers, [s.head for s in per_sample])
    rewards = np.array([h.reward for h in headers], np.float64)
    metrics["reward/mean"] = float(rewards.mean())
    if len(rewards) > 1:
        metrics["reward/std"] = float(rewards.std(ddof=1))
    metrics["reward/zero_std_frac"] = _all_alike(headers)
    lengths = np.array([h.response_tokens for h in headers])
    metrics["rollout/response_tokens/mean"] = float(lengths.mean())
    metrics["rollout/response_tokens/max"] = float(lengths.max())
    ended = [h.finish_reason == FinishReason.LENGTH for h in headers]
    metrics["rollout/truncated_frac"] = float(np.mean(ended))
    if any(h.kv_mixed for h in headers):
        metrics["rollout/kv_mixed_frac"] = float(np.mean([h.kv_mixed for h in headers]))
    return metrics, hist


def _all_alike(headers: Sequence[SampleHeader]) -> float:
    """Share of the groups whose rewards are all equal; one of a single sample is such a group."""
    groups: dict[GroupId, set[float]] = {}
    for header in headers:
        groups.setdefault(header.id.group, set()).add(header.reward)
    return sum(len(rewards) == 1 for rewards in groups.values()) / len(groups)


def _by_actor(headers: Sequence[SampleHeader], heads: Sequence[int]) -> Metrics:
    """Head staleness of each actor's samples."""
    metrics: Metrics = {}
    by_actor: dict[str, list[int]] = {}
    for header, head in zip(headers, heads, strict=True):
        by_actor.setdefault(header.actor, []).append(head)
    for actor, mine in by_actor.items():
        metrics[f"staleness/by_actor/{actor}/mean"] = sum(mine) / len(mine)
        metrics[f"staleness/by_actor/{actor}/max"] = float(max(mine))
        metrics[f"staleness/by_actor/{actor}/count"] = float(len(mine))
    return metrics


def replay_metrics(headers: Sequence[SampleHeader], version: Version) -> tuple[Metrics, Hist]:
    """How many samples a batch trained again, and their head staleness."""
    heads = np.array([sample_staleness(h, version).head for h in headers], np.int64)
    if not len(heads):
        return {"replay/samples": 0.0}, {}
    metrics = {"replay/samples": float(len(heads))} | _stats("replay/staleness", heads)
    return metrics, {"replay/staleness": _integers(heads)}


def token_metrics(table: Mapping[str, npt.NDArray[np.float32]]) -> tuple[Metrics, Hist]:
    """Importance weights, KL, values and token staleness from the table of all ranks.

    `table` has the columns of `microbatch.COLUMNS`. Mismatch (engine against learner at the same
    version) and drift (older versions) are two metrics; one without tokens is left out. Importance
    weights and KL are of all tokens of the loss, `staleness/token` of the fresh ones alone.
    """
    metrics: Metrics = {}
    hist: Hist = {}
    columns = {name: column.astype(np.float64) for name, column in table.items()}
    log_weight = columns["start"] - columns["mu"]
    if not len(log_weight) or not np.isfinite(log_weight).all():
        return metrics, hist  # the policy itself is broken: the gradient check reports it
    used, kept, staleness = columns["used"], columns["kept"] > 0, columns["staleness"]
    lowered = columns["lowered"] > 0
    of_all = weight_statistics(log_weight, used, kept, lowered)
    metrics |= {f"is/{k}": v for k, v in of_all.items()}
    for k in np.unique(staleness).astype(int):
        at_k = staleness == k
        of_k = weight_statistics(log_weight[at_k], used[at_k], kept[at_k], lowered[at_k])
        for name in ("ess_frac", "clip_frac", "mask_frac"):
            metrics[f"is/by_staleness/{k}/{name}"] = of_k[name]
        metrics[f"is/by_staleness/{k}/count"] = float(at_k.sum())
    metrics |= _divergences(columns, log_weight)
    metrics |= _value_metrics(columns)
    metrics["loss/entropy"] = float(columns["entropy"].mean())
    metrics["advantage/mean"] = float(columns["advantage"].mean())
    metrics["advantage/std"] = float(columns["advantage"].std())
    if len(fresh := staleness[columns["replayed"] == 0]):
        metrics |= _stats("staleness/token", fresh)
        hist["staleness/token"] = _integers(fresh)
    raw = np.exp(np.clip(log_weight, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    hist["is/ratio_raw"], hist["is/ratio_used"] = _ratios(raw), _ratios(used)
    return metrics, hist


def _divergences(
    columns: Mapping[str, npt.NDArray[np.float64]], log_weight: npt.NDArray[np.float64]
) -> Metrics:
    metrics: Metrics = {}
    own_version = columns["own_version"] > 0
    if own_version.any():
        metrics["kl/mismatch_k3"] = k3(log_weight[own_version])
    if not own_version.all():
        metrics["kl/drift_k3"] = k3(log_weight[~own_version])
    known = np.isfinite(columns["reference"])
    if known.any():
        metrics["kl/ref_k3"] = k3((columns["reference"] - columns["start"])[known])
    return metrics


def _value_metrics(columns: Mapping[str, npt.NDArray[np.float64]]) -> Metrics:
    """How well the critic's values before the update foretold their targets."""
    value, target = columns["values"], columns["targets"]
    known = np.isfinite(target)
    if not known.any():
        return {}
    return {
        "value/mean": float(value[known].mean()),
        "value/target": float(target[known].mean()),
        "value/explained_variance": explained_variance(value[known], target[known]),
    }


def _stats(name: str, values: npt.NDArray[np.generic]) -> Metrics:
    numbers = values.astype(np.float64)
    return {
        f"{name}/mean": float(numbers.mean()),
        f"{name}/p50": float(np.quantile(numbers, 0.5)),
        f"{name}/p95": float(np.quantile(numbers, 0.95)),
        f"{name}/max": float(numbers.max()),
    }


def _integers(values: npt.NDArray[np.generic]) -> dict[str, list[float]]:
    """Histogram with one bin for each integer from 0 on."""
    counts = np.bincount(values.astype(np.int64))
    return {
        "edges": [float(k) for k in range(len(counts) + 1)],
        "counts": counts.astype(float).tolist(),
    }


def _ratios(values: npt.NDArray[np.float64]) -> dict[str, list[float]]:
    """Histogram on a logarithmic axis around 1; the last bin takes what lies above."""
    counts, _ = np.histogram(np.minimum(values, _RATIO_EDGES[-1]), bins=_RATIO_EDGES)
    return {"edges": _RATIO_EDGES.tolist(), "counts": counts.astype(float).tolist()}
