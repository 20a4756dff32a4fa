"""The ways in which a program is recorded, as its ranks switch them on and off."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

OFF = "off"
MODES = ("native", "python", "late", "stopped")
_CAPTURE = {"native": "native", "python": "python", "late": "native", "stopped": "native"}


class Mode(Protocol):
    """The actions of a rank before its program, in the middle of it, and after it."""

    def start(self) -> None: ...
    def toggle(self, times: int) -> None: ...
    def recorded(self) -> int | None: ...
    def ring_kib(self) -> int: ...


class Off:
    """Nothing records."""

    def start(self) -> None:
        """Do nothing."""

    def toggle(self, times: int) -> None:
        """Do nothing."""

    def recorded(self) -> int | None:
        """Return None: there is no recording to count in."""
        return None

    def ring_kib(self) -> int:
        """Return 0: there are no rings."""
        return 0


class Recorded:
    """rankcall records, from the start or from the middle, up to the end or up to the middle."""

    def __init__(self, mode: str, run_dir: Path) -> None:
        self._mode = mode
        self._run_dir = run_dir
        self._count = 0  # of records in recordings that have been switched off
        self._switched_on = 0
        self._ring_kib = 0

    def start(self) -> None:
        """Switch recording on, unless that is to happen in the middle."""
        if self._mode != "late":
            self._enable()

    def toggle(self, times: int) -> None:
        """Switch recording on late or off early, in the end; before that back and forth."""
        if self._mode not in ("late", "stopped"):
            return
        for number in range(2 * times - 1):
            if (self._mode == "late") == (number % 2 == 0):
                self._enable()
            else:
                self._disable()

    def recorded(self) -> int | None:
        """Return how many collectives were recorded."""
        return self._count + self._current_count()

    def ring_kib(self) -> int:
        """Return how much memory rings took when it was most: several may be open for a moment."""
        self._ring_kib = max(self._ring_kib, memory_kib("RssShmem"))
        return self._ring_kib

    def _enable(self) -> None:
        import rankcall

        self._switched_on += 1
        rankcall.enable(self._run_dir / str(self._switched_on), capture=_CAPTURE[self._mode])

    def _disable(self) -> None:
        import rankcall

        self._count += self._current_count()
        self.ring_kib()
        rankcall.disable()

    def _current_count(self) -> int:
        from rankcall.capture import session

        recording = session.current()
        return 0 if recording is None else recording.capture.counts()[0]


def memory_kib(field: str) -> int:
    """Return a field of /proc/self/status that is an amount of memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


def mode_named(name: str, run_dir: Path) -> Mode:
    """Return the mode of a name; ``mutant:NAME`` is a fake recording of ``mutants``."""
    if name == OFF:
        return Off()
    if name.startswith("mutant:"):
        made: Mode = importlib.import_module("samejob.mutants").MUTANTS[name[7:]]()
        return made
    if name not in MODES:
        raise ValueError(f"unknown mode {name!r}; there are {OFF}, {', '.join(MODES)}")
    return Recorded(name, run_dir)
