"""The tracks of a Perfetto trace: one for each host, rank and group, and more if ops overlap.

A packet may refer only to tracks that an earlier packet has described. ``Tracks.news`` returns the
descriptions that were not written yet.
"""

from __future__ import annotations

from heapq import heappush, heapreplace

import numpy as np
import numpy.typing as npt

from rankcall.export.protobuf import message, number, text
from rankcall.ranks import format_ranks
from rankcall.ring.layout import Header
from rankcall.ring.tables import Group
from rankcall.run.load import Run

Ints = npt.NDArray[np.int64]

# Fields of perfetto.protos.Trace, TracePacket, TrackDescriptor and ProcessDescriptor.
PACKET, _TRACK_DESCRIPTOR = 1, 60
_UUID, _TRACK_NAME, _PROCESS, _PARENT, _ORDERING, _ORDER = 1, 2, 3, 5, 11, 12
_PID, _PROCESS_NAME = 1, 6

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
        self._fresh.append(message(PACKET, track))
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
