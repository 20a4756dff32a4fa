"""Prometheus, an endpoint for each rank: deprecated, and replaced by ``prometheus_node.py``.

A job of thousands of ranks has as many endpoints, and series for each of them. The histograms of
durations and bytes are also in ``otel.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rankcall.errors import warn_renamed
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.metrics import BYTES, SECONDS, Histogram, MetricKey, MetricKeys
from rankcall.trace.sinks.optional import optional_module
from rankcall.trace.sinks.prometheus_endpoint import Endpoint
from rankcall.trace.sinks.protocols import Origin

_LABELS = ("op", "group", "host", "rank")


@dataclass
class _Sums:
    calls: int = 0
    failed: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    sizes: Histogram = field(default_factory=lambda: Histogram(BYTES))


class Prometheus:
    """Deprecated, goes in version 0.4: use ``PrometheusNode``, or ``OpenTelemetry`` for histograms.

    Serves metrics over HTTP; each rank of a host listens on ``port`` + its local rank.

    The labels are op, group (a bounded number of values), host and rank.

    Args:
        port: The port of local rank 0. With 0 each rank takes a free port, shown by ``.port``.
        address: The address to listen on. The default accepts connections from this host only;
            ``"0.0.0.0"`` accepts them from every host.
        registry: A registry of your own, to which the metrics are added. Then nothing is served.

    Raises:
        ValueError: ``port`` is not a port.
        ExtraMissingError: ``prometheus-client`` is not installed.
    """

    sink_name = "prometheus"

    def __init__(
        self, port: int = 9464, address: str = "127.0.0.1", *, registry: Any = None
    ) -> None:
        warn_renamed("trace.Prometheus", "trace.PrometheusNode or trace.OpenTelemetry")
        self._endpoint = Endpoint(port, address, registry)
        self._lock = threading.Lock()
        self._sums: dict[MetricKey, _Sums] = {}
        self._keys = MetricKeys()
        self._dropped = 0
        self._origin: Origin | None = None

    @property
    def port(self) -> int | None:
        """The port that is listened on; None without a server."""
        return self._endpoint.port

    def open(self, origin: Origin) -> None:
        """Register the metrics and listen."""
        self._origin = origin
        self._endpoint.open(self, max(origin.local_rank, 0))

    def write(self, descriptions: Descriptions) -> None:
        """Add the descriptions to the metrics."""
        batch = list(self._keys.split(descriptions))
        with self._lock:
            self._dropped += descriptions.dropped
            for key, added in batch:
                sums = self._sums.setdefault(key, _Sums())
                sums.calls += added.calls
                sums.failed += added.failed
                sums.seconds.add(added.seconds)
                sums.sizes.add(added.sizes)

    def close(self) -> None:
        """Remove the metrics and stop listening."""
        self._endpoint.close()

    # prometheus_client calls these on the threads of its server.

    def describe(self) -> list[Any]:
        """Return no metric names in advance."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as they are now."""
        core = optional_module("prometheus_client.core", "prometheus")
        calls = core.CounterMetricFamily(
            "rankcall_collectives",
            "Ops that are over, or whose end cannot be known.",
            labels=_LABELS,
        )
        failed = core.CounterMetricFamily(
            "rankcall_collectives_failed", "Ops that have failed.", labels=_LABELS
        )
        seconds = core.HistogramMetricFamily(
            "rankcall_collective_duration_seconds", "How long ops took here.", labels=_LABELS
        )
        sizes = core.HistogramMetricFamily(
            "rankcall_collective_bytes", "Message bytes of the ops.", labels=_LABELS
        )
        with self._lock:
            for key, sums in self._sums.items():
                labels = self._labels(key)
                calls.add_metric(labels, sums.calls)
                failed.add_metric(labels, sums.failed)
                for family, histogram in ((seconds, sums.seconds), (sizes, sums.sizes)):
                    family.add_metric(labels, _buckets(histogram), histogram.total)
            dropped = self._dropped
        yield from (calls, failed, seconds, sizes, *self._in_flight(core))
        lost = core.CounterMetricFamily(
            "rankcall_dropped", "Ops that were overwritten before they were described."
        )
        lost.add_metric([], dropped)
        yield lost

    def _in_flight(self, core: Any) -> list[Any]:
        """Return how many ops are in flight, and how old the oldest is."""
        assert self._origin is not None
        count = core.GaugeMetricFamily("rankcall_in_flight", "Ops in flight.", labels=_LABELS)
        age = core.GaugeMetricFamily(
            "rankcall_in_flight_age_seconds", "Age of the oldest op in flight.", labels=_LABELS
        )
        now = time.time_ns()
        ages_by_key: dict[MetricKey, list[float]] = {}
        descriptions = self._origin.in_flight()
        columns = descriptions.columns
        issue_times = columns["enqueued_epoch_ns"].tolist()
        for at, issued in zip(columns["call"].tolist(), issue_times, strict=True):
            call = descriptions.calls[at]
            key = self._keys.of(call.op, call.group)
            ages_by_key.setdefault(key, []).append((now - issued) / 1e9)
        for key, ages in ages_by_key.items():
            count.add_metric(self._labels(key), len(ages))
            age.add_metric(self._labels(key), max(ages))
        return [count, age]

    def _labels(self, key: MetricKey) -> list[str]:
        assert self._origin is not None
        return [key.op, key.group, self._origin.host, str(self._origin.rank)]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    names = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(names, histogram.counts.cumsum().tolist(), strict=True))
