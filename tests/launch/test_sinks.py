"""TensorBoard and wandb get what the records say: read back with their own readers."""

import json
import math
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from asyncrl.config.schema import Config, LogConfig
from asyncrl.errors import ConfigError, MissingExtraError
from asyncrl.launch.sinks import prometheus
from asyncrl.launch.sinks.prometheus import PrometheusSink
from asyncrl.launch.sinks.tensorboard import TensorBoardSink
from asyncrl.launch.sinks.wandb import WandbSink

HIST = {"staleness/head": {"edges": [0.0, 1.0, 2.0], "counts": [3.0, 4.0]}}


def record(role, rank, step, metrics, hist=None, wall_s=1.5):
    return {"run_id": "r", "role": role, "rank": rank, "step": step, "version": step // 2,
            "incarnation": 0, "wall_s": wall_s, "metrics": metrics, "hist": hist or {},
            "event": None}  # fmt: skip


RECORDS = (
    record("learner", 0, 2, {"loss/policy": 0.5, "reward/mean": 0.25}, HIST, wall_s=1.5),
    record("actor", 3, 2, {"actor/in_flight": 7.0}),
    record("launcher", 0, 0, {"eval/arithmetic/score": 0.125}),
    record("learner", 0, 3, {"loss/policy": float("nan")}, wall_s=4.0),
    record("learner", 0, 3, {}) | {"event": {"event": "publication"}},
)


@pytest.fixture
def folder(tmp_path):
    return SimpleNamespace(name="r", path=str(tmp_path))


def test_tensorboard_reads_scalars_and_histograms(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(folder)
    for r in RECORDS:
        sink.write(r)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # while it is still open
    assert sorted(read.Tags()["scalars"]) == [
        "actor-3/actor/in_flight", "eval/arithmetic/score", "loss/policy", "reward/mean",
    ]  # fmt: skip
    (first, second) = read.Scalars("loss/policy")
    assert (first.step, first.value, second.step) == (2, 0.5, 3)
    assert second.value != second.value, "what is not finite stays so"
    assert second.wall_time - first.wall_time == pytest.approx(2.5)
    assert read.Scalars("actor-3/actor/in_flight")[0].value == 7.0
    assert read.Tags()["histograms"] == ["staleness/head"]
    (event,) = read.Histograms("staleness/head")
    h = event.histogram_value
    assert (event.step, h.min, h.max, h.num) == (2, 0.0, 2.0, 7.0)
    assert (h.bucket_limit, h.bucket) == ([1.0, 2.0], [3.0, 4.0])
    assert h.sum == pytest.approx(3 * 0.5 + 4 * 1.5)
    assert h.sum_squares == pytest.approx(3 * 0.25 + 4 * 2.25)
    sink.close()


def test_tensorboard_sink_loads_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from types import SimpleNamespace\n"
        "from asyncrl.launch.sinks.tensorboard import TensorBoardSink\n"
        f"sink = TensorBoardSink(SimpleNamespace(path={str(tmp_path)!r}))\n"
        f"sink.write({RECORDS[0]!r}); sink.close()\n"
        "assert not {'torch', 'tensorflow'} & sys.modules.keys()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=root)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("tensorboard.compat.proto.event_pb2", lambda folder: TensorBoardSink(folder)),
        ("wandb", lambda folder: WandbSink(Config(log=LogConfig(wandb="offline")), folder)),
        ("prometheus_client", lambda folder: PrometheusSink(0, "127.0.0.1", folder, "r-1")),
    ],
)
def test_a_sink_that_is_not_installed_names_its_extra(module, make, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    name = {"prometheus_client": "monitor"}.get(module, module.partition(".")[0])
    with pytest.raises(MissingExtraError, match=rf"pip install 'asyncrl\[{name}\]'"):
        make(folder)


def wandb_records(path):
    """The records of an offline run's file: a log in blocks of 32 KiB (LevelDB's)."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb_gets_scalars_histograms_and_three_axes(folder, tmp_path):
    sink = WandbSink(Config(log=LogConfig(wandb="offline")), folder)
    for r in RECORDS:
        sink.write(r)
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, axes = [], {}
    for r in wandb_records(path):
        if r.WhichOneof("record_type") == "history":
            rows.append({
                i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item
            })  # fmt: skip
        elif r.WhichOneof("record_type") == "metric":
            axes[r.metric.name or r.metric.glob_name] = r.metric.step_metric
    assert axes == {"step": "", "version": "", "wall_s": "", "*": "step"}
    assert len(rows) == 4, "an event is no row"
    assert all({"step", "version", "wall_s"} <= row.keys() for row in rows)
    assert (rows[0]["step"], rows[0]["version"], rows[0]["wall_s"]) == (2, 1, 1.5)
    assert (rows[0]["loss/policy"], rows[0]["reward/mean"]) == (0.5, 0.25)
    assert rows[0]["staleness/head/bins"] == [0, 1, 2]
    assert rows[0]["staleness/head/values"] == [3, 4]
    assert rows[1]["actor-3/actor/in_flight"] == 7
    assert rows[2]["eval/arithmetic/score"] == 0.125


def scrape(sink):
    """The samples of an answer, as the official parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = httpx.get(sink.url)
    assert answer.status_code == 200
    families = list(text_string_to_metric_families(answer.text))
    assert len({f.name for f in families}) == len(families)
    found = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    return families, found


@pytest.fixture
def scraped(folder):
    sink = PrometheusSink(0, "127.0.0.1", folder, "r-1")
    yield sink
    sink.close()


def test_prometheus_scrapes_gauges_histograms_and_whose_they_are(scraped, monkeypatch):
    for r in RECORDS:
        scraped.write(r)
    more = {"is/by_staleness/2/ess_frac": 0.5, "staleness/by_actor/actor-3/mean": 1.5}
    ratios = {"is/ratio_raw": {"edges": [0.0, 0.5, 2.0], "counts": [1.0, 3.0]}}
    longer = {"staleness/head": {"edges": [0.0, 1.0, 2.0, 3.0], "counts": [1.0, 0.0, 5.0]}}
    scraped.write(record("learner", 0, 4, more, longer | ratios))
    families, found = scrape(scraped)

    def value(name, **labels):
        return found[(name, frozenset(labels.items()))]

    learner = {"role": "learner", "rank": "0"}
    assert value("asyncrl_reward_mean", **learner) == 0.25
    assert value("asyncrl_loss_policy", **learner) != value("asyncrl_loss_policy", **learner)
    assert value("asyncrl_actor_in_flight", role="actor", rank="3") == 7
    assert value("asyncrl_eval_score", role="launcher", rank="0", task="arithmetic") == 0.125
    assert value("asyncrl_is_by_staleness_ess_frac", **learner, staleness="2") == 0.5
    assert value("asyncrl_staleness_by_actor_mean", **learner, actor="actor-3") == 1.5
    assert value("asyncrl_step", **learner) == 4
    assert value("asyncrl_run_info", run_id="r-1", run="r") == 1
    # Both batches: {0: 3, 1: 4} and {0: 1, 2: 5}.
    heads = [value("asyncrl_staleness_head_bucket", **learner, le=le)
             for le in ("0.0", "1.0", "2.0", "+Inf")]  # fmt: skip
    assert heads == [4, 8, 13, 13]
    assert value("asyncrl_staleness_head_sum", **learner) == 4 * 1 + 5 * 2
    assert value("asyncrl_staleness_head_count", **learner) == 13
    assert value("asyncrl_is_ratio_raw_bucket", **learner, le="0.5") == 1
    assert value("asyncrl_is_ratio_raw_sum", **learner) == pytest.approx(0.25 + 3 * 1.25)
    kinds = {f.name: f.type for f in families}
    assert kinds["asyncrl_staleness_head"] == "histogram"
    assert kinds["asyncrl_reward_mean"] == "gauge"
    now = prometheus.time.monotonic()
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: now + 61))
    scraped.write(record("actor", 3, 5, {"actor/in_flight": 8.0}))
    _, found = scrape(scraped)
    roles = {dict(labels).get("role") for _, labels in found}
    assert roles == {None, "actor"}, "who is silent for a minute is shown no more"


def test_a_bucket_without_an_upper_end_is_there_once(scraped):
    edges = {"is/ratio_raw": {"edges": [0.0, 1.0, math.inf], "counts": [1.0, 3.0]}}
    scraped.write(record("learner", 0, 1, {}, edges))
    told = [line for line in httpx.get(scraped.url).text.splitlines() if "_bucket" in line]
    bounds = [line.partition('le="')[2].partition('"')[0] for line in told]
    assert bounds == ["1.0", "+Inf"]
    assert "is_ratio_raw_sum" in httpx.get(scraped.url).text


def test_an_idle_connection_is_closed_and_head_has_no_content(scraped, monkeypatch):
    handler = scraped._server.RequestHandlerClass
    assert handler.timeout == prometheus.IDLE_S
    monkeypatch.setattr(handler, "timeout", 0.05)
    with socket.create_connection(scraped._server.server_address) as idle:
        idle.settimeout(30)
        assert idle.recv(1) == b""
    head, whole = httpx.head(scraped.url), httpx.get(scraped.url)
    assert head.status_code == 200
    assert not head.content
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_a_port_that_is_taken_is_refused(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"log\.prometheus={port}: cannot listen"):
            PrometheusSink(port, "127.0.0.1", folder, "r-1")


def test_tensorboard_forgets_the_steps_that_a_resumed_run_makes_once_more(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for purge_from, steps in ((None, (1, 2, 3, 4)), (3, (3, 4, 5))):
        sink = TensorBoardSink(folder, purge_from=purge_from)
        for step in steps:
            sink.write(record("learner", 0, step, {"loss/policy": step + (purge_from or 0)}))
        sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(e.step, e.value) for e in read.Scalars("loss/policy")]
    assert values == [(1, 1.0), (2, 2.0), (3, 6.0), (4, 7.0), (5, 8.0)]
