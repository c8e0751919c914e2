"""An export of samples against the recording, read without it."""

import io
import json
import subprocess
import sys
from collections import Counter
from itertools import zip_longest

import numpy as np
import pyarrow.parquet

from asyncrl.__main__ import main
from asyncrl.monitor.samples.view import View
from asyncrl.monitor.samples.wanted import Wanted
from asyncrl.recording import read_recording

ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "behaviour_logprobs": np.float32,
          "versions": np.int32, "incarnations": np.int32, "loss_mask": np.uint8}  # fmt: skip


def rows_of(path):
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_rows(folder, path):
    """Every sample is there once, in order, with every number it has; NaN is null in JSON."""
    for row, recorded in zip_longest(rows_of(path), read_recording(folder / "trajectories")):
        e, t = recorded.entry, recorded.trajectory()
        h = t.header
        assert (row["source"], row["epoch"], row["index"], row["sample"]) == e.id
        assert row["head_staleness"] == e.head_staleness
        for name in ("outcome", "reward", "actor", "lease", "incarnation", "version", "batch",
                     "rank", "position", "time"):  # fmt: skip
            assert row[name] == getattr(e, name), name
        for name in ("finish_reason", "temperature", "kv_mixed", "prompt_tokens",
                     "response_tokens", "policy_tokens"):  # fmt: skip
            assert row[name] == getattr(h, name), name
        for name in ("version_min", "version_max", "version_dispatch", "version_finish"):
            assert tuple(row[name]) == getattr(h, name), name
        for name, dtype in ARRAYS.items():
            got = [np.nan if x is None else x for x in row[name]]
            assert np.array_equal(np.array(got, dtype), getattr(t, name), equal_nan=True), name


def check_samples(run):
    """`asyncrl samples` of a run that is over: an export of all, and what the table counts."""
    path = run.folder.parent / f"{run.folder.name}.parquet"
    assert main(["samples", str(run.folder), "--export", str(path)]) == 0
    same_rows(run.folder, path)
    rows = rows_of(path)
    trained = Counter(row["batch"] for row in rows if row["outcome"] == "trained")
    assert set(trained.values()) == {32}
    assert all(row["prompt"].strip() and row["response"] for row in rows)
    behind = sum(row["head_staleness"] is not None and row["head_staleness"] >= 1 for row in rows)
    command = [sys.executable, "-m", "asyncrl", "samples", str(run.folder)]
    table = [*command, "--staleness", ">=1", "-n", "1"]
    out = subprocess.run(table, check=True, capture_output=True, text=True, timeout=60).stdout
    assert f" of {behind} that match, of {len(rows)} samples" in out


def printed(run, what, *args, **options):
    """What the view prints where there is no terminal."""
    out = io.StringIO()
    getattr(View(run.folder, options.pop("wanted", Wanted()), file=out), what)(*args, **options)
    return out.getvalue()
