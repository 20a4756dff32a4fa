"""Import what only one sink needs, or say how to install it."""

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
