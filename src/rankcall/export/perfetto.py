"""One Perfetto timeline of all ranks.

Each host is a process, with one track for each rank, and below it one track for each group of the
rank. If ops of a group overlap, the group has more tracks of the same name, and Perfetto shows them
as one. A slice shows an op from its start to its end, with its source line. An op in flight has no
end; if the end cannot be known, the slice has no length. Both have the detail ``end_unknown``.
Arrows connect the members of one collective in the order of arrival, and a send with its receive.
Times are in ns since the epoch, and all hosts are on one clock.

The file is a ``perfetto.protos.Trace``. Ops are encoded one ring at a time, column by column.
Source of the format: https://perfetto.dev/docs/reference/trace-packet-proto
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import RunClocks, align
from rankcall.analysis.collectives import Session, sessions_of
from rankcall.export.perfetto_names import Interned
from rankcall.export.perfetto_tracks import PACKET, Tracks, track_numbers
from rankcall.export.protobuf import Messages, message, number
from rankcall.record import DTYPES, FLAG_ABANDONED, KINDS, OPS, REDUCE_OPS, STATUSES, has_duration
from rankcall.ring.reader import Records, Ring
from rankcall.ring.tables import UNKNOWN_GROUP, Group
from rankcall.run.load import Progress, Run

Ints = npt.NDArray[np.int64]

Hashes = npt.NDArray[np.uint64]

# Fields of perfetto.protos.Trace, TracePacket, TrackEvent and DebugAnnotation.
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _EVENT = 6, 8, 10, 11
_INTERNED, _FLAGS, _COMPRESSED = 12, 13, 50
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _SITE, _FLOW = 3, 4, 9, 10, 11, 34, 47
_ANNOTATION_NAME, _BOOL, _UINT, _STRING = 1, 2, 3, 17
# Their values.
_CLEARED, _NEEDED = 1, 2
_REALTIME, _BOOTTIME = 1, 6
_BEGIN, _END = 1, 2
_HEAD = number(_SEQUENCE, 1) + number(_FLAGS, _NEEDED)

_CHUNK = 1 << 15  # records encoded at once; they take about 5 MiB
_NEVER = np.iinfo(np.int64).max
_P2P, _SEND, _FAILED = KINDS.index("p2p"), OPS.index("send"), STATUSES.index("failed")
_PLAIN = ("seq", "step", "message_bytes")


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
    return message(PACKET, message(_COMPRESSED, zlib.compress(packets, 1)))


def _start() -> bytes:
    """Return the packets that begin the sequence; its times count from the epoch."""
    flags = number(_SEQUENCE, 1) + number(_FLAGS, _CLEARED)
    clocks = [message(1, number(1, clock), number(2, 1)) for clock in (_BOOTTIME, _REALTIME)]
    return message(PACKET, flags) + message(
        PACKET, number(_SEQUENCE, 1), message(_CLOCK_SNAPSHOT, *clocks)
    )


def _news(names: Interned) -> bytes:
    fresh = names.news()
    if not fresh:
        return b""
    return message(PACKET, number(_SEQUENCE, 1), number(_FLAGS, _NEEDED), message(_INTERNED, fresh))


class Events:
    """The slices of one ring. The constructor computes times and tracks, ``encode`` the packets."""

    def __init__(
        self, ring: Ring, session: Session, clocks: RunClocks, tracks: Tracks, names: Interned
    ) -> None:
        self._ring, self._names = ring, names
        records = ring.records
        started, ended = records["started_ns"], records["completed_ns"]
        began = np.where(started == 0, records["enqueued_ns"], started)
        self._begin = clocks.epoch_ns(ring.header, began)
        # Without device times, only the time of issue is known for an op on a device. Its slice
        # has no length.
        timed = has_duration(records["flags"], records["device_ms"])
        ended_at = np.where(timed, clocks.epoch_ns(ring.header, ended), self._begin)
        in_flight = (ended == 0) & (records["flags"] & FLAG_ABANDONED == 0)
        ended_at = np.where(ended == 0, self._begin, ended_at)
        self._end = np.where(in_flight, _NEVER, np.maximum(ended_at, self._begin))
        self._track, self._flow = np.zeros(len(records), np.int64), np.zeros(len(records), "<u8")
        for key in np.unique(records["group"]):
            rows = np.flatnonzero(records["group"] == key)
            group = ring.tables.groups.get(int(key), UNKNOWN_GROUP)
            self._track[rows] = self._tracks(group, rows, tracks)
            self._flow[rows] = _flows(records[rows], group, ring.header.rank, session)

    def _tracks(self, group: Group, rows: npt.NDArray[np.intp], tracks: Tracks) -> Ints:
        """Return the track of each of a group's ops."""
        order = rows[np.argsort(self._begin[rows], kind="stable")]
        track = np.empty(len(rows), np.intp)
        track[np.searchsorted(rows, order)] = track_numbers(self._begin[order], self._end[order])
        header = self._ring.header
        numbers = [tracks.of_ops(header, group, at) for at in range(int(track.max()) + 1)]
        return np.array(numbers, np.int64)[track]

    def encode(self, rows: slice) -> bytes:
        """Return the packets of some records, encoding all with the same fields at once."""
        records = self._ring.records[rows]
        present = _optional(records, self._ring)
        keys = sum(mask.astype(np.int64) << bit for bit, mask in enumerate(present.values()))
        encoded = []
        for key in np.unique(keys):
            alike = np.flatnonzero(keys == key)
            fields = [name for bit, name in enumerate(present) if int(key) >> bit & 1]
            encoded.append(self._encode(records[alike], alike + rows.start, fields))
        return b"".join(encoded)

    def _encode(self, records: Records, at: npt.NDArray[np.intp], fields: list[str]) -> bytes:
        both = _packet(self._begin[at], self._slice(records, at, fields))
        if "end" in fields:
            event = Messages(len(at)).constant(number(_TYPE, _END)).numbers(_TRACK, self._track[at])
            end = _packet(self._end[at], event)
            return np.concatenate([both.matrix(), end.matrix()], axis=1).tobytes()
        return both.matrix().tobytes()

    def _slice(self, records: Records, at: npt.NDArray[np.intp], fields: list[str]) -> Messages:
        """Return the TrackEvents that begin slices."""
        names, tables = self._names, self._ring.tables
        event = Messages(len(at)).constant(number(_TYPE, _BEGIN)).numbers(_TRACK, self._track[at])
        event.numbers(_NAME, _codes(records["op"], lambda code: names.events[OPS[code]]))
        event.numbers(
            _CATEGORY, _codes(records["kind"], lambda code: names.categories[KINDS[code]])
        )
        event.fixed64(_FLOW, self._flow[at])
        if "site" in fields:
            sites = _codes(records["call_site"], lambda key: names.site(tables.sites[key]))
            event.numbers(_SITE, sites)
        for name, value_field, values in self._annotations(records, fields):
            inner = Messages(len(at)).constant(number(_ANNOTATION_NAME, names.annotations[name]))
            event.messages(_ANNOTATION, inner.numbers(value_field, values))
        return event

    def _annotations(
        self, records: Records, fields: list[str]
    ) -> Iterator[tuple[str, int, npt.NDArray[np.uint64]]]:
        """Yield the details of a slice: name, field of DebugAnnotation, values.

        Perfetto shows them when the user clicks on the slice.
        """
        strings, tables = self._names.strings, self._ring.tables
        for name in _PLAIN:
            yield name, _UINT, records[name].astype(np.uint64)
        yield "dtype", _STRING, _codes(records["dtype"], lambda code: strings[DTYPES[code]])
        yield "status", _STRING, _codes(records["status"], lambda code: strings[STATUSES[code]])
        if "end_unknown" in fields:
            yield "end_unknown", _BOOL, np.ones(len(records), np.uint64)
        if "reduce_op" in fields:
            codes = _codes(records["reduce_op"], lambda code: strings[REDUCE_OPS[code]])
            yield "reduce_op", _STRING, codes
        for name in ("root", "peer"):
            if name in fields:
                yield name, _UINT, _global(records, name, tables.groups)
        if "user_line" in fields:
            codes = _codes(records["call_site"], lambda key: strings[tables.sites[key].user_line])
            yield "user_line", _STRING, codes
        if "error" in fields:
            yield (
                "error",
                _STRING,
                _codes(records["error"], lambda key: strings[tables.strings[key]]),
            )


def _optional(records: Records, ring: Ring) -> dict[str, npt.NDArray[np.bool_]]:
    """Return for each optional field a mask of the records that have it."""
    tables = ring.tables
    sizes = {key: len(group.ranks) for key, group in tables.groups.items()}
    size = _codes(records["group"], lambda key: sizes.get(key, 0)).astype(np.int64)
    return {
        "end": (records["completed_ns"] != 0) | (records["flags"] & FLAG_ABANDONED != 0),
        "end_unknown": records["completed_ns"] == 0,
        "site": np.isin(records["call_site"], list(tables.sites)),
        "user_line": np.isin(
            records["call_site"], [key for key, site in tables.sites.items() if site.user]
        ),
        "reduce_op": records["reduce_op"] != 0,
        "root": (records["root"] >= 0) & (records["root"] < size),
        "peer": (records["peer"] >= 0) & (records["peer"] < size),
        "error": np.isin(records["error"], list(tables.strings)) & (records["error"] != 0),
    }


def _packet(times: Ints, event: Messages) -> Messages:
    """Return TracePackets with one TrackEvent each, as entries of a Trace."""
    inner = Messages(len(times)).numbers(_TIMESTAMP, times).constant(_HEAD).messages(_EVENT, event)
    return Messages(len(times)).messages(PACKET, inner)


def _codes(column: npt.NDArray[np.generic], number_of: Callable[[int], int]) -> Hashes:
    """Replace each value by its number, calling ``number_of`` once per distinct value."""
    values, which = np.unique(column, return_inverse=True)
    return np.array([number_of(int(value)) for value in values], np.uint64)[which]


def _global(records: Records, name: str, groups: dict[int, Group]) -> Hashes:
    """Translate ranks within their groups to global ranks."""
    result = np.zeros(len(records), np.uint64)
    for key in np.unique(records["group"]):
        rows = records["group"] == key
        result[rows] = np.array(groups[int(key)].ranks, np.uint64)[records[name][rows]]
    return result


def _flows(records: Records, group: Group, rank: int, session: Session) -> Hashes:
    """Return the flow id that the members of a collective, or both ends of a message, share."""
    identity = (session, group.name, group.epoch, group.ranks)
    seed = hashlib.blake2b(repr(identity).encode("utf-8", "replace"), digest_size=8).digest()
    p2p = records["kind"] == _P2P
    key = _mixed(records["seq"] ^ np.uint64(int.from_bytes(seed, "little")))
    if p2p.any():
        own = group.ranks.index(rank) if rank in group.ranks else -1
        sends = records["op"] == _SEND
        peer = records["peer"].astype(np.int64)
        for column in (np.where(sends, own, peer), np.where(sends, peer, own), records["tag"]):
            both = _mixed(key ^ _mixed(column.astype(np.uint64) + np.uint64(1)))
            key = np.where(p2p, both, key)
    # A receive from any source has no sequence number before it ends. It gets an id of its own.
    alone = records["seq"] == 0
    own_key = _mixed(records["commit"] ^ np.uint64(rank & 0xFFFFFFFF) << np.uint64(32))
    flows: Hashes = np.where(alone, own_key, key) | np.uint64(1)
    return flows


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of each value: splitmix64's last step, see prng.di.unimi.it/splitmix64.c."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    spread: Hashes = values ^ (values >> np.uint64(31))
    return spread
