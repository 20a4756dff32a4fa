"""Find a sink by its name: in this package, or among those that other packages offer."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from rankcall.trace import sinks
from rankcall.trace.sinks.protocols import RecordSink, Sink

ENTRY_POINTS = "rankcall.sinks"  # the group of entry points by which other packages offer sinks


def make_sink(name: str) -> Sink | RecordSink:
    """Make the sink of a name, with its defaults.

    Raises ``ValueError`` for an unknown name (the message lists the known ones), ``TypeError`` if
    an entry point makes an object that is not a sink, and any error of the sink's constructor.
    """
    makers = _own_sinks()
    if name not in makers:
        offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in offered:
            names = ", ".join(sorted({*makers, *offered}))
            raise ValueError(f"no trace sink {name!r}: one of {names}")
        makers[name] = offered[name].load()
    sink = makers[name]()
    if not isinstance(sink, (Sink, RecordSink)):
        raise TypeError(f"the sink {name!r} has no open, write and close: {type(sink).__name__}")
    return sink


def _own_sinks() -> dict[str, Callable[[], Any]]:
    """Return the classes in this package that have a ``sink_name``, by that name."""
    names = [
        module_info.name
        for module_info in pkgutil.iter_modules(sinks.__path__)
        if module_info.name[0] != "_"
    ]
    modules = [importlib.import_module(f"{sinks.__name__}.{name}") for name in names]
    return {
        value.sink_name: value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and hasattr(value, "sink_name")
    }
