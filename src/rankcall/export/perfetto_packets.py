"""The packets of a Perfetto trace: their wire format, and what events refer to.

Events refer to tracks (hosts, ranks, groups) and strings. A packet may refer only to what an
earlier packet has described. So both kinds have ``news``, which returns the descriptions that
were not written yet.

The wire format is protobuf's, for one message and for a whole column of messages at once. A
varint may be longer than necessary, because its top bit only says that another byte follows. So
all messages of one layout can have the same length, and become the rows of a matrix. Source:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.ranks import format_ranks
from rankcall.ring.layout import Header
from rankcall.ring.tables import CallSite, Group
from rankcall.run.load import Run

Bytes = npt.NDArray[np.uint8]

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """Encode a non-negative number in as few bytes as possible."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(tag: int, value: int) -> bytes:
    """Encode a field with a number."""
    return varint(tag << 3 | _VARINT) + varint(value)


def message(tag: int, *parts: bytes) -> bytes:
    """Encode a field with a message that consists of encoded fields."""
    body = b"".join(parts)
    return varint(tag << 3 | _LENGTH) + varint(len(body)) + body


def text(tag: int, value: str) -> bytes:
    """Encode a field with a string; characters that UTF-8 cannot encode become question marks."""
    return message(tag, value.encode("utf-8", "replace"))


@dataclass
class Messages:
    """Messages of one layout, one per row. Each method adds a field to all of them."""

    count: int
    _parts: list[Bytes] = field(default_factory=list)
    width: int = 0

    def constant(self, raw: bytes) -> Messages:
        """Add the same bytes to each message."""
        return self._add(np.broadcast_to(np.frombuffer(raw, np.uint8), (self.count, len(raw))))

    def numbers(self, tag: int, values: npt.NDArray[Any]) -> Messages:
        """Add a number to each message; all have as many bytes as the largest needs."""
        values = values.astype(np.uint64)
        bits = int(values.max()).bit_length() if len(values) else 0
        width = max(1, -(-bits // 7))
        shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
        more = np.full(width, 0x80, np.uint8)
        more[-1] = 0
        self.constant(varint(tag << 3 | _VARINT))
        return self._add((values[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F) | more)

    def fixed64(self, tag: int, values: npt.NDArray[np.uint64]) -> Messages:
        """Add eight bytes to each message."""
        raw = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
        return self.constant(varint(tag << 3 | _FIXED64))._add(raw)

    def messages(self, tag: int, inner: Messages) -> Messages:
        """Add an inner message to each message."""
        self.constant(varint(tag << 3 | _LENGTH) + varint(inner.width))
        for part in inner._parts:
            self._add(part)
        return self

    def matrix(self) -> Bytes:
        """Return the bytes of all messages as ``[row, byte]``."""
        return np.concatenate(self._parts, axis=1)

    def _add(self, part: Bytes) -> Messages:
        self._parts.append(part)
        self.width += part.shape[1]
        return self


Ints = npt.NDArray[np.int64]

# Fields of perfetto.protos.TracePacket, TrackDescriptor and ProcessDescriptor.
_PACKET, _TRACK_DESCRIPTOR = 1, 60
_UUID, _TRACK_NAME, _PROCESS, _PARENT, _ORDERING, _ORDER = 1, 2, 3, 5, 11, 12
_PID, _PROCESS_NAME = 1, 6
# Fields of perfetto.protos.InternedData.
_CATEGORIES, _EVENTS, _ANNOTATIONS, _SITES, _STRINGS = 1, 2, 3, 4, 29

_EXPLICIT = 3  # Perfetto sorts the children by their _ORDER
_MOST_RANKS = 40  # characters; a longer list of ranks is shown as a count


class Tracks:
    """Assigns track numbers. ``news`` returns the packets that must come before their first use."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hosts: dict[str, int] = {}
        self._ranks: dict[tuple[str, int, int, int], int] = {}
        self._lanes: dict[tuple[int, Group, int], int] = {}
        self._count = 0
        self._fresh: list[bytes] = []
        rings = [(head.header.rank, head.header.attempt) for head in run.heads]
        self._attempts = len({attempt for _, attempt in rings}) > 1
        self._again = len(set(rings)) < len(rings)

    def hosts(self) -> bytes:
        """Return the packets that describe the hosts, in the order of their first rank."""
        for head in sorted(self._run.heads, key=lambda head: head.header.rank):
            self._host(head.header.host)
        return self.news()

    def news(self) -> bytes:
        """Return the packets that describe the tracks assigned since the last call."""
        packets = b"".join(self._fresh)
        self._fresh.clear()
        return packets

    def of_ops(self, header: Header, group: Group, number_: int) -> int:
        """Return a track of a rank's ops in a group.

        Args:
            header: The header of the rank's ring.
            group: The group.
            number_: 0 for the first track; higher numbers hold ops that overlap with those.
        """
        rank = self._rank(header)
        key = rank, group, number_
        if key not in self._lanes:
            self._lanes[key] = self._describe(
                text(_TRACK_NAME, self._group_name(group)), number(_PARENT, rank)
            )
        return self._lanes[key]

    def _group_name(self, group: Group) -> str:
        known = self._run.run_groups.get(group)
        ranks = format_ranks(group.ranks)
        if len(ranks) > _MOST_RANKS:
            ranks = f"{len(group.ranks):,} ranks"
        return f"{known.label if known else group.label} ({ranks})"

    def _host(self, host: str) -> int:
        if host not in self._hosts:
            name = text(_PROCESS_NAME, f"host {host}")
            self._hosts[host] = self._describe(
                message(_PROCESS, number(_PID, len(self._hosts) + 1), name),
                number(_ORDERING, _EXPLICIT),
            )
        return self._hosts[host]

    def _rank(self, header: Header) -> int:
        key = header.host, header.rank, header.attempt, header.pid
        if key not in self._ranks:
            name = f"rank {header.rank}"
            name += f", attempt {header.attempt}" if self._attempts else ""
            name += f", pid {header.pid}" if self._again else ""
            self._ranks[key] = self._describe(
                text(_TRACK_NAME, name),
                number(_PARENT, self._host(header.host)),
                number(_ORDER, max(0, header.rank)),
            )
        return self._ranks[key]

    def _describe(self, *fields: bytes) -> int:
        self._count += 1
        track = message(_TRACK_DESCRIPTOR, number(_UUID, self._count), *fields)
        self._fresh.append(message(_PACKET, track))
        return self._count


def track_numbers(start: Ints, end: Ints) -> npt.NDArray[np.intp]:
    """Number intervals so that no two with the same number overlap or touch.

    The intervals are sorted by ``start``. Slices on one track must nest. Perfetto would nest two
    slices that touch if the second began, by its order in the file, before the first ended.
    """
    result = np.zeros(len(start), np.intp)
    if np.all(start[1:] > np.maximum.accumulate(end)[:-1]):
        return result
    busy: list[tuple[int, int]] = []  # a heap of (end of the last interval, number)
    for row, (begins, ends) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        if busy and busy[0][0] < begins:
            result[row] = busy[0][1]
            heapreplace(busy, (ends, busy[0][1]))
        else:
            result[row] = len(busy)
            heappush(busy, (ends, len(busy)))
    return result


# --- strings: a trace contains each once, and refers to it by number ---


@dataclass
class NameTable:
    """The interned strings of one kind. ``entry`` encodes the part of an entry after its number."""

    tag: int
    entry: Callable[[str], bytes]
    numbers: dict[str, int] = field(default_factory=dict)
    fresh: list[bytes] = field(default_factory=list)

    def __getitem__(self, name: str) -> int:
        """Return the number of a name; ``Interned.news`` returns the entries of new names."""
        known = self.numbers.get(name)
        if known is None:
            known = self.numbers[name] = len(self.numbers) + 1
            self.fresh.append(message(self.tag, number(1, known), self.entry(name)))
        return known


class Interned:
    """All names of a trace."""

    def __init__(self) -> None:
        self._sites: dict[str, CallSite] = {}
        self.categories = NameTable(_CATEGORIES, lambda name: text(2, name))
        self.events = NameTable(_EVENTS, lambda name: text(2, name))
        self.annotations = NameTable(_ANNOTATIONS, lambda name: text(2, name))
        self.strings = NameTable(_STRINGS, lambda name: text(2, name))
        self._site_numbers = NameTable(_SITES, self._site)

    def site(self, site: CallSite) -> int:
        """Return the number of a call site."""
        key = f"{site}\0{site.function}"
        self._sites[key] = site
        return self._site_numbers[key]

    def _site(self, key: str) -> bytes:
        site = self._sites[key]
        return text(2, site.file) + text(3, site.function) + number(4, site.line)

    def news(self) -> bytes:
        """Return the entries added since the last call, as fields of InternedData."""
        out = []
        kinds = (self.categories, self.events, self.annotations, self.strings)
        for table in (*kinds, self._site_numbers):
            out += table.fresh
            table.fresh.clear()
        return b"".join(out)
