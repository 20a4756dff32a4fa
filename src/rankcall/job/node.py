"""A node as one of its ranks sees it: the rings of its ranks, and which rank leads.

They are in one folder of shared memory. If that has no room for all, some are in the run directory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rankcall.capture.recording import Recording
from rankcall.errors import warn_once
from rankcall.process import boot_id
from rankcall.ring.layout import Header, read_header
from rankcall.run.paths import is_tail, live_dir

_LIST_S = 2.0  # between two listings of the folder
_FRESH_S = 2.5  # five heartbeats


class Node:
    """The rings in the folder of one recording. Only the watcher's thread uses it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._boot = boot_id()
        self._paths: list[Path] = []
        self._listed = float("-inf")

    def headers(self) -> dict[int, Header]:
        """Read the newest ring header of each rank of this node, for this rank's attempt."""
        path, run_dir = self._recording.path, self._recording.run_dir
        if path is None or run_dir is None:
            return {}
        if time.monotonic() - self._listed > _LIST_S:
            self._listed = time.monotonic()
            self._paths = [*self._list(live_dir(run_dir)), *self._on_disk(run_dir)]
        newest: dict[int, Header] = {}
        attempt = self._recording.identity.attempt
        for file in {*self._paths, path}:
            header = read_header(file)
            if header is None or header.boot_id != self._boot or header.attempt != attempt:
                continue
            known = newest.get(header.rank)
            if known is None or known.anchor_mono_ns < header.anchor_mono_ns:
                newest[header.rank] = header
        return newest

    def _on_disk(self, run_dir: Path) -> list[Path]:
        """Return the rings of this host that are written in the run directory itself.

        Only a local disk has any, and a network may not answer. Containers of one host can share
        the directory, so the host's name must be this one's, too.
        """
        if not self._recording.has_local_run:
            return []
        host, rings = self._recording.identity.host, []
        for file in self._list(run_dir / "rings"):
            header = None if is_tail(file) else read_header(file)
            if header is not None and header.host == host and not header.closed_ns:
                rings.append(file)
        return rings

    def _list(self, folder: Path) -> list[Path]:
        """Return the rings in the folder; none if this process may no longer read it."""
        try:
            names = os.listdir(folder)
        except PermissionError:
            warn_once(
                f"no longer watching for hangs: this process now runs as user {os.geteuid()}, "
                f"who may not read {folder}; recording goes on"
            )
            return []
        except FileNotFoundError:  # the run was removed
            return []
        return sorted(folder / name for name in names if name.endswith(".ring"))

    def leads(self, headers: dict[int, Header], rank: int) -> bool:
        """Return whether ``rank`` acts for the node: it is the lowest whose watcher runs."""
        running = (header.rank for header in headers.values() if _watcher_runs(header))
        return rank == min(running, default=rank)


def _watcher_runs(header: Header) -> bool:
    """Return whether a rank's watcher runs: not closed, not stopped, and not kept from the GIL."""
    age = time.monotonic_ns() - header.python_heartbeat_ns
    watches = header.stack_fd != 0 and not header.closed_ns and age < _FRESH_S * 1e9
    return watches and header.process_state() == "alive"
