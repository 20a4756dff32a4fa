"""One Perfetto timeline of all ranks.

Each host is a process, with one track for each rank, and below it one track for each group of the
rank. If ops of a group overlap, the group has more tracks of the same name, and Perfetto shows them
as one. A slice shows an op from its start to its end, with its source line; an op that has not
ended has no end. Arrows connect the members of one collective in the order of arrival, and a send
with its receive. Times are in ns since the epoch, and all hosts are on one clock.

The file is a ``perfetto.protos.Trace``. Ops are encoded one ring at a time, column by column.
Source of the format: https://perfetto.dev/docs/reference/trace-packet-proto
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO

from rankcall.analysis.timing.run_tables import align, sessions_of
from rankcall.export._events import Events
from rankcall.export._intern import Interned
from rankcall.export._tracks import Tracks
from rankcall.export._wire import message, number
from rankcall.run import Progress, Run

# Fields of perfetto.protos.TracePacket.
_PACKET = 1  # of Trace
_CLOCK_SNAPSHOT, _SEQUENCE, _INTERNED, _FLAGS, _COMPRESSED = 6, 10, 12, 13, 50
_CLEARED, _NEEDED = 1, 2
_REALTIME, _BOOTTIME = 1, 6

_CHUNK = 1 << 15  # records encoded at once; they take about 5 MiB


def write_perfetto(run: Run, out: IO[bytes], progress: Progress | None = None) -> None:
    """Write a trace that ui.perfetto.dev and its trace processor open."""
    clocks, sessions = align(run), sessions_of(run)
    tracks, names = Tracks(run), Interned()
    out.write(_packed(_start() + tracks.hosts()))
    for ring in run.iter_rings(progress):
        events = Events(ring, sessions[ring.path.name], clocks, tracks, names)
        for rows in _chunks(len(ring.records)):
            encoded = events.encode(rows)
            # A packet may refer only to tracks and strings that come before it.
            out.write(_packed(tracks.news() + _news(names) + encoded))


def _chunks(count: int) -> Iterator[slice]:
    yield from (slice(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))


def _packed(packets: bytes) -> bytes:
    """Return packets as one compressed packet."""
    return message(_PACKET, message(_COMPRESSED, zlib.compress(packets, 1)))


def _start() -> bytes:
    """Return the packets that begin the sequence; its times count from the epoch."""
    flags = number(_SEQUENCE, 1) + number(_FLAGS, _CLEARED)
    clocks = [message(1, number(1, clock), number(2, 1)) for clock in (_BOOTTIME, _REALTIME)]
    return message(_PACKET, flags) + message(
        _PACKET, number(_SEQUENCE, 1), message(_CLOCK_SNAPSHOT, *clocks)
    )


def _news(names: Interned) -> bytes:
    fresh = names.news()
    if not fresh:
        return b""
    return message(
        _PACKET, number(_SEQUENCE, 1), number(_FLAGS, _NEEDED), message(_INTERNED, fresh)
    )
