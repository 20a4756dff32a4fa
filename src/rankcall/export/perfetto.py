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

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import RunClocks, Session, align, sessions_of
from rankcall.record import DTYPES, KINDS, OPS, REDUCE_OPS, STATUSES, format_ranks, has_duration
from rankcall.ring import CallSite, Group, Header
from rankcall.ring.reader import Records, Ring
from rankcall.run.load import Progress, Run

# The packets of a Perfetto trace: their wire format, and what events refer to.
#
# Events refer to tracks (hosts, ranks, groups) and strings. A packet may refer only to what an
# earlier packet has described. So both kinds have ``news``, which returns the descriptions that
# were not written yet.
#
# The wire format is protobuf's, for one message and for a whole column of messages at once. A
# varint may be longer than necessary, because its top bit only says that another byte follows. So
# all messages of one layout can have the same length, and become the rows of a matrix. Source:
# https://protobuf.dev/programming-guides/encoding/


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
class Rows:
    """Messages of one layout, one per row. Each method adds a field to all of them."""

    count: int
    _parts: list[Bytes] = field(default_factory=list)
    width: int = 0

    def constant(self, raw: bytes) -> Rows:
        """Add the same bytes to each message."""
        return self._add(np.broadcast_to(np.frombuffer(raw, np.uint8), (self.count, len(raw))))

    def numbers(self, tag: int, values: npt.NDArray[Any]) -> Rows:
        """Add a number to each message; all have as many bytes as the largest needs."""
        values = values.astype(np.uint64)
        bits = int(values.max()).bit_length() if len(values) else 0
        width = max(1, -(-bits // 7))
        shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
        more = np.full(width, 0x80, np.uint8)
        more[-1] = 0
        self.constant(varint(tag << 3 | _VARINT))
        return self._add((values[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F) | more)

    def fixed64(self, tag: int, values: npt.NDArray[np.uint64]) -> Rows:
        """Add eight bytes to each message."""
        raw = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
        return self.constant(varint(tag << 3 | _FIXED64))._add(raw)

    def messages(self, tag: int, inner: Rows) -> Rows:
        """Add an inner message to each message."""
        self.constant(varint(tag << 3 | _LENGTH) + varint(inner.width))
        for part in inner._parts:
            self._add(part)
        return self

    def matrix(self) -> Bytes:
        """Return the bytes of all messages as ``[row, byte]``."""
        return np.concatenate(self._parts, axis=1)

    def _add(self, part: Bytes) -> Rows:
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


Hashes = npt.NDArray[np.uint64]

# Fields of perfetto.protos.Trace, TracePacket, TrackEvent and DebugAnnotation.
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _EVENT = 6, 8, 10, 11
_INTERNED, _FLAGS, _COMPRESSED = 12, 13, 50
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _SITE, _FLOW = 3, 4, 9, 10, 11, 34, 47
_ANNOTATION_NAME, _UINT, _STRING = 1, 3, 17
# Their values.
_CLEARED, _NEEDED = 1, 2
_REALTIME, _BOOTTIME = 1, 6
_BEGIN, _END = 1, 2
_HEAD = number(_SEQUENCE, 1) + number(_FLAGS, _NEEDED)

_CHUNK = 1 << 15  # records encoded at once; they take about 5 MiB
_NEVER = np.iinfo(np.int64).max
_P2P, _SEND, _FAILED = KINDS.index("p2p"), OPS.index("send"), STATUSES.index("failed")
_UNKNOWN_GROUP = Group("unknown", 0, "", "", ())
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


# --- the ops of a ring as slices ---


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
        self._end = np.where(ended == 0, _NEVER, np.maximum(ended_at, self._begin))
        self._track, self._flow = np.zeros(len(records), np.int64), np.zeros(len(records), "<u8")
        for key in np.unique(records["group"]):
            rows = np.flatnonzero(records["group"] == key)
            group = ring.tables.groups.get(int(key), _UNKNOWN_GROUP)
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
            event = Rows(len(at)).constant(number(_TYPE, _END)).numbers(_TRACK, self._track[at])
            end = _packet(self._end[at], event)
            return np.concatenate([both.matrix(), end.matrix()], axis=1).tobytes()
        return both.matrix().tobytes()

    def _slice(self, records: Records, at: npt.NDArray[np.intp], fields: list[str]) -> Rows:
        """Return the TrackEvents that begin slices."""
        names, tables = self._names, self._ring.tables
        event = Rows(len(at)).constant(number(_TYPE, _BEGIN)).numbers(_TRACK, self._track[at])
        event.numbers(_NAME, _codes(records["op"], lambda code: names.events[OPS[code]]))
        event.numbers(
            _CATEGORY, _codes(records["kind"], lambda code: names.categories[KINDS[code]])
        )
        event.fixed64(_FLOW, self._flow[at])
        if "site" in fields:
            sites = _codes(records["call_site"], lambda key: names.site(tables.sites[key]))
            event.numbers(_SITE, sites)
        for name, value_field, values in self._annotations(records, fields):
            inner = Rows(len(at)).constant(number(_ANNOTATION_NAME, names.annotations[name]))
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
        "end": records["completed_ns"] != 0,
        "site": np.isin(records["call_site"], list(tables.sites)),
        "user_line": np.isin(
            records["call_site"], [key for key, site in tables.sites.items() if site.user]
        ),
        "reduce_op": records["reduce_op"] != 0,
        "root": (records["root"] >= 0) & (records["root"] < size),
        "peer": (records["peer"] >= 0) & (records["peer"] < size),
        "error": np.isin(records["error"], list(tables.strings)) & (records["error"] != 0),
    }


def _packet(times: Ints, event: Rows) -> Rows:
    """Return TracePackets with one TrackEvent each, as entries of a Trace."""
    inner = Rows(len(times)).numbers(_TIMESTAMP, times).constant(_HEAD).messages(_EVENT, event)
    return Rows(len(times)).messages(_PACKET, inner)


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
