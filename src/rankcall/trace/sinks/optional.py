"""Import the packages that only some sinks need, when such a sink is made."""

from __future__ import annotations

import importlib
from typing import Any

from rankcall.errors import ExtraMissingError


def optional_module(module: str, extra: str) -> Any:
    """Return a module of an optional package.

    Raises ``ExtraMissingError``; it names the pip extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissingError(
            f"this sink needs {module}: pip install 'rankcall[{extra}]'"
        ) from error


def load_polars() -> None:
    """Import Polars now: a later import, on the trace thread, would hold the GIL in training."""
    importlib.import_module("polars")
