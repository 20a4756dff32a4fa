"""Describe every collective while the job runs, and send the descriptions where people look.

One call, ``enable()``, on every rank; or no call: ``rankcall run --trace ALL``. The descriptions'
fields, who describes what, and the sinks are in docs/guides/trace.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from rankcall.capture import session
from rankcall.capture.notices import say
from rankcall.errors import CaptureUnavailable
from rankcall.trace.describe import describe
from rankcall.trace.descriptions import NOTHING, Description, Descriptions
from rankcall.trace.hosts import Hosts, ranks_of_this_node
from rankcall.trace.live import Trace, live
from rankcall.trace.sinks.base import MemorySink, Origin, RecordSink, Sink
from rankcall.trace.sinks.names import made
from rankcall.trace.sinks.nvtx import Nvtx
from rankcall.trace.sinks.otel import OpenTelemetry
from rankcall.trace.sinks.parquet import Parquet
from rankcall.trace.sinks.prometheus import Prometheus
from rankcall.trace.sinks.steps import StepTotals
from rankcall.trace.sinks.text import JsonLines, Stdout
from rankcall.trace.switches import Mode, Switches, settle

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
    "RecordSink",
    "Sink",
    "Stdout",
    "StepTotals",
    "Trace",
    "describe",
    "enable",
    "shunt_torch_communication",
]


def enable(
    mode: str | Mode | None = None,
    print_: bool | None = None,
    sinks: Sequence[Sink | RecordSink | str] | None = None,
) -> Trace:
    """Describe every collective of this process from now on; return what switches it off again.

    Call it on every rank, before or after ``init_process_group``. ``mode`` is ``ALL``,
    ``CROSSNODE`` (only ops between hosts) or ``NONE``, in any case (default:
    ``TORCH_DISTRIBUTED_TRACING``, or ``CROSSNODE``). ``print_`` prints descriptions on stdout
    (default: ``TORCH_DISTRIBUTED_TRACING_PRINT``, or not). ``sinks`` get all of them, on a thread
    of rankcall's: sinks, or names of installed ones.

    Rank 0 says on stderr what is traced. Recording is switched on if it is not. Raises
    ``ValueError`` for an unknown mode or sink, ``TypeError`` for what is no sink, ``TorchMissing``.
    """
    switches = settle(mode, print_)
    chosen = _chosen(switches, sinks)
    session.check_torch()
    if switches.mode is Mode.NONE:
        _announce(f"tracing is off ({Mode.NONE.value})")
        return _Off(switches, (), None, _nothing)
    span, close = _hosts() if switches.mode is Mode.CROSSNODE else (None, _nothing)
    trace = Trace(switches, chosen, span, close)
    try:
        trace.start()
    except BaseException:
        close()
        raise
    names = ", ".join(type(sink).__name__ for sink in chosen) or "no sink"
    _announce(f"tracing {switches.mode.value} to {names}")
    return trace


shunt_torch_communication = enable


def arm() -> None:
    """Trace, and keep the history, as the launcher asked by environment.

    Never raises; says on stderr what went wrong.
    """
    try:
        if os.environ.get("RANKCALL_HISTORY"):
            Trace(settle(Mode.ALL, False), [Parquet()], None, _nothing).start()
        if os.environ.get("RANKCALL_TRACE"):
            named = os.environ.get("RANKCALL_TRACE_SINKS", "jsonl")
            names = [name.strip() for name in named.split(",") if name.strip()]
            enable(sinks=[*names, *([] if "nvtx" in names else _listened_to())])
    except Exception as error:
        say(f"not tracing: {error}")


class _Off(Trace):
    """What ``enable`` returns where nothing is traced."""

    def flush(self, timeout: float = 2.0) -> bool:
        """Do nothing."""
        return True

    def in_flight(self) -> Descriptions:
        """Return nothing."""
        return NOTHING

    def remove(self, timeout: float = 2.0) -> bool:
        """Do nothing."""
        return True


def _chosen(
    switches: Switches, sinks: Sequence[Sink | RecordSink | str] | None
) -> list[Sink | RecordSink]:
    """Return the sinks that were asked for, in one way or another."""
    if isinstance(sinks, (str, Sink, RecordSink)):
        raise TypeError("sinks must be a list: sinks=[...]")
    chosen: list[Sink | RecordSink] = []
    for sink in sinks or ():
        found = made(sink) if isinstance(sink, str) else sink
        if not isinstance(found, (Sink, RecordSink)) or isinstance(found, type):
            raise TypeError(
                f"a sink is an object with the methods open, write and close; got {found!r}"
            )
        chosen.append(found)
    prints = any(isinstance(sink, Stdout) for trace in live() for sink in trace.sinks)
    if switches.print_ and not prints and not any(isinstance(sink, Stdout) for sink in chosen):
        chosen.insert(0, Stdout())
    if sinks is None:
        chosen += _listened_to()
    return chosen


def _listened_to() -> list[Sink]:
    """Return a sink for the tool that listens to NVTX, if there is one; say where it cannot be."""
    if not os.environ.get("NVTX_INJECTION64_PATH"):
        return []
    sink = Nvtx()
    try:
        sink.functions()
    except CaptureUnavailable as error:
        say(f"no NVTX marks: {error}")
        return []
    return [sink]


def _hosts() -> tuple[Hosts, Callable[[], Any]]:
    """Return who knows which ranks are on other hosts, and what lets go of the store it asks."""
    from rankcall.rundir import host_name

    here = ranks_of_this_node()
    if here is not None:
        return Hosts(here, host_name(), lambda ranks: {}), _nothing
    from rankcall.capture.hostnames import HostNames

    names = HostNames()
    return Hosts(None, host_name(), names.lookup), names.close


def _announce(message: str) -> None:
    recording = session.current()
    rank = recording.rank() if recording is not None else -1
    if rank == 0 or (rank < 0 and os.environ.get("RANK", "0") == "0"):
        say(message)


def _nothing() -> None:
    """Do nothing."""
