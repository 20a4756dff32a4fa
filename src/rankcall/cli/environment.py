"""Environment variables that switch recording on in every process below this one."""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankcall.cli.common import say

BOOT = Path(__file__).resolve().parents[1] / "_boot"
_HOOK = BOOT.parents[1] / "_rankcall_hook.py"


def hooking() -> dict[str, str]:
    """Return the environment variables that load the hook in every Python below this process.

    If ``RANKCALL`` is 0, it stays so: that switches recording off everywhere. If the installation
    is broken, this says so, once and for all processes: they are silent about it.
    """
    try:
        runpy.run_path(str(_HOOK))
    except Exception as error:
        say(f"not recording: {_HOOK} cannot be loaded ({error}); install rankcall again")
    path = os.environ.get("PYTHONPATH")
    return {
        # An empty entry would put the working directory on every worker's path.
        "PYTHONPATH": f"{BOOT}{os.pathsep}{path}" if path else str(BOOT),
        "RANKCALL": os.environ.get("RANKCALL") or "1",
    }


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None removes one), and restore them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
