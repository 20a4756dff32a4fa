"""Write the text of each line that issues ops into the ring, for readers without the sources."""

from __future__ import annotations

import contextlib
import linecache
import mmap
import os
import threading
import time
from collections.abc import Callable

from rankcall import background
from rankcall.ring.layout import Geometry, offset_of
from rankcall.ring.tables import ENTRY_SITE, CallSite, decode_site, entries

_LOOK_SECONDS = 0.5  # a program has few lines that issue ops, and most come in the first step
_MOST_CHARACTERS = 160  # of a line: the side tables have room for some thousand such lines
# A file that has changed since this process began may not be what the process runs.
_BEGAN = time.time()


class SourceLines:
    """Adds the source lines of new call sites to a ring, through ``add(id, text)``.

    Once a quarter of the side tables is full, no more lines are added: the rest is for entries that
    records cannot do without.
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
        """Look once more, and end. Lines that a slow disk has not returned by then stay unknown."""
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
    """Return a call site's line of source, stripped and cut; empty if it is not known.

    That is the user's line, if the call site has two. A file that was changed after the process
    began may not be the source of the running code.
    """
    return text_at(site.own.file, site.own.line)


def text_at(file: str, line: int) -> str:
    """Return a line of source, as ``line_text`` does. It may wait for a disk."""
    with contextlib.suppress(OSError, ValueError):
        if os.stat(file).st_mtime > _BEGAN:
            return ""
    try:
        text = " ".join(linecache.getline(file, line).split())
    except Exception:  # a loader of the user's may raise anything
        return ""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
