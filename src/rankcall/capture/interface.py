"""What the captures in C++ and in Python share: their interface, and marks for tools."""

from __future__ import annotations

import ctypes
import json
import os
import site
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from rankcall.capture.device_status import DeviceOp
from rankcall.record import BATCH, DTYPES, OBJECT_CALLS, PICKLE_DTYPE, ROOT_DESCRIBES
from rankcall.ring import CallSite, Group


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

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records of ops on devices: completed at ``time_ns``, or abandoned if that is 0."""

    def reading_status(self) -> AbstractContextManager[bool]:
        """Keep first ops of groups waiting for a moment; yields False if one is under way."""

    def note_exit_status(self, path: Path, fields: str) -> None:
        """Have the status in a file if this process ends with another one than 0.

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


# Call a tool at the issue of each op, on the issuing thread: the source of NVTX marks.
#
# ``native/marks.h`` does it for the native capture, and ``FallbackMarks`` here for the fallback.


class Span(Protocol):
    """Knows which ranks are on other hosts."""

    def crosses(self, ranks: tuple[int, ...]) -> bool: ...
    def is_elsewhere(self, rank: int) -> bool: ...


class Functions(NamedTuple):
    """The addresses of the C functions of a tool.

    ``mark`` is ``void (const char *)``, ``begin`` is ``uint64_t (const char *)``, ``end`` is
    ``void (uint64_t)``. They are called without the GIL, on any thread.
    """

    mark: int
    begin: int
    end: int


@dataclass(frozen=True)
class Marks:
    """The settings of a tool. Without a ``span``, all ops are marked, else those between hosts."""

    functions: Functions
    gpu_serial: str
    vm_id: str
    span: Span | None

    def about(self) -> str:
        """Return the fields that are the same in every description, as JSON without braces."""
        return json.dumps({"gpu_serial": self.gpu_serial, "vm_id": self.vm_id})[1:-1]


def span_of(marks: Marks, group: Group) -> tuple[bool, bytes]:
    """Return whether a group crosses hosts, and of each member whether it is elsewhere."""
    if marks.span is None:
        return True, b"\x01" * len(group.ranks)
    elsewhere = bytes(marks.span.is_elsewhere(rank) for rank in group.ranks)
    return marks.span.crosses(group.ranks), elsewhere


class FallbackMarks:
    """Calls the tool at the issue of each op, on the issuing thread."""

    def __init__(self, marks: Marks) -> None:
        self._only_across, self._about = marks.span is not None, marks.about()
        self._spans: dict[Group, tuple[bool, bytes]] = {}
        self._mark = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(marks.functions.mark)
        self._begin = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p)(marks.functions.begin)
        self._end = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(marks.functions.end)
        self._ranges: dict[int, int] = {}

    def learn(self, marks: Marks, group: Group) -> None:
        """Ask which members of a group are on other hosts; not to be done at each op."""
        self._spans[group] = span_of(marks, group)

    def issued(
        self,
        index: int,
        fields: dict[str, Any],
        name: str,
        site: CallSite | None,
        group: Group,
        me: int,
    ) -> None:
        """Mark an op. ``fields`` are those of its record, ``me`` this rank's place in the group."""
        api = site.api if site is not None else ""
        is_object = api in OBJECT_CALLS
        if is_object and fields["dtype"] != PICKLE_DTYPE:
            return
        if fields["op"] in ROOT_DESCRIBES and fields["root"] != me:
            return
        if self._only_across and not self._crosses(fields, group):
            return
        name = api if is_object else name
        sizes: list[int] = fields["sizes"]
        for size in sizes:
            together = api == BATCH or len(sizes) > 1
            self._mark(self._text(name, size, together, fields, site, group, me).encode())
        self._ranges[index] = self._begin(name.encode())

    def ended(self, index: int) -> None:
        """End the range of an op."""
        number = self._ranges.pop(index, None)
        if number is not None:
            self._end(number)

    def _crosses(self, fields: dict[str, Any], group: Group) -> bool:
        crosses, elsewhere = self._spans.get(group, (True, b""))
        peer = fields["peer"]
        return bool(elsewhere[peer]) if 0 <= peer < len(elsewhere) else crosses

    def _text(
        self,
        name: str,
        size: int,
        together: bool,
        fields: dict[str, Any],
        site: CallSite | None,
        group: Group,
        me: int,
    ) -> str:
        ranks = group.ranks
        known = {
            "peer_rank": ranks[fields["peer"]] if 0 <= fields["peer"] < len(ranks) else None,
            "root_rank": ranks[fields["root"]] if 0 <= fields["root"] < len(ranks) else None,
            "correlation_id": fields["correlation"] if together else None,
        }
        device = fields["device"]
        head = {
            "name": name,
            "rank": ranks[me] if ranks else -1,
            "source_line": str(site or "unknown"),
            "message_size": size,
            "device": "cpu" if device < 0 else device,
            "timestamp": int(time.time()),
        }
        tail = {
            "group_ranks": list(ranks),
            **{field: value for field, value in known.items() if value is not None},
            "seq": fields["seq"],
            "group": group.label,
            "dtype": DTYPES[fields["dtype"]],
            "duration_ms": None,
            "algbw_gbps": None,
            "busbw_gbps": None,
            "step": fields["step"],
        }
        return f"{json.dumps(head)[:-1]}, {self._about}, {json.dumps(tail)[1:]}"
