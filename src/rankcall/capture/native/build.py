"""The native recorder as a module to build: see ``rankcall._native``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from rankcall._native import NativeModule
from rankcall.capture.native.layout_header import layout_header
from rankcall.errors import CaptureUnavailable

RECORDER = NativeModule(
    "rankcall_recorder",
    Path(__file__).parent,
    "recorder.cpp",
    CaptureUnavailable,
    {"layout.h": layout_header},
    ("USE_DISTRIBUTED", "USE_C10D_GLOO"),
)


def library_path() -> Path:
    """Return where the recorder for this source, torch and Python is, built or not."""
    return RECORDER.path()


def prebuild() -> Path:
    """Build the recorder unless it is in the cache; return its path. Raises CaptureUnavailable."""
    return RECORDER.prebuild()


def load_recorder() -> ModuleType:
    """Import the recorder, building it first if need be. Raises ``CaptureUnavailable``."""
    return RECORDER.load()
