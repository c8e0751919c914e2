"""A run's folder with known values, written piece by piece, as a launcher would."""

import json
import time

STATES = ("sync", "generate", "get_wait", "idle")


class SmallRun:
    """Two actors and a learner; a batch every two seconds from second 10 on.

    Actor k makes 100 (k + 1) tokens/s, and is at work .6 of its time, syncs .1, waits .2, idles .1.
    The reward of batch s is s / 100, head staleness is 0, 1 or 2 in counts 8, 16, 8.
    """

    def __init__(self, folder, name="small", actors=2):
        self.folder, self.name, self.actors = folder / name, name, actors
        (self.folder / "logs").mkdir(parents=True)
        (self.folder / "trajectories").mkdir()
        (self.folder / "config.yaml").write_text(
            "buffer: {max_staleness: 2}\nrun: {name: small}\nlearner: {optim: {lr: 1.0e-05}}\n"
        )
        self.step = self.incarnation = 0
        self._write("events", {"event": "launch", "device": "cpu"}, role="launcher", wall_s=0.0)
        self.status()

    def _write(self, what, fields, *, role, rank=0, wall_s, step=None, version=0):
        line = {
            "role": role, "rank": rank, "step": self.step if step is None else step,
            "version": version, "incarnation": self.incarnation, "run_id": f"{self.name}-1",
            "wall_s": wall_s,
        }  # fmt: skip
        with (self.folder / f"{what}.jsonl").open("a") as file:
            file.write(json.dumps(line | fields) + "\n")

    def metrics(self, metrics, hist=None, **where):
        self._write("metrics", {"metrics": metrics, "hist": hist or {}}, **where)

    def grow(self, steps):
        """Write this many further batches, and two pulses of each process beside each."""
        for _ in range(steps):
            start = 10.0 + 2 * self.step
            for wall_s in (start, start + 1):
                for rank in range(self.actors):
                    self.pulse(rank, wall_s)
            self.step += 1
            self.batch(start + 2)
        self.status()

    def pulse(self, rank, wall_s):
        shares = dict(zip(STATES, (0.1, 0.6, 0.2, 0.1), strict=True))
        lived = wall_s - 8
        self.metrics(
            {f"time/{s}_s": share * lived for s, share in shares.items()}
            | {"throughput/gen_tok_s": 100.0 * (rank + 1),
               "actor/generated_tokens": 100.0 * (rank + 1) * lived, "actor/in_flight": 4.0 + rank,
               "actor/samples_pushed": 8 * lived, "host/cpu_frac": 0.5, "host/rss_bytes": 2.0**30},
            role="actor", rank=rank, wall_s=wall_s, version=self.step,
        )  # fmt: skip

    def batch(self, wall_s):
        s, version = self.step, self.step - 1
        more = {f"is/by_staleness/{k}/ess_frac": 0.9 - k / 10 for k in range(3)}
        for rank in range(self.actors):
            more |= {f"staleness/by_actor/actor-{rank}/{stat}": value for stat, value in
                     (("mean", 0.5 + rank), ("max", 1.0 + rank), ("count", 16.0))}  # fmt: skip
        self.metrics(
            {"loss/tokens": 320.0, "loss/policy": -0.1 / s, "loss/entropy": 2.0,
             "reward/mean": s / 100, "reward/std": 0.25, "reward/zero_std_frac": 0.125,
             "rollout/truncated_frac": 0.5, "loss/lr": 1e-5,
             "staleness/head/mean": 1.0, "staleness/head/p95": 2.0,
             "staleness/head/max": 2.0, "staleness/in_flight/mean": 0.4,
             "staleness/limit": 2.0, "queue/get_wait_s": 0.1, "throughput/train_tok_s": 300.0,
             "throughput/samples_s": 16.0,
             "is/ess_frac": 0.8, "is/clip_frac": 0.01, "kl/drift_k3": 1e-4, "sync/pause_s": 0.05,
             "sync/total_s": 0.3, "sync/version_lag": 1.0, "time/train_s": 1.8 * s,
             "time/get_wait_s": 0.2 * s} | more,
            {"staleness/head": {"edges": [0, 1, 2, 3], "counts": [8, 16, 8]},
             "staleness/token": {"edges": [0, 1, 2, 3], "counts": [80, 160, 80]},
             "is/ratio_raw": {"edges": [0.5, 1.0, 2.0], "counts": [100, 220]}},
            role="learner", wall_s=wall_s, version=version,
        )  # fmt: skip
        self.metrics(
            {"samples/dispatched": 32.0 * s + 40, "samples/trained": 32.0 * s, "samples/held": 32.0,
             "samples/failed": 8.0, "throughput/used_tokens": 320.0 * s,
             "samples/dropped_stale": 0.0, "queue/depth": 16.0,
             "queue/capacity": 96.0, "queue/bytes": 1e6, "queue/limit_bytes": 4e9,
             "queue/age_s": 3.0},
            role="buffer", wall_s=wall_s, version=version,
        )  # fmt: skip
        self._write("events", {"event": "publication", "publication": f"0:{s}"}, role="learner",
                    wall_s=wall_s, version=s)  # fmt: skip
        with (self.folder / "trajectories" / "index.jsonl").open("a") as file:
            for k, actor in ((0, 0), (1, 0), (2, 1), (1, 1)):
                line = {"actor": f"actor-{actor}", "outcome": "trained", "incarnation": 0,
                        "version_min": [0, max(version - k, 0)], "version": version}  # fmt: skip
                file.write(json.dumps(line) + "\n")

    def status(self, state="running", ago_s=0.0):
        role = {
            "name": "learner-0", "state": "alive", "pid": 7, "restarts": 0, "version": self.step,
            "phase": None, "phase_s": None, "record_age_s": 0.2, "open_waits": 1,
            "waits": [
                {"what": "the next batch", "on": "buffer-0", "age_s": 1.5, "deadline_s": None}
            ],
        }  # fmt: skip
        trained = 32 * self.step
        counts = {"dispatched": trained + 40, "trained": trained, "failed": 8, "held": 32}
        content = {
            "schema": 1, "run_id": f"{self.name}-1", "run": self.name, "pid": 7,
            "process_started": 0.0, "host": "elsewhere", "state": state, "phase": "training",
            "step": self.step, "steps": 100, "version": self.step, "reward": self.step / 100,
            "elapsed_s": 12.0 + 2 * self.step, "left_s": 60.0, "actors": 2, "control": None,
            "roles": [role], "updated_at": time.time() - ago_s, "stalled": None, "deadlines": [],
            "ledger": {"counts": counts, "gauges": {}, "conserved": True,
                       "waiting_for": "12 samples of batch 3, held by actor-1"},
        }  # fmt: skip
        (self.folder / "status.json").write_text(json.dumps(content))
