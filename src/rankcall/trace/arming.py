"""Switch tracing on: choose the sinks, learn the hosts, and say once what is traced."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from rankcall.capture import session
from rankcall.capture.hosts import HostNames, Hosts, ranks_of_this_node
from rankcall.durations import Duration
from rankcall.errors import CaptureUnavailableError, warn_once
from rankcall.trace.descriptions import NOTHING, Descriptions
from rankcall.trace.sinks import RecordSink, Sink
from rankcall.trace.sinks.by_name import make_sink
from rankcall.trace.sinks.nvtx import Nvtx
from rankcall.trace.sinks.parquet import Parquet
from rankcall.trace.sinks.text import Stdout
from rankcall.trace.switches import Mode, Switches, settle
from rankcall.trace.tracing import Trace, live


def enable(
    mode: str | Mode | None = None,
    print_: bool | None = None,
    sinks: Sequence[Sink | RecordSink | str] | None = None,
) -> Trace:
    """Describe every collective of this process from now on.

    Call it on every rank, before or after ``init_process_group``. Rank 0 says on stderr which ops
    are traced. This switches recording on if it is off.

    Args:
        mode: ``ALL``, ``CROSSNODE`` (only ops between hosts) or ``NONE``, in upper or lower case.
            The default is the value of ``TORCH_DISTRIBUTED_TRACING``, or else ``CROSSNODE``.
        print_: Whether to print descriptions on stdout. The default is the value of
            ``TORCH_DISTRIBUTED_TRACING_PRINT``, or else no.
        sinks: Sinks, or names of installed sinks. They get every description, on a thread that
            rankcall owns.

    Returns:
        The trace; its ``stop()`` switches tracing off.

    Raises:
        ValueError: The mode or the name of a sink is unknown.
        TypeError: An element of ``sinks`` is neither a sink nor a name.
        ExtraMissingError: A sink needs a package that is not installed.
        TorchMissingError: torch is absent or too old.
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
    """Trace, and keep the history, as the launcher's environment variables say.

    Never raises; prints errors on stderr.
    """
    try:
        if os.environ.get("RANKCALL_HISTORY"):
            Trace(settle(Mode.ALL, False), [Parquet()], None, _nothing).start()
        if os.environ.get("RANKCALL_TRACE"):
            named = os.environ.get("RANKCALL_TRACE_SINKS", "jsonl")
            names = [name.strip() for name in named.split(",") if name.strip()]
            enable(sinks=[*names, *([] if "nvtx" in names else _nvtx_sinks())])
    except Exception as error:
        warn_once(f"not tracing: {error}")


class _Off(Trace):
    """The trace that ``enable`` returns for the mode ``NONE``."""

    def flush(self, timeout: Duration = 2.0) -> bool:
        """Do nothing."""
        return True

    def in_flight(self) -> Descriptions:
        """Return nothing."""
        return NOTHING

    def stop(self, timeout: Duration = 2.0) -> bool:
        """Do nothing."""
        return True


def _chosen(
    switches: Switches, sinks: Sequence[Sink | RecordSink | str] | None
) -> list[Sink | RecordSink]:
    """Return the sinks that the caller named, and those that the environment asks for."""
    if isinstance(sinks, (str, Sink, RecordSink)):
        raise TypeError("sinks must be a list: sinks=[...]")
    chosen: list[Sink | RecordSink] = []
    for sink in sinks or ():
        made_sink = make_sink(sink) if isinstance(sink, str) else sink
        if not isinstance(made_sink, (Sink, RecordSink)) or isinstance(made_sink, type):
            raise TypeError(
                f"a sink is an object with the methods open, write and close; got {made_sink!r}"
            )
        chosen.append(made_sink)
    prints = any(isinstance(sink, Stdout) for trace in live() for sink in trace.sinks)
    if switches.print_ and not prints and not any(isinstance(sink, Stdout) for sink in chosen):
        chosen.insert(0, Stdout())
    if sinks is None:
        chosen += _nvtx_sinks()
    return chosen


def _nvtx_sinks() -> list[Sink]:
    """Return a sink for the tool that listens to NVTX, or no sink if no tool listens."""
    if not os.environ.get("NVTX_INJECTION64_PATH"):
        return []
    sink = Nvtx()
    try:
        sink.functions()
    except CaptureUnavailableError as error:
        warn_once(f"no NVTX marks: {error}")
        return []
    return [sink]


def _hosts() -> tuple[Hosts, Callable[[], Any]]:
    """Return the table of the ranks' hosts, and the function that closes its store connection."""
    from rankcall.process import host_name

    here = ranks_of_this_node()
    if here is not None:
        return Hosts(here, host_name(), lambda ranks: {}), _nothing
    names = HostNames()
    return Hosts(None, host_name(), names.lookup), names.close


def _announce(message: str) -> None:
    recording = session.current()
    rank = recording.rank() if recording is not None else -1
    if rank == 0 or (rank < 0 and os.environ.get("RANK", "0") == "0"):
        warn_once(message)


def _nothing() -> None:
    """Do nothing."""
