"""Describe every collective while the job runs, and send the descriptions to sinks.

Call ``enable()`` on every rank, or start the job with ``rankcall run --trace ALL``. The fields of a
description, the rank that describes an op, and the sinks are in docs/guides/trace.md.
"""

from __future__ import annotations

from rankcall.trace.arming import arm as arm
from rankcall.trace.arming import enable, shunt_torch_communication
from rankcall.trace.describer import describe
from rankcall.trace.descriptions import Description, Descriptions
from rankcall.trace.sinks import Origin, RecordSink, Sink
from rankcall.trace.sinks.memory import MemorySink
from rankcall.trace.sinks.nvtx import Nvtx
from rankcall.trace.sinks.otel import OpenTelemetry
from rankcall.trace.sinks.parquet import Parquet
from rankcall.trace.sinks.prometheus import Prometheus
from rankcall.trace.sinks.prometheus_node import PrometheusNode
from rankcall.trace.sinks.steps import StepTotals
from rankcall.trace.sinks.text import JsonLines, Stdout
from rankcall.trace.switches import Mode
from rankcall.trace.tracing import Trace

__all__ = [
    "Description",
    "Descriptions",
    "JsonLines",
    "MemorySink",
    "Mode",
    "Nvtx",
    "OpenTelemetry",
    "Origin",
    "Parquet",
    "Prometheus",
    "PrometheusNode",
    "RecordSink",
    "Sink",
    "Stdout",
    "StepTotals",
    "Trace",
    "describe",
    "enable",
    "shunt_torch_communication",
]
