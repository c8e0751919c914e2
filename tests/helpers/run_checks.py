"""What must hold of a run, told from its files."""

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter, defaultdict

import psutil
import pytest

from asyncrl.recording import read_recording
from tests.helpers.runs import read_ids


def reconcile(run, steps, batch_size, killed=False):
    """Conservation from the roles' own lists of ids, not from the ledger.

    An actor that was `killed` may have been unable to note its last acknowledgement.
    """
    dispatched, pushed, trained = [], [], []
    for path in (run.folder / "logs").glob("*.ids.tsv"):
        batches = {}
        for what, sample, detail in read_ids(path):
            if what == "dispatched":
                dispatched.append(sample)
            elif what == "pushed-accepted":
                pushed.append(sample)
            elif what == "trained":
                batch = int(detail)
                if batches and batch < max(batches):  # the learner went back to a checkpoint
                    batches = {k: samples for k, samples in batches.items() if k < batch}
                batches.setdefault(batch, {})[sample] = None
        trained += [(sample, k) for k, samples in batches.items() for sample in samples]
    ids = [sample for sample, _ in trained]
    assert len(set(ids)) == len(ids) == steps * batch_size, "trained once each, whole batches"
    assert len(set(pushed)) == len(pushed), "no sample was accepted twice"
    assert set(ids) <= set(dispatched if killed else pushed)
    assert sorted({batch for _, batch in trained}) == list(range(1, steps + 1))
    counts = run.summary()["ledger"]
    assert len(dispatched) <= counts["dispatched"] <= len(dispatched) + 64, "the last leases"
    assert set(pushed) <= set(dispatched)
    assert counts["trained"] == len(ids)
    assert 0 <= counts["completed"] - len(pushed) <= 64, "the last acknowledgements"


def check_law(summary):
    counts = summary["ledger"]
    terms = ("trained", "dropped_stale", "filtered", "failed", "requeued", "duplicate", "held")
    assert counts["dispatched"] == sum(counts[t] for t in terms)
    assert summary["conserved"] is True


def check_drained(run):
    """It was told to end: it does so soon, in order, and leaves nothing."""
    assert run.wait(60) == 0, run.output
    summary = run.summary()
    assert summary["ended"] == "interrupted"
    check_law(summary)
    reconcile(run, summary["steps"], 32)
    run.nothing_left()


def kill_and_check_the_message(run, role):
    """A death that nothing makes good ends the run, with one line that names who died."""
    pids = run.pids_of(role)
    assert pids, [p.info for p in psutil.process_iter(["pid", "name"])]
    os.kill(pids[0], signal.SIGKILL)
    assert run.wait(90) == 1
    errors = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert role in errors[0]
    assert "Traceback" not in run.output
    assert run.summary()["ended"] == "failed"
    run.nothing_left()


def batches(run):
    """The records of learner rank 0 that speak of a batch."""
    return [r for r in run.metrics("learner") if "loss/tokens" in r["metrics"]]


def pss_gib(processes):
    """Memory of these processes together, shared pages counted once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**30


def check_learning(rewards):
    """The last ten are above the first ten by three standard errors of their difference."""
    first, last = rewards[:10], rewards[-10:]
    error = math.sqrt(statistics.variance(first) / 10 + statistics.variance(last) / 10)
    assert statistics.mean(last) - statistics.mean(first) > 3 * error


def trained_by(run):
    """Names of the actors of which a sample was trained, by the roles' own lists."""
    trained, pushed = set(), {}
    for path in (run.folder / "logs").glob("*.ids.tsv"):
        for what, sample, _ in read_ids(path):
            if what == "trained":
                trained.add(sample)
            elif what == "pushed-accepted":
                pushed[sample] = path.name.split(".")[0]
    return {pushed[sample] for sample in trained}


def check_recording(run, summary):
    """What was recorded agrees with the ledger and with the learner's own metrics."""
    recorded = [r.entry for r in read_recording(run.folder / "trajectories")]
    outcomes = Counter(r.outcome for r in recorded)
    assert outcomes["trained"] == summary["ledger"]["trained"]
    assert len({r.id for r in recorded}) == len(recorded)
    heads = defaultdict(list)
    for r in recorded:
        if r.outcome == "trained":
            heads[r.batch].append(r.head_staleness)
    told = {r["step"]: r["metrics"]["staleness/head/mean"] for r in batches(run)}
    assert {k: statistics.mean(v) for k, v in heads.items()} == pytest.approx(told)


def check_lineage(run, summary):
    """Of a run whose learner went back: each batch of the final lineage is there, once and whole.

    A sample is recorded anew with each incarnation that trains it: its last line counts.
    """
    last = {}
    for recorded in read_recording(run.folder / "trajectories"):
        entry = recorded.entry
        if entry.id not in last or entry.incarnation >= last[entry.id].incarnation:
            last[entry.id] = entry
    outcomes = Counter(entry.outcome for entry in last.values())
    assert outcomes["trained"] == summary["ledger"]["trained"]
    sizes = Counter(entry.batch for entry in last.values() if entry.outcome == "trained")
    assert sorted(sizes) == list(range(1, summary["steps"] + 1))
    dispatched = {
        sample
        for path in (run.folder / "logs").glob("actor-*.ids.tsv")
        for what, sample, _ in read_ids(path)
        if what == "dispatched"
    }
    assert {tuple(i) for i, entry in last.items() if entry.outcome == "trained"} <= dispatched


def check_replay(run, *options):
    """`asyncrl replay --check`: the recorded batches give the run's weights, bit for bit."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "replay", run.name, "--dir", str(run.base), "--check",
         *options],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every bit of the weights is that of" in done.stdout.splitlines()[-1]
