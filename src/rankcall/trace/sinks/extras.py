"""Import the packages that only some sinks need; name the pip extra if one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from rankcall.errors import ExtraMissing


def imported(module: str, extra: str) -> Any:
    """Return a module of an optional package. Raises ``ExtraMissing``; it names the pip extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f"this sink needs {module}: pip install 'rankcall[{extra}]'") from error


def load_polars() -> None:
    """Import Polars now: a later import, on the trace thread, would hold the GIL in training."""
    importlib.import_module("polars")
