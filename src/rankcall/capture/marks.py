"""Tell a tool of each op as it is issued, on the issuing thread: what NVTX marks are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rankcall.ring.tables import Group


class Span(Protocol):
    """Knows which ranks are on other hosts."""

    def crosses(self, ranks: tuple[int, ...]) -> bool: ...
    def is_elsewhere(self, rank: int) -> bool: ...


class Functions(NamedTuple):
    """Where the C functions are that a tool is told by.

    ``mark`` is ``void (const char *)``, ``begin`` is ``uint64_t (const char *)``, ``end`` is
    ``void (uint64_t)``. They are called without the GIL, on any thread.
    """

    mark: int
    begin: int
    end: int


@dataclass(frozen=True)
class Marks:
    """How and what a tool is told. ``span`` None means all ops, else only those between hosts."""

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
