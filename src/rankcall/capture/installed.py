"""What both captures ask the torch that is installed: its dtypes' codes, its own folders."""

from __future__ import annotations

from pathlib import Path

import torch

from rankcall.record import DTYPES

# The dtypes of the running torch, and the codes that records use.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}


def skipped_folders() -> list[str]:
    """Return the path prefixes of frames that are never the user's: torch's and rankcall's."""
    folders = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    return [f"{folder}/" for folder in folders]


_top: str | None = None


def must_install(capture: str) -> bool:
    """Tell whether a capture has to put its kernels in front of the ops, and note that it does.

    Kernels stay for the rest of the process. If the other capture was used last, its kernels hide
    those of this one, which are then installed once more. torch's dispatcher cannot do that safely
    while other threads issue ops, so a program should keep to one capture.
    """
    global _top
    changed, _top = _top != capture, capture
    return changed
