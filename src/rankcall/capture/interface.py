"""What the captures in C++ and in Python share: their interface, and marks for tools."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from rankcall.capture.device_ops import DeviceOp
from rankcall.capture.marks import Marks
from rankcall.capture.moments import Look
from rankcall.record import DTYPES
from rankcall.ring.tables import Group


class Capture(Protocol):
    """Writes a record into the ring for each c10d op that this process issues.

    Kernels in front of the ops do that, between ``start`` and ``stop``. Ops that are in flight at
    ``stop`` still get their ends; ``drained`` tells when the last one has.
    """

    name: str

    def start(self) -> None:
        """Record every c10d op from now on."""

    def stop(self) -> None:
        """Record no new ops."""

    def forget(self) -> None:
        """Record nothing more, because this is a forked child and the ring is its parent's."""

    def drained(self) -> bool:
        """Tell whether every record of a stopped capture has its end."""

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""

    def sleep(self, fd: int, wanted: int) -> None:
        """Have an eventfd written at the next end (``wanted`` is 1), or start or end (2)."""

    @property
    def make_statuses(self) -> Callable[..., list[Any]] | None:
        """The native function that makes statuses for hooks; None if Python makes them."""

    def add_group(self, group: Group, me: int) -> int:
        """Announce a group and return its id; ``me`` is this rank's index in it."""

    def add_line(self, site: int, text: str) -> None:
        """Add the source line of a call site."""

    def step(self) -> None:
        """Count an optimizer step."""

    def look(self, thread: int) -> Look:
        """Return what a thread (Python's number) is doing, and what the process went through."""

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""

    def start_device_ops(self, records: list[int], time_ns: int) -> None:
        """Note that devices have started ops by ``time_ns``; see ``PythonRing.start``."""

    def take_ended_device_ops(self) -> list[int]:
        """Return the records that futures of Works have ended since the last call."""

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records that have not ended: completed at ``time_ns``, or abandoned if that is 0."""

    def reading_status(self) -> AbstractContextManager[bool]:
        """Keep first ops of groups waiting for a moment; yields False if one is under way."""

    def note_exit_status(self, path: Path, fields: str) -> None:
        """Have the exit status appended to a file if this process ends with another one than 0.

        Args:
            path: The file, to which a line is appended, in a folder that may not exist yet.
            fields: The other fields of the line, as JSON without the braces.
        """

    def mark(self, marks: Marks | None) -> None:
        """Call a tool at the issue of each op from now on; None ends that."""

    def learn_spans(self, marks: Marks) -> None:
        """Ask again which members of which groups are on other hosts."""


# The dtypes of the installed torch, and the codes that records use.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}


def skipped_folders() -> list[str]:
    """Return the path prefixes of frames that are never the user's: torch's and rankcall's."""
    package = Path(__file__).parents[1]
    hook = package.with_name("_rankcall_hook.py")  # beside the package: see there
    return [f"{Path(torch.__file__).parent}/", f"{package}/", str(hook)]


def installed_folders() -> list[str]:
    """Return the path prefixes of installed code: Python's own modules, packages and commands.

    A call site in one of them is a framework's; the user's own line is behind it.
    Folders named ``site-packages`` and ``dist-packages`` count wherever they are.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = {sysconfig.get_path(name) or "" for name in names}
    folders |= {str(Path(os.__file__).parent), site.getusersitepackages()}
    folders |= {os.path.realpath(folder) for folder in folders if folder}
    return sorted(f"{folder}/" for folder in folders if folder)


_installed_last: str | None = None


def must_install(capture: str) -> bool:
    """Tell whether a capture has to put its kernels in front of the ops, and note that it does.

    Kernels stay for the rest of the process. If the other capture was used last, its kernels hide
    those of this one, which are then installed once more. torch's dispatcher cannot do that safely
    while other threads issue ops, so a program should keep to one capture.
    """
    global _installed_last
    changed, _installed_last = _installed_last != capture, capture
    return changed
