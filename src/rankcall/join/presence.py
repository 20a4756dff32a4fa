"""Distinguish a rank whose process has ended from a slow one, for ranks on the same host."""

from __future__ import annotations

import os
from typing import Any

from rankcall.process import boot_id, process_start
from rankcall.rundir import host_name

Presence = dict[str, Any]


def own_presence() -> Presence:
    """Return the facts by which other ranks can find this process."""
    pid = os.getpid()
    return {"host": host_name(), "where": _where(), "pid": pid, "start": process_start(pid)}


def is_gone(other: Presence) -> bool:
    """Whether that process has ended; False if this process cannot know."""
    here = other["where"] and other["where"] == _where() and other["start"] is not None
    return bool(here) and process_start(other["pid"]) != other["start"]


def _where() -> str:
    """Return the boot and the pid namespace in which this process's id is valid."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
