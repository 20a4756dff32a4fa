"""Keep the text of each line that issues ops, as the process that runs it reads its own source.

Whoever reads a run elsewhere has not that source, and must not open files that a run names. A
thread of its own does it: a file on a network may take long, and the thread that trains and the
heartbeat must not wait.
"""

from __future__ import annotations

import contextlib
import linecache
import mmap
import os
import threading
import time
from collections.abc import Callable

from rankcall import background
from rankcall.ring.layout import ENTRY_SITE, Geometry, offset_of
from rankcall.ring.tables import CallSite, decode_site, entries

_LOOK_SECONDS = 0.5
_MOST_CHARACTERS = 160
_BEGAN = time.time()


class SourceLines:
    """Follows the call sites of a ring that is being written and adds their lines to it.

    ``add`` is given a call site's id and its text. Once a quarter of the side tables is full, no
    more lines are added: the rest is for entries that records cannot do without.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry, add: Callable[[int, str], None]):
        self._ring, self._geometry, self._add = ring, geometry, add
        self._offset, self._number = 0, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankcall-lines", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Look once more, and end; what a slow disk has not told by then stays unknown."""
        self._stopping.set()
        background.join(self._thread, timeout)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        """Add the lines of the call sites that have come since the last look."""
        at = offset_of("tables_used")
        used = int.from_bytes(self._ring[at : at + 8], "little")
        if used == self._offset:
            return
        begin = self._geometry.tables_offset
        fresh = self._ring[begin + self._offset : begin + used]
        first = self._offset
        for entry in entries(fresh, self._number):
            self._offset, self._number = first + entry.end, entry.number
            if entry.kind == ENTRY_SITE and used < self._geometry.tables_bytes // 4:
                text = line_text(decode_site(entry.payload))
                if text:
                    self._add(entry.number, text)


def line_text(site: CallSite) -> str:
    """Return a line of this process's own source, in one line and bounded; empty if unknown.

    A file that was changed since the process began says nothing of what runs.
    """
    with contextlib.suppress(OSError, ValueError):
        if os.stat(site.file).st_mtime > _BEGAN:
            return ""
    try:
        text = " ".join(linecache.getline(site.file, site.line).split())
    except Exception:  # a loader of the user's may raise anything
        return ""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
