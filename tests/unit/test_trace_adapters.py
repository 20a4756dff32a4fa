"""Prometheus, OpenTelemetry, Parquet and step totals, each read back by somebody else's reader."""

from __future__ import annotations

import http.server
import logging
import math
import resource
import socket
import threading
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_trace_sinks import Clock, origin, some
from worlds import MS, Call, write_world

from rankcall.errors import ExtraMissing
from rankcall.run import load
from rankcall.trace import OpenTelemetry, Origin, Parquet, Prometheus, StepTotals
from rankcall.trace.sinks import extras
from rankcall.trace.sinks.base import Guarded
from rankcall.trace.sinks.counts import OTHER, Keys

COUNT = 500


def finished(batch: Any) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield (op, group) and the description of each that is not in flight."""
    for each, flying in zip(batch, batch.columns["in_flight"].tolist(), strict=True):
        if not flying:
            yield (each["name"], each["group"]), each


# --- Prometheus ---


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    """Return an endpoint on a free port that has been told some ops, one of them in flight."""
    sink = Prometheus(0)
    flying = some(1, issued_ns=np.array([0]), in_flight=np.array([True]))
    told = Origin(3, 4, 3, 1, 'node "a"\n', None, lambda: flying)
    sink.open(told)
    sink.write(some(200))
    sink.write(some(COUNT - 200, 200))
    yield sink
    sink.close()


def scrape(sink: Prometheus) -> dict[str, Any]:
    """Fetch over HTTP, and parse with Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_is_scraped(prometheus: Prometheus) -> None:
    """Counters, histograms and gauges, with hostile names as labels."""
    pytest.importorskip("prometheus_client")
    families = scrape(prometheus)
    expected = list(finished(some(COUNT)))
    calls = Counter(key for key, _ in expected)
    seconds, sizes = defaultdict(list), defaultdict(list)
    for key, each in expected:
        seconds[key].append((each["duration_ms"] or 0) / 1e3)
        sizes[key].append(each["message_size"])
    found = {
        (sample.labels["op"], sample.labels["group"]): sample.value
        for sample in families["rankcall_collectives"].samples
    }
    assert found == dict(calls)
    for family, values in (("duration_seconds", seconds), ("bytes", sizes)):
        for sample in families[f"rankcall_collective_{family}"].samples:
            mine = values[sample.labels["op"], sample.labels["group"]]
            assert sample.labels["host"] == 'node "a"\n'
            assert sample.labels["rank"] == "3"
            if sample.name.endswith("_sum"):
                assert sample.value == pytest.approx(sum(mine))
            elif sample.name.endswith("_count"):
                assert sample.value == len(mine)
            else:
                assert sample.value == sum(each <= float(sample.labels["le"]) for each in mine)
    (age,) = families["rankcall_in_flight_age_seconds"].samples
    assert age.value > 1e9  # since 1970
    assert families["rankcall_in_flight"].samples[0].value == 1


def test_a_port_in_use_is_reported_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the port; when it is free in time, the endpoint comes up."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        clock = Clock()
        sinks = [Prometheus(port), Prometheus(port)]
        first, second = (Guarded(sink, clock) for sink in sinks)
        on_rank_0 = origin(rank=0)
        for _ in range(6):
            first.deliver(some(1), on_rank_0)
            clock.now += 10
        second.deliver(some(1), on_rank_0)
    (record,) = caplog.records
    assert f"port {port} on 127.0.0.1: Address already in use" in record.message
    clock.now += 10
    second.deliver(None, on_rank_0)
    assert sinks[1].port == port
    assert scrape(sinks[1])["rankcall_collectives"].samples[0].value == 1
    second.close(on_rank_0)


def test_each_rank_of_a_host_has_its_port() -> None:
    """The port is counted up by the local rank."""
    pytest.importorskip("prometheus_client")
    free = Prometheus(0)
    free.open(origin(rank=0))
    base = free.port
    free.close()
    assert base is not None
    sink = Prometheus(base - 3)
    sink.open(origin(rank=3))
    assert sink.port == base
    sink.close()
    with pytest.raises(ValueError, match="port"):
        Prometheus(70_000)


def test_label_sets_are_bounded() -> None:
    """Groups beyond the first are told as one."""
    keys = Keys(most=2)
    found = [keys.of("all_reduce", str(group)).group for group in (1, 2, 3, 1, 4)]
    assert found == ["1", "2", OTHER, "1", OTHER]


# --- OpenTelemetry ---


def test_otel_metrics_and_spans_in_memory() -> None:
    """Sums by op and group; the sampled step is the parent of its ops, at their times."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    sink = OpenTelemetry(meters, tracers, span_every=20)
    flying = some(1, issued_ns=np.array([0]), in_flight=np.array([True]))
    sink.open(Origin(3, 4, 3, 1, "node-a", None, lambda: flying))
    for first in range(0, COUNT, 100):
        sink.write(some(100, first))
    data = reader.get_metrics_data()
    sink.close()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    points = {
        metric.name: {
            (point.attributes["op"], point.attributes["group"]): point
            for point in metric.data.data_points
        }
        for metric in scope.metrics
    }
    expected = list(finished(some(COUNT)))
    for key, count in Counter(key for key, _ in expected).items():
        mine = [each for other, each in expected if other == key]
        assert points["rankcall.collective.calls"][key].value == count
        assert points["rankcall.collective.bytes"][key].value == sum(
            each["message_size"] for each in mine
        )
        histogram = points["rankcall.collective.duration"][key]
        assert histogram.count == sum(each["duration_ms"] is not None for each in mine)
    (age,) = points["rankcall.collective.in_flight.age"].values()
    assert age.value > 1e9
    _check_spans(spans.get_finished_spans(), expected)
    meters.shutdown()
    tracers.shutdown()


def _check_spans(spans: Any, expected: list[Any]) -> None:
    steps = sorted({each["step"] for _, each in expected if each["step"] % 20 == 0})
    parents = [span for span in spans if span.parent is None]
    assert [span.name for span in parents] == [f"step {step}" for step in steps]
    for step, parent in zip(steps, parents, strict=True):
        mine = [each for _, each in expected if each["step"] == step]
        children = [
            span for span in spans if span.parent and span.parent.span_id == parent.context.span_id
        ]
        assert [span.name for span in children] == [each["name"] for each in mine]
        for span, each in zip(children, mine, strict=True):
            assert span.attributes["rankcall.seq"] == each["seq"]
            took_ms = (span.end_time - span.start_time) / 1e6
            assert took_ms == pytest.approx(each["duration_ms"] or 0, abs=1e-5)
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time


def test_otel_records_a_sample_of_many() -> None:
    """A thousand durations a second at most; the counters stay exact."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    sink = OpenTelemetry(meters, span_every=0)
    sink.open(origin())
    for _ in range(5):
        sink.write(some(20_000))
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics  # type: ignore[union-attr]
    by_name = {metric.name: metric.data.data_points for metric in scope.metrics}
    recorded = sum(point.count for point in by_name["rankcall.collective.duration"])
    assert 900 <= recorded <= 2500
    calls = sum(point.value for point in by_name["rankcall.collective.calls"])
    assert calls == 5 * sum(1 for _ in finished(some(20_000)))
    sink.close()
    meters.shutdown()


class Receiver:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

        kinds = {
            "/v1/metrics": metrics.ExportMetricsServiceRequest,
            "/v1/traces": traces.ExportTraceServiceRequest,
        }
        got = self.got = defaultdict(list)  # type: dict[str, list[Any]]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                got[self.path].append(kinds[self.path].FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def test_otlp_reaches_a_receiver() -> None:
    """With providers of its own: metrics and spans arrive, and say whose they are."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    receiver = Receiver()
    try:
        endpoint = f"http://127.0.0.1:{receiver.server.server_port}"
        sink = OpenTelemetry(endpoint=endpoint, span_every=10)
        sink.open(origin())
        sink.write(some(COUNT))
        sink.close()
    finally:
        receiver.close()
    (request,) = receiver.got["/v1/metrics"]
    resource = {each.key: each.value for each in request.resource_metrics[0].resource.attributes}
    assert resource["host.name"].string_value == "node/a"
    assert resource["rankcall.rank"].int_value == 3
    metrics = {each.name: each for each in request.resource_metrics[0].scope_metrics[0].metrics}
    calls = sum(point.as_int for point in metrics["rankcall.collective.calls"].sum.data_points)
    assert calls == sum(1 for _ in finished(some(COUNT)))
    spans = [
        span
        for request in receiver.got["/v1/traces"]
        for scope in request.resource_spans[0].scope_spans
        for span in scope.spans
    ]
    assert sum(span.name.startswith("step ") for span in spans) == 5
    assert len(spans) > 40


def test_a_collector_that_is_down_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """By us, for metrics and for spans; what the SDK says at each retry is kept back."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        sink = OpenTelemetry(endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", span_every=10)
        sink.open(origin())
        sink.write(some(COUNT))
        sink.close()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in said] == ["rankcall.trace"] * 2
    assert all("cannot be reached; training goes on" in record.message for record in said)


def test_a_collector_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """One that takes connections and says nothing: reported likewise, and given up at the end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        sink = OpenTelemetry(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", span_every=10)
        sink.open(origin())
        sink.write(some(COUNT))
        closing = threading.Thread(target=sink.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in said] == ["rankcall.trace"] * 2


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the sink is made, not in the middle of the job."""

    def gone(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(extras.importlib, "import_module", gone)
    with pytest.raises(ExtraMissing, match=r"pip install 'rankcall\[prometheus\]'"):
        Prometheus()
    with pytest.raises(ExtraMissing, match=r"pip install 'rankcall\[otel\]'"):
        OpenTelemetry()


# --- Parquet ---


def world(folder: Path, ranks: int, count: int) -> Path:
    """Write a run of all_reduces of three sizes."""
    calls = [
        Call(rank, seq, seq * MS, seq * MS + 1000 * (seq % 3 + 1), bytes=4096 * (seq % 3))
        for rank in range(ranks)
        for seq in range(1, count + 1)
    ]
    return write_world(folder, calls)


def test_history_reads_back(tmp_path: Path) -> None:
    """Segments hold all records, as Run.records has them; by Polars and by DuckDB."""
    duckdb = pytest.importorskip("duckdb")
    run = load(world(tmp_path / "run", ranks=2, count=300))
    for ring in run.rings:
        sink = Parquet(tmp_path / "history", rows=100)
        sink.open(origin(tmp_path, ring.header.rank))
        for first in range(0, 300, 30):
            ring_part = type(ring)(
                ring.path, ring.header, ring.records[first : first + 30], ring.tables, 0
            )
            sink.write_records(ring_part)
        sink.close()
    files = sorted((tmp_path / "history").iterdir())
    assert [path.name[:10] for path in files] == ["rank-00000"] * 3 + ["rank-00001"] * 3
    whole = run.records.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    read = pl.read_parquet(files).with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    order = ["rank", "index"]
    assert read.sort(order).equals(whole.sort(order))
    rows = duckdb.sql(
        f"select rank, count(*), sum(message_bytes) from '{tmp_path}/history/*.parquet' "
        "group by rank order by rank"
    ).fetchall()
    totals = whole.group_by("rank").agg(pl.len(), pl.col("message_bytes").sum()).sort("rank")
    assert rows == totals.rows()


def test_a_segment_is_whole_or_not_there(tmp_path: Path) -> None:
    """Where it cannot be written nothing is left of it; nothing comes twice, nothing is lost."""
    (ring,) = load(world(tmp_path / "run", ranks=1, count=40)).rings
    clock = Clock()
    sink = Parquet(tmp_path / "history", rows=1000, seconds=5, clock=clock)
    guard = Guarded(sink, clock)
    parts = [
        type(ring)(ring.path, ring.header, ring.records[first : first + 10], ring.tables, 0)
        for first in range(0, 40, 10)
    ]
    who = origin(tmp_path)
    guard.deliver(parts[0], who)
    folder = tmp_path / "history"
    folder.rmdir()
    clock.now += 6
    guard.deliver(parts[1], who)  # time for a segment: there is no folder
    assert not folder.exists()
    guard.deliver(parts[2], who)
    folder.mkdir()
    clock.now += 1
    guard.deliver(parts[3], who)
    guard.close(who)
    assert all(path.suffix == ".parquet" for path in folder.iterdir())
    assert pl.read_parquet(folder / "*.parquet")["index"].sort().to_list() == list(range(40))
    with pytest.raises(ValueError, match="rows"):
        Parquet(rows=0)
    with pytest.raises(ValueError, match="seconds"):
        Parquet(seconds=0)


def test_history_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the file and why; nothing half stays, and what was written can be read."""
    (ring,) = load(world(tmp_path / "run", ranks=1, count=3000)).rings
    folder, clock = tmp_path / "history", Clock()
    guard = Guarded(Parquet(folder, rows=3000), clock)
    guard.deliver(ring, origin(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        for _ in range(6):
            guard.deliver(ring, origin(tmp_path))
            clock.now += 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert guard.is_dropped
    (record,) = caplog.records
    assert record.exc_info is None
    assert "the trace sink Parquet failed 4 times and is dropped" in record.message
    assert "File too large" in record.message
    assert ".000001.parquet" in record.message
    assert [path.name.split(".")[-2:] for path in folder.iterdir()] == [["000000", "parquet"]]
    assert pl.read_parquet(folder / "*.parquet").height == 3000


def test_a_segment_over_two_recordings(tmp_path: Path) -> None:
    """Each record has the names of its own recording: ids count anew in each."""
    runs = [
        load(write_world(tmp_path / name, [Call(0, 1, 0, MS, line=line)]))
        for name, line in (("a", 7), ("b", 8))
    ]
    sink = Parquet(tmp_path / "history")
    sink.open(origin(tmp_path, 0))
    for run in (runs[0], runs[0], runs[1]):
        sink.write_records(run.rings[0])
    sink.close()
    (file,) = (tmp_path / "history").iterdir()
    assert pl.read_parquet(file)["call_site"].cast(pl.String).to_list() == [
        f"train.py:{line}" for line in (7, 7, 8)
    ]


# --- step totals ---


class TensorBoard:
    """Keeps what a SummaryWriter is told."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert (tag, step) not in self.scalars, "a step was written twice"
        self.scalars[tag, step] = value


class WandbRun:
    """Keeps what a W&B run is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def test_step_totals() -> None:
    """The sums of each step, once each; a step ends when the one after the next has begun."""
    board, wandb = TensorBoard(), WandbRun()
    for writer in (board, wandb):
        sink = StepTotals(writer)
        sink.open(origin())
        for first in range(0, 100, 7):
            sink.write(some(min(7, 100 - first), first))
        sink.close()
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for (name, _), each in finished(some(100)):
        for whose in (name, "all"):
            sums[f"rankcall/{whose}/calls", each["step"]] += 1
            sums[f"rankcall/{whose}/ms", each["step"]] += each["duration_ms"] or 0
            sums[f"rankcall/{whose}/mib", each["step"]] += each["message_size"] / (1 << 20)
    assert board.scalars.keys() == sums.keys()
    assert all(math.isclose(board.scalars[key], sums[key], abs_tol=1e-12) for key in sums)
    assert wandb.metrics == [("rankcall/*", "rankcall/step")]
    assert [each["rankcall/step"] for each in wandb.logged] == list(range(10))
    assert wandb.logged[3]["rankcall/all/calls"] == sums["rankcall/all/calls", 3]
    with pytest.raises(TypeError, match=r"add_scalar .* log"):
        StepTotals(object())
