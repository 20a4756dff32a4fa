"""What one rank sees of its node: the rings in the same folder, and who of them leads."""

from __future__ import annotations

import time
from pathlib import Path

from rankcall.capture.recording import Recording
from rankcall.errors import CorruptRun
from rankcall.process import boot_id
from rankcall.processes import process_state
from rankcall.ring.header import Header, parse_header
from rankcall.ring.layout import HEADER_BYTES

_LIST_S = 2.0  # how often the folder is looked through
_FRESH_S = 2.5  # five heartbeats


class Node:
    """The rings beside one recording's own. Used from the watcher's thread."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._boot = boot_id()
        self._paths: list[Path] = []
        self._listed = float("-inf")

    def headers(self) -> dict[int, Header]:
        """Read the header of every rank of this node and attempt, the newest of each rank."""
        path = self._recording.path
        if path is None:
            return {}
        if time.monotonic() - self._listed > _LIST_S:
            self._listed = time.monotonic()
            self._paths = sorted(path.parent.glob("*.ring"))
        found: dict[int, Header] = {}
        for each in {*self._paths, path}:
            header = _read(each)
            if header is None or header.boot_id != self._boot:
                continue
            known = found.get(header.rank)
            if known is None or known.anchor_mono_ns < header.anchor_mono_ns:
                found[header.rank] = header
        attempt = max((header.attempt for header in found.values()), default=0)
        return {rank: each for rank, each in found.items() if each.attempt == attempt}

    def leads(self, headers: dict[int, Header], rank: int) -> bool:
        """Tell whether ``rank`` is to act for the node: the lowest one whose watcher runs."""
        return rank == min((each.rank for each in headers.values() if _runs(each)), default=rank)


def _runs(header: Header) -> bool:
    """Tell whether a rank's watcher can be counted on: not closed, stopped or without the GIL."""
    age = time.monotonic_ns() - header.python_heartbeat_ns
    watches = header.stack_fd != 0 and not header.closed_ns and age < _FRESH_S * 1e9
    return watches and process_state(header) == "alive"


def _read(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            return parse_header(file.read(HEADER_BYTES), str(path))
    except (OSError, CorruptRun):
        return None
