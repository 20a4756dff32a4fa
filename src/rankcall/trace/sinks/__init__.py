"""Where descriptions and records go: one module for each sink, and what all sinks share.

A sink is a class with the methods of ``Sink`` or ``RecordSink``. If it can be made without
arguments, it has a ``sink_name``, by which ``enable(sinks=[...])`` finds it.
"""

from __future__ import annotations

from rankcall.trace.sinks.protocols import AtIssue, Origin, RecordSink, Sink

__all__ = ["AtIssue", "Origin", "RecordSink", "Sink"]
