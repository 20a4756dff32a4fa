"""Import what only some sinks need, and say how to install what is absent."""

from __future__ import annotations

import importlib
from typing import Any

from rankcall.errors import ExtraMissing


def imported(module: str, extra: str) -> Any:
    """Return a module of an optional package; raises ``ExtraMissing`` with the pip extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f"this sink needs {module}: pip install 'rankcall[{extra}]'") from error


def load_polars() -> None:
    """Import Polars now: on the trace thread that would keep the GIL from a job that runs."""
    importlib.import_module("polars")
