"""Tell a rank whose process is gone from one that is only slow, for ranks of one host."""

from __future__ import annotations

import os
from typing import Any

from rankcall.process import boot_id, process_start
from rankcall.rundir import host_name

Presence = dict[str, Any]


def own_presence() -> Presence:
    """Return what the other ranks need to know to look for this process."""
    pid = os.getpid()
    return {"host": host_name(), "where": _where(), "pid": pid, "start": process_start(pid)}


def is_gone(other: Presence) -> bool:
    """Whether that process has ended; False where it cannot be known from here."""
    here = other["where"] and other["where"] == _where() and other["start"] is not None
    return bool(here) and process_start(other["pid"]) != other["start"]


def _where() -> str:
    """Return the boot and the pid namespace in which this process's id means it."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
