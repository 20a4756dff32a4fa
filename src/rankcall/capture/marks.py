"""What a tool wants that is called at the issue of each op, on the issuing thread.

The source of NVTX marks. ``native/marks.h`` calls it; the capture in Python does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rankcall.ring.tables import Group


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


def span_of(marks: Marks, group: Group) -> tuple[bool, bytes]:
    """Return whether a group crosses hosts, and of each member whether it is elsewhere."""
    if marks.span is None:
        return True, b"\x01" * len(group.ranks)
    elsewhere = bytes(marks.span.is_elsewhere(rank) for rank in group.ranks)
    return marks.span.crosses(group.ranks), elsewhere
