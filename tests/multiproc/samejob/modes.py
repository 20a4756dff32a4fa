"""The ways in which a program is recorded, as its ranks switch them on and off."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

OFF = "off"
MODES = ("native", "python", "late", "stopped")
_CAPTURE = {"native": "native", "python": "python", "late": "native", "stopped": "native"}


class Mode(Protocol):
    """What a rank does before, in the middle of, and after its program."""

    def start(self) -> None: ...
    def toggle(self, times: int) -> None: ...
    def recorded(self) -> int | None: ...


class Off:
    """Nothing records."""

    def start(self) -> None:
        """Do nothing."""

    def toggle(self, times: int) -> None:
        """Do nothing."""

    def recorded(self) -> int | None:
        """Return None: there is no recording to count in."""
        return None


class Recorded:
    """rankcall records, from the start or from the middle, up to the end or up to the middle."""

    def __init__(self, mode: str, run_dir: Path) -> None:
        self._mode = mode
        self._run_dir = run_dir
        self._recordings: list[Any] = []

    def start(self) -> None:
        """Switch recording on, unless that is to happen in the middle."""
        if self._mode != "late":
            self._enable()

    def toggle(self, times: int) -> None:
        """Switch recording on late or off early, an odd number of times."""
        import rankcall

        for _ in range(times):
            if self._mode == "late":
                self._enable()
            elif self._mode == "stopped":
                rankcall.disable()
            if self._mode in ("late", "stopped") and times > 1:
                self._switch_back()

    def _switch_back(self) -> None:
        import rankcall

        rankcall.disable()
        self._enable()
        if self._mode == "stopped":
            rankcall.disable()

    def _enable(self) -> None:
        import rankcall

        run_dir = self._run_dir / str(len(self._recordings))
        self._recordings.append(rankcall.enable(run_dir, capture=_CAPTURE[self._mode]))

    def recorded(self) -> int | None:
        """Return how many collectives were recorded."""
        return sum(recording.capture.counts()[0] for recording in self._recordings)


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
