"""Call a tool at the issue of each op, on the issuing thread: the source of NVTX marks.

``native/marks.h`` does it for the native capture, and ``FallbackMarks`` here for the fallback.
"""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rankcall.drop_in import description
from rankcall.record import (
    BATCH,
    DTYPES,
    FLAG_DEVICE,
    NO_RANK,
    OBJECT_CALLS,
    PICKLE_DTYPE,
    ROOT_DESCRIBES,
)
from rankcall.ring.tables import CallSite, Group


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


class FallbackMarks:
    """Calls the tool at the issue of each op, on the issuing thread.

    A mark is the description that ``trace.describer`` makes when the op ends, with null for what
    is not known yet. It has to be made here all the same: a profiler shows a mark at the moment
    and on the thread at which it was made.
    """

    def __init__(self, marks: Marks) -> None:
        self._only_across = marks.span is not None
        self._gpu_serial, self._vm_id = marks.gpu_serial, marks.vm_id
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
            return  # the lengths of the pickles, which the caller did not send
        if fields["op"] in ROOT_DESCRIBES and fields["root"] != me:
            return
        if self._only_across and not self._crosses(fields, group):
            return
        name = api if is_object else name
        sizes: list[int] = fields["sizes"]
        for size in sizes:
            together = api == BATCH or len(sizes) > 1
            self._mark(self._text(name, size, together, fields, site, group, me).encode())
        # The end of an op on a device is noticed up to two seconds late. A range that ends then
        # would show a time that the op did not take.
        if fields["flags"] & FLAG_DEVICE:
            return
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
        facts = {
            "op": name,
            "rank": group.ranks[me] if group.ranks else NO_RANK,
            "call_site": str(site or "unknown"),
            "message_bytes": size,
            "device_index": fields["device"],
            "enqueued_epoch_ns": time.time_ns(),
            "gpu_serial": self._gpu_serial,
            "vm_id": self._vm_id,
            "group_ranks": list(group.ranks),
            "peer": _global_rank(group, fields["peer"]),
            "root": _global_rank(group, fields["root"]),
            "correlation": fields["correlation"] if together else None,
            "seq": fields["seq"],
            "group": group.label,
            "dtype": DTYPES[fields["dtype"]],
            "duration_ms": None,  # known when the op ends
            "algbw_gbps": None,
            "busbw_gbps": None,
            "step": fields["step"],
            "end_unknown": None,  # of a mark, it says nothing
        }
        return json.dumps(description(facts))


def _global_rank(group: Group, local: int) -> int | None:
    return group.ranks[local] if 0 <= local < len(group.ranks) else None
