"""Lines that rankcall writes to stderr of a job: each once, and on one rank a node only."""

from __future__ import annotations

import os
import sys

_said: set[str] = set()


def say(message: str) -> None:
    """Write one line to stderr, unless this process has said it before or is not local rank 0."""
    if message in _said:
        return
    _said.add(message)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"rankcall: {message}", file=sys.stderr, flush=True)
