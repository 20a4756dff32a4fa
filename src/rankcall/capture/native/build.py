"""The native recorder, and its bridge to NVTX, as modules to build: see ``rankcall._native``."""

from __future__ import annotations

import sys
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


def nvtx_bridge() -> NativeModule:
    """Return what calls NVTX. Raises ``CaptureUnavailable`` where its headers are not installed."""
    return NativeModule(
        "rankcall_nvtx",
        RECORDER.sources,
        "nvtx_bridge.cpp",
        CaptureUnavailable,
        includes=(nvtx_headers(),),
        uses_torch=False,
    )


def nvtx_headers() -> Path:
    """Return the include folder of NVTX, which comes with a package of NVIDIA's."""
    for entry in sys.path:
        for found in sorted(Path(entry or ".").glob("nvidia/*/include/nvtx3/nvToolsExt.h")):
            return found.parents[1]
    raise CaptureUnavailable(
        "NVTX's headers are not installed: pip install 'rankcall[nvtx]' (it brings nvidia-nvtx)"
    )
