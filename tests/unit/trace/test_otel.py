"""OpenTelemetry: metrics and spans as its SDK's memory and an OTLP collector get them."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from tracing import COUNT, Clock, finished, origin, some

from rankcall.trace import OpenTelemetry, Origin


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
    flying = some(1, enqueued_epoch_ns=np.array([0]), in_flight=np.array([True]))
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
        mine = [description for its_key, description in expected if its_key == key]
        assert points["rankcall.collective.calls"][key].value == count
        assert points["rankcall.collective.bytes"][key].value == sum(
            description["message_size"] for description in mine
        )
        histogram = points["rankcall.collective.duration"][key]
        assert histogram.count == sum(
            description["duration_ms"] is not None for description in mine
        )
    (age,) = points["rankcall.collective.in_flight.age"].values()
    assert age.value == pytest.approx(time.time(), abs=60)  # since 1970
    _check_spans(spans.get_finished_spans(), expected)
    meters.shutdown()
    tracers.shutdown()


def _check_spans(spans: Any, expected: list[Any]) -> None:
    steps = sorted(
        {description["step"] for _, description in expected if description["step"] % 20 == 0}
    )
    parents = [span for span in spans if span.parent is None]
    assert [span.name for span in parents] == [f"step {step}" for step in steps]
    for step, parent in zip(steps, parents, strict=True):
        mine = [description for _, description in expected if description["step"] == step]
        children = [
            span for span in spans if span.parent and span.parent.span_id == parent.context.span_id
        ]
        assert [span.name for span in children] == [description["name"] for description in mine]
        for span, description in zip(children, mine, strict=True):
            assert span.attributes["rankcall.seq"] == description["seq"]
            took_ms = (span.end_time - span.start_time) / 1e6
            assert took_ms == pytest.approx(description["duration_ms"] or 0, abs=1e-5)
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time


def test_otel_records_a_sample_of_many() -> None:
    """A thousand durations a second at most; the counters stay exact."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    clock = Clock()
    sink = OpenTelemetry(meters, span_every=0, clock=clock)
    sink.open(origin())
    for _ in range(5):
        sink.write(some(20_000))
    clock.now += 0.5
    sink.write(some(20_000))
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics  # type: ignore[union-attr]
    by_name = {metric.name: metric.data.data_points for metric in scope.metrics}
    recorded = sum(point.count for point in by_name["rankcall.collective.duration"])
    assert 1500 <= recorded <= 1500 + 6 * 2  # of each op and group at least one
    calls = sum(point.value for point in by_name["rankcall.collective.calls"])
    assert calls == 6 * sum(1 for _ in finished(some(20_000)))
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
    resource = {
        attribute.key: attribute.value
        for attribute in request.resource_metrics[0].resource.attributes
    }
    assert resource["host.name"].string_value == "node/a"
    assert resource["rankcall.rank"].int_value == 3
    metrics = {
        metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics
    }
    calls = sum(point.as_int for point in metrics["rankcall.collective.calls"].sum.data_points)
    assert calls == sum(1 for _ in finished(some(COUNT)))
    spans = [
        span
        for request in receiver.got["/v1/traces"]
        for scope in request.resource_spans[0].scope_spans
        for span in scope.spans
    ]
    ops = [
        description["name"]
        for _, description in finished(some(COUNT))
        if description["step"] % 10 == 0
    ]
    steps = [f"step {step}" for step in range(0, COUNT // 10, 10)]
    assert Counter(span.name for span in spans) == Counter(ops + steps)


def test_a_collector_that_is_down_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """By us, for metrics and for spans; the SDK's message at each retry is suppressed."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        sink = OpenTelemetry(endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", span_every=10)
        sink.open(origin())
        sink.write(some(COUNT))
        sink.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["rankcall.trace"] * 2
    assert all("cannot be reached; training goes on" in record.message for record in warnings)


def test_a_collector_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A collector that accepts connections and never answers is reported, and given up."""
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
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["rankcall.trace"] * 2
