"""Sinks by name: ours, and what installed packages offer as ``rankcall.sinks`` entry points."""

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

    Raises ``ValueError`` for a name that there is not, with those that there are; ``TypeError``
    where an entry point makes no sink; what making it raises.
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
    found: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=GROUP)}
    if name not in found:
        names = ", ".join(sorted({*_OURS, *found}))
        raise ValueError(f"no trace sink {name!r}: one of {names}")
    return found[name].load()()
