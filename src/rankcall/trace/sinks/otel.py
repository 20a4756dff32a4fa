"""OpenTelemetry: metrics, and the ops of some steps as spans, through the official SDK."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rankcall.drop_in import description
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.guard import logger
from rankcall.trace.sinks.metrics import MetricKeys
from rankcall.trace.sinks.optional import optional_module
from rankcall.trace.sinks.protocols import Origin

_SCOPE = "rankcall"
# The SDK takes durations one by one, and holds the GIL for some microseconds each. More than a
# thousand a second would cost training some thousandths of its time.
_DURATIONS_PER_SECOND = 1000
_SPANS_PER_STEP = 2000  # the batch processor's queue holds 2,048 spans, and drops the others
# What the span itself says, and what is no fact about the op.
_NO_ATTRIBUTES = ("enqueued_epoch_ns", "in_flight", "failed", "prints", "first")
# Descriptions come when ops end, and in order per group only, so ops of a step come after the first
# ones of the next.
_LATE = 2  # a step is complete once this many later steps have begun
_SHUTDOWN_MS = 1000  # of the two seconds in which all of rankcall must be over at exit
_OTLP = "opentelemetry.exporter.otlp.proto.http"
_TIMEOUT_SECONDS = 2
_TRIES = 3  # then the collector is not asked any more


class OpenTelemetry:
    """Writes to OpenTelemetry: metrics, and some steps as spans with their ops as children.

    The metrics are the counters ``rankcall.collective.calls`` and ``.bytes``, the histogram
    ``.duration`` (in seconds; a sample if there are more than 1,000 ops per second) and the gauge
    ``.in_flight.age`` (in seconds). Their attributes are op, group, host and rank.

    Args:
        meter_provider: Where the metrics go.
        tracer_provider: Where the spans go. If both providers are None, the sink makes its own,
            which export over OTLP (HTTP), and shuts them down at the end. They need
            ``opentelemetry-sdk`` and ``opentelemetry-exporter-otlp-proto-http``.
        endpoint: The collector for the sink's own providers; the default is the value of
            OTEL_EXPORTER_OTLP_ENDPOINT.
        span_every: Every how many steps one step becomes a span; 0 makes no spans.
        clock: For tests.

    Raises:
        ValueError: ``span_every`` is negative.
        ExtraMissingError: OpenTelemetry is not installed.
    """

    sink_name = "otel"

    def __init__(
        self,
        meter_provider: Any = None,
        tracer_provider: Any = None,
        *,
        endpoint: str | None = None,
        span_every: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if span_every < 0:
            raise ValueError(f"span_every must be 0 or more; got {span_every}")
        self._metrics = optional_module("opentelemetry.metrics", "otel")
        self._traces = optional_module("opentelemetry.trace", "otel")
        self._given = meter_provider, tracer_provider
        self._own: list[Any] = []
        self._is_closed = False
        if meter_provider is None and tracer_provider is None:
            optional_module(_OTLP, "otel")
        self._endpoint = endpoint
        self._every = span_every
        self._keys = MetricKeys()
        self._steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._newest = -1
        self._clock = clock
        self._budget, self._budget_at = float(_DURATIONS_PER_SECOND), clock()

    def open(self, origin: Origin) -> None:
        """Make the instruments, and the providers if the caller gave none."""
        self._origin = origin
        self._common = {"host": origin.host, "rank": origin.rank}
        meters, tracers = self._given
        if meters is None and tracers is None:
            meters, tracers = self._own = self._own_providers(origin)
        wants_spans = tracers is not None and self._every
        self._tracer: Any = tracers.get_tracer(_SCOPE) if wants_spans else None
        self._instruments = None if meters is None else self._made(meters.get_meter(_SCOPE))

    def write(self, descriptions: Descriptions) -> None:
        """Add to the metrics; keep the ops of a step that becomes a span until it is complete."""
        if self._instruments is not None:
            calls, sizes, durations = self._instruments
            for key, added in self._keys.split(descriptions):
                labels = {"op": key.op, "group": key.group, **self._common}
                calls.add(added.calls, labels)
                sizes.add(int(added.sizes.sum()), labels)
                for seconds in self._sampled(added.seconds):
                    durations.record(seconds, labels)
        if self._tracer is not None:
            self._keep_for_spans(descriptions)
            self._end_spans(self._newest - _LATE)

    def close(self) -> None:
        """Write the remaining spans; shut down the sink's own providers."""
        self._is_closed = True
        if self._tracer is not None:
            self._end_spans(self._newest)
        for provider, argument in zip(self._own, ("timeout_millis", None), strict=False):
            provider.shutdown(**({argument: _SHUTDOWN_MS} if argument else {}))

    def _made(self, meter: Any) -> tuple[Any, Any, Any]:
        meter.create_observable_gauge(
            "rankcall.collective.in_flight.age", [self._ages], "s", "Age of the oldest op in flight"
        )
        return (
            meter.create_counter(
                "rankcall.collective.calls",
                "{op}",
                "Ops that are over, or whose end cannot be known",
            ),
            meter.create_counter("rankcall.collective.bytes", "By", "Message bytes of the ops"),
            meter.create_histogram("rankcall.collective.duration", "s", "How long ops took here"),
        )

    def _sampled(self, seconds: Any) -> list[float]:
        """Return the durations to record: all, or a sample if the budget allows no more.

        For each duration the SDK holds the GIL for some microseconds; the training thread needs it.
        """
        now = self._clock()
        more = (now - self._budget_at) * _DURATIONS_PER_SECOND
        self._budget, self._budget_at = min(self._budget + more, _DURATIONS_PER_SECOND), now
        count = min(len(seconds), max(1, int(self._budget)))
        self._budget -= min(count, self._budget)
        picks = np.linspace(0, len(seconds) - 1, count).astype(np.int64)[: len(seconds)]
        sample: list[float] = seconds[picks].tolist()
        return sample

    def _ages(self, options: Any) -> Iterator[Any]:
        """Yield the age of the oldest op in flight of each key. The SDK's reader calls it."""
        if self._is_closed:  # a provider of the user calls this for as long as it lives
            return
        descriptions, now = self._origin.in_flight(), time.time_ns()
        oldest: dict[Any, int] = {}
        columns = descriptions.columns
        issue_times = columns["enqueued_epoch_ns"].tolist()
        for at, issued in zip(columns["call"].tolist(), issue_times, strict=True):
            call = descriptions.calls[at]
            key = self._keys.of(call.op, call.group)
            oldest[key] = min(oldest.get(key, issued), issued)
        for key, issued in oldest.items():
            labels = {"op": key.op, "group": key.group, **self._common}
            yield self._metrics.Observation((now - issued) / 1e9, labels)

    def _keep_for_spans(self, descriptions: Descriptions) -> None:
        columns = descriptions.columns
        if len(descriptions):
            self._newest = max(self._newest, int(columns["step"].max()))
        wanted = (columns["step"] % self._every == 0) & ~columns["in_flight"]
        for step in np.unique(columns["step"][wanted]).tolist():
            kept = self._steps[step]
            if len(kept) >= _SPANS_PER_STEP:
                continue
            of_step = np.flatnonzero(wanted & (columns["step"] == step))
            chosen = np.zeros(len(wanted), np.bool_)
            chosen[of_step[: _SPANS_PER_STEP - len(kept)]] = True
            more = descriptions.only(chosen)
            kept += more.facts()

    def _end_spans(self, last: int) -> None:
        for step in sorted(step for step in self._steps if step <= last):
            self._span_of_step(step, self._steps.pop(step))

    def _span_of_step(self, step: int, ops: list[dict[str, Any]]) -> None:
        times = [_span_of_op(op) for op in ops]
        parent = self._tracer.start_span(
            f"step {step}",
            start_time=min(begin for begin, _ in times),
            attributes={"rankcall.step": step, **self._common},
        )
        within = self._traces.set_span_in_context(parent)
        for op, (begin, end) in zip(ops, times, strict=True):
            span = self._tracer.start_span(
                op["op"], context=within, start_time=begin, attributes=_attributes(op)
            )
            span.end(end_time=end)
        parent.end(end_time=max(end for _, end in times))

    def _own_providers(self, origin: Origin) -> list[Any]:
        sdk_metrics = optional_module("opentelemetry.sdk.metrics", "otel")
        sdk_traces = optional_module("opentelemetry.sdk.trace", "otel")
        resource = optional_module("opentelemetry.sdk.resources", "otel").Resource.create(
            {"service.name": "rankcall", "host.name": origin.host, "rankcall.rank": origin.rank}
        )
        reader = optional_module(
            "opentelemetry.sdk.metrics.export", "otel"
        ).PeriodicExportingMetricReader(
            _exporter("metric_exporter", "OTLPMetricExporter", self._endpoint, "v1/metrics")
        )
        spans = sdk_traces.TracerProvider(resource=resource, shutdown_on_exit=False)
        spans.add_span_processor(
            optional_module("opentelemetry.sdk.trace.export", "otel").BatchSpanProcessor(
                _exporter("trace_exporter", "OTLPSpanExporter", self._endpoint, "v1/traces")
            )
        )
        meters = sdk_metrics.MeterProvider([reader], resource, shutdown_on_exit=False)
        return [meters, spans]


def _span_of_op(op: dict[str, Any]) -> tuple[int, int]:
    """Return when an op was issued and when it ended, in ns since the epoch."""
    begin: int = op["enqueued_epoch_ns"]
    return begin, begin + int((op["duration_ms"] or 0) * 1e6)


def _attributes(op: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an op's span: each fact that is known, by its name.

    Until version 0.3, the names of version 0.1, which are those of a description, are there, too.
    """
    facts = {name: value for name, value in op.items() if name not in _NO_ATTRIBUTES}
    return {
        f"rankcall.{name}": value
        for name, value in {**description(op), **facts}.items()
        if value is not None
    }


def _exporter(module: str, name: str, endpoint: str | None, path: str) -> Any:
    """Return an exporter over HTTP.

    Args:
        module: The exporter's module in the OTLP package.
        name: The exporter's class.
        endpoint: The collector's address; None leaves it to the SDK's environment variables.
        path: The path of this kind of data below ``endpoint``.

    Raises:
        ExtraMissingError: The OTLP package is not installed.
    """
    base = getattr(optional_module(f"{_OTLP}.{module}", "otel"), name)
    made = type(name, (_ReportsOnce, base), {})
    where = {} if endpoint is None else {"endpoint": f"{endpoint.rstrip('/')}/{path}"}
    return made(timeout=_TIMEOUT_SECONDS, **where)


class _ReportsOnce:
    """Wraps an exporter's ``export``; after three failures in a row it exports no more."""

    _failures = 0
    _result: Any = None

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export without the SDK's log messages; log the first failure."""
        if self._failures >= _TRIES:
            return self._result
        with _Quiet():
            self._result = super().export(*args, **kwargs)  # type: ignore[misc]
        if self._result.name == "SUCCESS":
            self._failures = 0
        else:
            self._failures += 1
            if self._failures == 1:
                where = getattr(self, "_endpoint", "the collector")
                logger.error(
                    "the OpenTelemetry collector at %s cannot be reached; training goes on, and "
                    "after %d tries without it",
                    where,
                    _TRIES,
                )
        return self._result


class _Quiet:
    """Suppresses the messages that the SDK logs on this thread at each retry."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._loggers = [
            known
            for name, known in list(logging.Logger.manager.loggerDict.items())
            if name.startswith("opentelemetry.exporter.otlp") and isinstance(known, logging.Logger)
        ]
        for sdk_logger in self._loggers:
            sdk_logger.addFilter(self._passes)

    def __exit__(self, *exception: object) -> None:
        for sdk_logger in self._loggers:
            sdk_logger.removeFilter(self._passes)

    def _passes(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread
