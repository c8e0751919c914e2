"""What a run tells of itself must be complete, and true: its metrics, its time, its timeline."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.monitor.logs import LogReader
from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.trace.reading import read_spans
from asyncrl.monitor.trace.write import write_trace
from asyncrl.recording import read_recording
from tests.helpers.metric_names import undocumented
from tests.helpers.run_checks import batches
from tests.helpers.runs import read_lines
from tests.helpers.trace_events import check_trace, named, read_trace

STATS = "{mean,p50,p95,max}"
CONTRACT = f"""
    staleness/{{head,tail,span,token,dispatch,in_flight,in_queue,steps}}/{STATS}
    staleness/limit staleness/violations
    samples/{{dispatched,completed,trained,dropped_stale,filtered,failed,requeued,duplicate,held}}
    samples/len_bias
    queue/{{depth,capacity,bytes,put_wait_s,get_wait_s}}
    sync/{{total_s,pause_s,transfer_s,bytes,version_lag,retries,checksum_fail}}
    is/{{ratio_raw,ratio_used}}/{{mean,p95,max}} is/{{ess_frac,clip_frac,mask_frac,chi2}}
    is/by_staleness/0/{{ess_frac,clip_frac,mask_frac,count}}
    kl/mismatch_k3 loss/{{policy,entropy,grad_norm,tokens}}
    time/{{sync,train,generate,reward,put_wait,get_wait,eval,serve,idle}}_s
    idle/{{trainer,actors}}_frac throughput/{{gen_tok_s,train_tok_s,samples_s}}
    throughput/{{used,discarded}}_tokens actor/discarded_tokens
    actor/{{alive,restarts,heartbeat_age_s}} reward/{{mean,std,timeouts,errors}}
    eval/even_digits/score host/{{rss_bytes,cpu_frac,age_s}}
"""
"""Every run of the preset tiny has these."""
SOMETIMES = """
    queue/age_s samples/replayed samples/prior_incarnation sync/delta_frac kl/drift_k3 kl/ref_k3
    loss/kl loss/value time/checkpoint_s gpu/util_frac gpu/mem_bytes trace/dropped
"""
"""docs/metrics.md says when these appear."""
HISTOGRAMS = {f"staleness/{n}" for n in
              ("head", "tail", "span", "token", "dispatch", "in_flight", "in_queue", "steps")} | {
    "is/ratio_raw", "is/ratio_used"}  # fmt: skip


def expand(names: str) -> set[str]:
    """`a/{x,y}/{z}` as a/x/z, a/y/z."""
    found = set()
    for name in names.split():
        parts = name.replace("}", "{").split("{")
        found |= {"".join(c) for c in itertools.product(*(part.split(",") for part in parts))}
    return found


def check_metrics(run):
    """Each metric of the contract is written, and whatever is written is documented."""
    records = read_lines(run.folder / "metrics.jsonl")
    names = set().union(*(r["metrics"] for r in records))
    assert expand(CONTRACT) - names == set()
    assert set().union(*(r["hist"] for r in records)) >= HISTOGRAMS
    assert undocumented(names) == []


def check_times(run):
    """The states of each process add up to its life, by its own account and by the hub's clock."""
    pulses = defaultdict(list)
    for r in read_lines(run.folder / "metrics.jsonl"):
        if "host/age_s" in r["metrics"]:
            pulses[(r["role"], r["rank"])].append(r)
    told = state_seconds(run.folder)
    for who, records in pulses.items():
        times = [{k: v for k, v in r["metrics"].items() if k.startswith("time/")} for r in records]
        lived = [r["metrics"]["host/age_s"] for r in records]
        for states, age in zip(times, lived, strict=True):
            assert sum(states.values()) == pytest.approx(age, rel=0.01, abs=0.05), who
        passed = records[-1]["wall_s"] - records[0]["wall_s"]
        added = sum(times[-1].values()) - sum(times[0].values())
        assert added == pytest.approx(passed, rel=0.01, abs=2.0), who  # a record may be late
        for name, seconds in told.get(who, {}).items():
            # A state that is not over has no line: at the end a process idles. Nor have short ones.
            total = times[-1].get(f"time/{name}_s", 0.0)
            if name != "idle":
                assert seconds == pytest.approx(total, rel=0.02, abs=1.5), (who, name)
    roles = {role for role, _ in pulses}
    assert {"launcher", "buffer", "learner", "actor"} <= roles
    check_clocks(run)
    return pulses


def check_clocks(run):
    """What the run said of itself at its end is what every display reads out of its files."""
    history = RunHistory(run.folder)
    history.update()
    told, summary = {f.label: f.value for f in finals(history)}, run.summary()
    for name, label in (("samples_s", "samples/s trained"), ("first_step_s", "first step after, s"),
                        ("total_s", "seconds in all")):  # fmt: skip
        assert summary[name] == pytest.approx(told[label], abs=0.01), label
    phases = {p["phase"]: p for p in summary["startup"]}
    assert phases["first_batch"]["ended_s"] < summary["first_step_s"] < summary["total_s"]
    assert summary["training_s"] + phases["first_batch"]["ended_s"] < summary["total_s"] + 0.1
    status = json.loads((run.folder / "status.json").read_text())
    assert status["elapsed_s"] == pytest.approx(summary["total_s"], abs=0.1)


def state_seconds(folder: Path):
    """By process and state: seconds in its trace."""
    found = defaultdict(lambda: defaultdict(float))
    for process in read_spans(folder).processes:
        for span in process.spans:
            if span.track == "state":
                found[(process.role, process.rank)][span.name] += (span.end - span.at) / 1e6
    return found


def check_timeline(run, samples):
    """Its trace is valid, and has the life of every sample that was trained."""
    out = run.base / f"{run.name}.trace.json.gz"
    written = write_trace(run.folder, out)
    events = read_trace(out)
    check_trace(events)
    assert (written.samples, written.malformed) == (samples, 0)
    roles = {r["role"] for r in read_lines(run.folder / "metrics.jsonl")}
    names = set(named(events, "process_name").values())
    assert roles <= {name.rpartition("-")[0] for name in names} | {"relay"}
    slices = {e["name"] for e in events if e["ph"] == "X"}
    assert {"generate", "reward", "push", "wait for data", "train", "update", "commit",
            "gather", "idle"} <= slices  # fmt: skip
    assert "publication" in {e["name"] for e in events if e["ph"] == "i"}


def check_recomputed(run, batches_per_publication=1):
    """Staleness, rewards and tokens, computed anew from the recorded samples, are those told."""
    parts = defaultdict(list)
    for recorded in read_recording(run.folder / "trajectories"):
        if recorded.entry.outcome == "trained":
            parts[recorded.entry.batch].append((recorded.entry, recorded.trajectory()))
    records = batches(run)
    used, settled = 0, None
    for record in records:
        mine, metrics = parts[record["step"]], record["metrics"]
        found = staleness_of(mine, batches_per_publication)
        for name, values in found.items():
            told = {s: metrics[f"staleness/{name}/{s}"] for s in ("mean", "p50", "p95", "max")}
            assert told == pytest.approx({
                "mean": np.mean(values), "p50": np.quantile(values, 0.5),
                "p95": np.quantile(values, 0.95), "max": np.max(values),
            }), (record["step"], name)  # fmt: skip
            assert record["hist"][f"staleness/{name}"]["counts"] == np.bincount(values).tolist()
        assert metrics["reward/mean"] == pytest.approx(np.mean([e.reward for e, _ in mine]))
        tokens = sum(len(t.prompt_ids) + len(t.response_ids) for _, t in mine)
        seconds = len(mine) / metrics["throughput/samples_s"]
        assert metrics["throughput/train_tok_s"] * seconds == pytest.approx(tokens)
        now = max(e.time for e, _ in mine)  # by the buffer's clock
        if settled is not None:
            assert seconds == pytest.approx(now - settled, rel=0.1, abs=0.1), record["step"]
        used, settled = used + sum(len(t.response_ids) for _, t in mine), now
    last = max(
        r["metrics"].get("throughput/used_tokens", 0.0) for r in run.metrics("buffer")
    )  # fmt: skip
    assert last == used


def staleness_of(mine, batches_per_publication):
    """As the definitions say it, from the stamps of the tokens."""
    found = defaultdict(list)
    for entry, t in mine:
        v, stamps = entry.version, t.versions[t.loss_mask == 1]
        found["head"].append(v - stamps.min())
        found["tail"].append(v - stamps.max())
        found["span"].append(stamps.max() - stamps.min())
        found["dispatch"].append(v - t.header.version_dispatch.version)
        found["in_flight"].append(stamps[-1] - t.header.version_dispatch.version)
        found["in_queue"].append(v - stamps[-1])
        found["steps"].append((v - stamps.min()) * batches_per_publication)
        found["token"] += (v - stamps).tolist()
    return {name: np.array(values, np.int64) for name, values in found.items()}


def check_scraped(run):
    """Prometheus can scrape it at the address that status.json tells."""
    url = json.loads((run.folder / "status.json").read_text())["prometheus"]
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(url).text)}
    steps = [s for s in families["asyncrl_step"].samples if s.labels["role"] == "learner"]
    assert {s.labels["rank"] for s in steps} == {"0", "1"}
    assert max(s.value for s in steps) >= 1
    assert families["asyncrl_staleness_head"].type == "histogram"
    assert run.run_id() == families["asyncrl_run_info"].samples[0].labels["run_id"]


def check_logs(run):
    """Every role's log begins with whose it is, and its lines have their times."""
    entries = LogReader(run.folder).update(whole=True)
    begun = {e.name: e for e in entries if e.logger == "asyncrl.logs"}
    roles = {"actor-0", "learner-0", "learner-1", "buffer-0", "launcher"}
    assert roles <= begun.keys()
    assert {e.run_id for e in begun.values()} == {run.run_id()}
    now = time.time()
    assert all(now - 3600 < e.time <= now for e in entries if e.logger != "raw")
    errors = [e for e in entries if e.at_least("ERROR")]
    assert errors == [], errors[:3]
