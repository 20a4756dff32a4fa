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
