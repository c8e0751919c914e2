"""Five real runs, built to have one bottleneck each: the advice names it.

Their windows are kept in tests/monitor/bottlenecks.json (written anew with
ASYNCRL_RECORD_BOTTLENECKS=1), so that `make test` checks the advice against real figures.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.window import of_history

pytestmark = [pytest.mark.run, pytest.mark.soak, pytest.mark.timeout(900)]

RECORDED = Path(__file__).parents[1] / "monitor" / "bottlenecks.json"
COMMON = ("eval.samples=0", "run.steps=8")
BUILT = {
    # Each reward takes .4 s, one after the other.
    "reward": ("task.reward=slow_reward:slowly",),
    # Few samples at once, which take long: the engine is the slow part, and never waits.
    "actors": ("rollout.max_in_flight=2", "rollout.max_new_tokens=96"),
    # The two sides take turns.
    "staleness": ("buffer.max_staleness=0", "rollout.max_new_tokens=96"),
    # Sixteen passes over each batch.
    "learner": ("learner.epochs=16", "learner.loss.clip_low=0.2", "learner.loss.clip_high=0.2"),
    # Responses end by chance, one token in a hundred: the longest is many mean ones.
    "tail": ("buffer.max_staleness=0", "rollout.max_new_tokens=900"),
}


@pytest.mark.parametrize("kind", BUILT)
def test_the_advice_names_the_bottleneck(kind, start, tmp_path, monkeypatch):
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\n\ndef slowly(prompt, response, finish_reason):\n"
        "    time.sleep(0.4)\n    return len(response) / 100\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(*COMMON, *BUILT[kind])
    assert run.wait(600) == 0, run.output
    summary = run.summary()
    history = RunHistory(run.folder)
    history.update()
    window = of_history(history)
    print(kind, summary["advice"], window)
    if os.environ.get("ASYNCRL_RECORD_BOTTLENECKS"):
        known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        settings = [s for s in (*COMMON, *BUILT[kind]) if not s.startswith("task.reward=")]
        known[kind] = {"settings": settings, "window": asdict(window)}
        RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert summary["advice"][0]["kind"] == kind, summary["advice"]
    assert f"advice: {summary['advice'][0]['line']}" in run.output
