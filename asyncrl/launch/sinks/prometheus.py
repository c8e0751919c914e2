"""The newest records for Prometheus to scrape, in its text format.

`staleness/head/mean` of learner rank 0 is `asyncrl_staleness_head_mean{role="learner",rank="0"}`;
a part of a name that varies (a staleness, an actor, a task) is a label. All are gauges, totals as
they stand; a histogram counts on over the batches since the launch. Also `asyncrl_step`, `_version`
and `_incarnation` of each role, and `asyncrl_run_info{run_id,run}`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from asyncrl.errors import ConfigError, MissingExtraError
from asyncrl.launch.folder import RunFolder

VARIES = (
    (re.compile(r"^is/by_staleness/(?P<staleness>\d+)/"), "is/by_staleness/"),
    (re.compile(r"^staleness/by_actor/(?P<actor>[^/]+)/"), "staleness/by_actor/"),
    (re.compile(r"^eval/(?P<task>[^/]+)/"), "eval/"),
    (re.compile(r"^hub/sink_dropped/(?P<sink>[^/]+)$"), "hub/sink_dropped"),
    (re.compile(r"^failures/(?P<kind>[^/]+)$"), "failures"),
)
"""What becomes a label, and what is left of the name."""
SILENT_S = 60.0
"""A role that has sent nothing for so long is shown no more."""
IDLE_S = 10.0
"""A connection that asks for nothing for so long is closed: each holds a thread of the launcher."""
AXES = ("step", "version", "incarnation")

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]


def exposed(name: str, role: str, rank: int) -> Key:
    """Name and labels of a metric.

    >>> exposed("is/by_staleness/2/ess_frac", "learner", 0)
    ('asyncrl_is_by_staleness_ess_frac', (('role', 'learner'), ('rank', '0'), ('staleness', '2')))
    """
    labels: Labels = (("role", role), ("rank", str(rank)))
    for pattern, rest in VARIES:
        if found := pattern.match(name):
            labels += tuple(found.groupdict().items())
            name = rest + name[found.end() :]
            break
    return "asyncrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), labels


class _Counted:
    """A histogram that counts on: by upper bound, whatever edges a batch had."""

    def __init__(self) -> None:
        self.counts: dict[float, float] = {}
        self.sum = 0.0

    def add(self, edges: list[float], counts: list[float]) -> None:
        whole = all(float(e).is_integer() for e in edges)
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            # A bin [2, 3) of integers holds the value 2.
            bound = low if whole else high
            self.counts[bound] = self.counts.get(bound, 0.0) + count
            ends = [end for end in (low, high) if math.isfinite(end)] or [0.0]
            self.sum += count * (low if whole else sum(ends) / len(ends))

    def buckets(self) -> list[tuple[str, float]]:
        found, so_far = [], 0.0
        for bound, count in sorted(self.counts.items()):
            so_far += count
            if math.isfinite(bound):
                found.append((repr(float(bound)), so_far))
        return [*found, ("+Inf", so_far)]


class PrometheusSink:
    """Keeps the newest values; a thread of prometheus-client answers whoever asks.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, port: int, host: str, folder: RunFolder, run_id: str) -> None:
        try:
            from prometheus_client import core
            from prometheus_client.exposition import start_http_server
        except ImportError:
            raise MissingExtraError(
                f"log.prometheus={port}: prometheus-client is not installed; "
                "pip install 'asyncrl[monitor]'"
            ) from None
        self._core = core
        self._info = {"run_id": run_id, "run": folder.name}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, int], dict[Key, float]] = {}
        self._hists: dict[tuple[str, int], dict[Key, _Counted]] = {}
        self._heard: dict[tuple[str, int], float] = {}
        registry = core.CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as e:
            raise ConfigError(
                f"log.prometheus={port}: cannot listen at {host}:{port} ({e.strerror or e}); "
                "choose another port, 0 for a free one, or see log.prometheus_host"
            ) from e
        self._server.RequestHandlerClass = _impatient(self._server.RequestHandlerClass)
        self._server.set_app(_with_head(self._server.get_app()))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"

    def write(self, record: Mapping[str, Any]) -> None:
        """Remember what a record says."""
        source = role, rank = str(record["role"]), int(record["rank"])
        values = {exposed(n, role, rank): float(v) for n, v in record["metrics"].items()}
        values |= {exposed(axis, role, rank): float(record[axis]) for axis in AXES}
        with self._lock:
            self._heard[source] = time.monotonic()
            self._values.setdefault(source, {}).update(values)
            mine = self._hists.setdefault(source, {})
            for name, hist in record["hist"].items():
                counted = mine.setdefault(exposed(name, role, rank), _Counted())
                counted.add(hist["edges"], hist["counts"])

    def collect(self) -> Iterable[Any]:
        """The families of metrics, for prometheus-client."""
        core, now = self._core, time.monotonic()
        gauges: dict[str, list[tuple[Labels, float]]] = {}
        hists: dict[str, list[tuple[Labels, list[tuple[str, float]], float]]] = {}
        with self._lock:
            for source, heard in self._heard.items():
                if now - heard > SILENT_S:
                    continue
                for (name, labels), value in self._values[source].items():
                    gauges.setdefault(name, []).append((labels, value))
                for (name, labels), hist in self._hists[source].items():
                    found = (labels, hist.buckets(), hist.sum)
                    hists.setdefault(name, []).append(found)
        info = core.InfoMetricFamily("asyncrl_run", "Which run this is.")
        info.add_metric([], self._info)
        yield info
        for name, samples in sorted(gauges.items()):
            family = core.GaugeMetricFamily(name, "See docs/metrics.md.", labels=_names(samples))
            for labels, value in samples:
                family.add_metric([v for _, v in labels], value)
            yield family
        for name, rows in sorted(hists.items()):
            family = core.HistogramMetricFamily(name, "See docs/metrics.md.", labels=_names(rows))
            for labels, buckets, total in rows:
                family.add_metric([v for _, v in labels], buckets, sum_value=total)
            yield family

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def _impatient(handler: Any) -> Any:
    """A server's class of request handlers, with a time limit."""

    class Handler(handler):  # type: ignore[misc]
        timeout = IDLE_S

        def handle(self) -> None:
            with suppress(TimeoutError, ConnectionError):
                super().handle()

    return Handler


def _with_head(app: Any) -> Any:
    """An application that answers HEAD as GET, without the content."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return cast(Iterable[bytes], app(environ, start_response))
        told: list[Any] = []
        body = app(environ | {"REQUEST_METHOD": "GET"}, lambda *status: told.extend(status))
        status, headers = told
        length = str(sum(map(len, body)))
        start_response(status, [*headers, ("Content-Length", length)])
        return []

    return answer


def _names(samples: list[Any]) -> list[str]:
    """The labels of a family; they are those of its name, whoever wrote it."""
    return [name for name, _ in samples[0][0]]
