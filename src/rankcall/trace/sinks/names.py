"""Sinks by name: rankcall's own, and the ``rankcall.sinks`` entry points of other packages."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rankcall.trace.sinks.base import RecordSink, Sink

GROUP = "rankcall.sinks"
_OURS = {
    "jsonl": "text:JsonLines",
    "nvtx": "nvtx:Nvtx",
    "otel": "otel:OpenTelemetry",
    "parquet": "parquet:Parquet",
    "prometheus": "prometheus:Prometheus",
    "stdout": "text:Stdout",
}


def made(name: str) -> Sink | RecordSink:
    """Make the sink of a name, with its defaults.

    Raises ``ValueError`` for an unknown name (the message lists the known ones), ``TypeError`` if
    an entry point makes an object that is not a sink, and any error of the sink's constructor.
    """
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        sink = getattr(importlib.import_module(f"rankcall.trace.sinks.{module}"), attribute)()
    else:
        sink = _offered(name)
    if not isinstance(sink, (Sink, RecordSink)):
        raise TypeError(f"the sink {name!r} has no open, write and close: {type(sink).__name__}")
    return sink


def _offered(name: str) -> Any:
    offered: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        names = ", ".join(sorted({*_OURS, *offered}))
        raise ValueError(f"no trace sink {name!r}: one of {names}")
    return offered[name].load()()
