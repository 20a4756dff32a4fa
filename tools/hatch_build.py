"""Put compiled libraries into a wheel: hatchling runs this when it builds one.

``RANKCALL_LIBRARIES`` names the folder of the libraries for one Python (``native_libraries.py``),
and ``RANKCALL_WHEEL_TAG`` that Python and the platform. Without them, the wheel is for every
Python, and compiles the recorder when it is first used.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries, and names the wheel after what they are for."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change what is built, if libraries are given."""
        folder = os.environ.get("RANKCALL_LIBRARIES")
        if folder:
            build_data["pure_python"] = False
            build_data["tag"] = os.environ["RANKCALL_WHEEL_TAG"]
            build_data["force_include"][folder] = "rankcall/_libraries"
