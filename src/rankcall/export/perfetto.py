"""One Perfetto timeline of all ranks.

A process for each host, in it a track for each rank, below that one for each of its groups;
where ops of a group overlap, further tracks of the same name, which Perfetto shows as one. A slice
is an op in flight, with its source line; an op that has not ended has no end. Arrows join the
members of one collective in the order they came, and a send to its receive. Times are epoch ns,
all hosts on one clock.

The file is a ``perfetto.protos.Trace``. Ops are encoded a ring at a time, column by column.
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

_CHUNK = 1 << 15  # records encoded at once: some 5 MiB


def write_perfetto(run: Run, out: IO[bytes], progress: Progress | None = None) -> None:
    """Write a trace that ui.perfetto.dev and its trace processor open."""
    clocks, sessions = align(run), sessions_of(run)
    tracks, names = Tracks(run), Interned()
    out.write(_packed(_start() + tracks.hosts()))
    for ring in run.iter_rings(progress):
        events = Events(ring, sessions[ring.path.name], clocks, tracks, names)
        for rows in _chunks(len(ring.records)):
            encoded = events.encode(rows)
            # Packets refer only to what stands before them.
            out.write(_packed(tracks.news() + _news(names) + encoded))


def _chunks(count: int) -> Iterator[slice]:
    yield from (slice(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))


def _packed(packets: bytes) -> bytes:
    """Return packets as one compressed packet."""
    return message(_PACKET, message(_COMPRESSED, zlib.compress(packets, 1)))


def _start() -> bytes:
    """Return the packets that begin the sequence and say that its clock shows the epoch."""
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
