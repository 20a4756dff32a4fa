"""What a snapshot keeps of each ring: a window of its calls, as rows of one table for all ranks.

A ring can hold a million records, and a job has thousands of rings. A verdict needs the newest
calls of each rank, the newest of each group and channel, and all calls that have not ended or have
failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import (
    BLOCKS,
    CALL,
    COMPLETED,
    OUTSIDE,
    P2P,
    PEER_CLOSED,
    START_SEEN,
    Calls,
    no_calls,
)
from rankcall.record import FLAG_DEVICE
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite, Group

Ints = npt.NDArray[np.int64]

# Calls kept of a rank: the fewest, and the most of a job that goes on and of one that is over.
_SIZE, _MOST_AFTERWARDS = (64, 1024), 1 << 14
_ALL_SIZES = 1 << 20  # of all ranks
_PER_GROUP = 16  # calls kept of each group, however long ago
_NEVER = 1 << 62  # ns
LARGEST = 1 << 62  # a larger count, size or time is damage: with it, int64 sums would overflow
_AS_RECORDED = (
    *("kind", "op", "dtype", "reduce_op", "status", "flags"),
    *("shape_hash", "tag", "thread"),
)
# How Gloo and sockets say that the process at the other end is gone.
_CLOSED = re.compile(r"closed by peer|reset by peer|Broken pipe")


def window_size(ranks: int, *, over: bool = False) -> int:
    """Return how many calls to keep of each of so many ranks.

    Of a job that is over, as many as a ring usually holds: a diagnosis then rests on the same calls
    as a report does.
    """
    most = _MOST_AFTERWARDS if over else _SIZE[1]
    return min(max(_ALL_SIZES // max(1, ranks), _SIZE[0]), most)


def known_since_s(calls: Calls) -> float:
    """Return the age up to which all calls of all ranks are on record; infinity if all ever are.

    A window holds equally many calls of each rank, and some older ones. A rank that issues twice as
    many calls as another one is known for half as long, and figures over all calls would compare
    the newest time of one rank with more of the other.
    """
    if not len(calls):
        return np.inf
    order = np.lexsort((calls["index"], calls["rank"]))
    rank, index, age = (calls[name][order] for name in ("rank", "index", "age_s"))
    follows = (rank[1:] == rank[:-1]) & (index[1:] == index[:-1] + 1)
    begins = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    is_last_of_rank = np.append(rank[begins[1:]] != rank[begins[:-1]], True)
    begins = begins[is_last_of_rank]
    return float(age[begins[index[begins] > 0]].min(initial=np.inf))


class Window(NamedTuple):
    """The kept calls of one ring, with their times in ns of its host's clock."""

    calls: Calls
    issued: Ints
    ended: Ints
    first_ns: int  # when the oldest of the calls was issued
    last_ns: int  # when the newest call of the ring was issued, or a call ended


# Of a ring without a record. A job that hangs at its start has one for each rank, and the forty
# steps that make a window take as long for no record as for a hundred.
_NOTHING = Window(no_calls(), np.zeros(0, np.int64), np.zeros(0, np.int64), _NEVER, 0)


@dataclass(frozen=True)
class _Known:
    """A group with its index, and its members as a set and by group rank."""

    group: Group
    number: int
    members: frozenset[int]
    ranks: npt.NDArray[np.int32]


class Windows:
    """Makes windows of rings, with one numbering of groups and call sites for all of them.

    Args:
        remember: Whether to keep each window for the next look at the same run. That keeps the
            ring's records in memory, too, by which an unchanged ring is recognised.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self.groups: dict[Group, int] = {}
        self.sites: dict[CallSite, int] = {CallSite("", 0, "", ""): 0}
        self._remember = remember
        self._rings: frozenset[str] = frozenset()
        self._windows: dict[str, tuple[object, object, int, Window]] = {}
        self._of_object: dict[int, _Known] = {}

    def begin(self, rings: set[str]) -> None:
        """Begin a look at rings with these names.

        If they are others than those of the look before, that one is forgotten: its groups and
        lines may not be in these rings.
        """
        self._of_object.clear()  # a ring that has changed has new objects for its old groups
        if rings != self._rings:
            self._rings = frozenset(rings)
            self._windows.clear()
            self.groups.clear()
            for site in list(self.sites)[1:]:
                del self.sites[site]

    def of(self, ring: Ring, size: int) -> Window:
        """Return the window of a ring: its newest ``size`` calls, and older ones that matter."""
        if not len(ring.records):
            return _NOTHING
        known = self._windows.get(ring.path.name)
        if known and known[0] is ring.records and known[1] is ring.tables and known[2] == size:
            return known[3]
        window = self._window_of(ring, ring.records[_kept(ring.records, size)])
        if self._remember:
            self._windows[ring.path.name] = ring.records, ring.tables, size, window
        return window

    def _window_of(self, ring: Ring, kept: Calls) -> Window:
        calls = np.zeros(len(kept), CALL)
        calls["rank"] = ring.header.rank
        calls["index"] = (kept["commit"] >> 2).astype(np.int64) - 1
        for name in _AS_RECORDED:
            calls[name] = kept[name]
        for name in ("seq", "step", "message_bytes", "in_bytes", "out_bytes"):
            calls[name] = np.minimum(kept[name], np.uint64(LARGEST))
        self._place(calls, kept, ring)
        for key in np.unique(kept["call_site"]):
            site = ring.tables.sites.get(int(key))
            if site is not None:
                number = self.sites.setdefault(site, len(self.sites))
                calls["site"][kept["call_site"] == key] = number
        for key in np.unique(kept["error"][kept["error"] != 0]):
            if _CLOSED.search(ring.tables.strings.get(int(key), "")):
                calls["flags"][kept["error"] == key] |= PEER_CLOSED
        on_device = kept["flags"] & FLAG_DEVICE != 0
        calls["flags"][on_device & (kept["started_ns"] > 0)] |= START_SEEN
        calls["flags"][kept["async_op"] == 0] |= BLOCKS
        with np.errstate(invalid="ignore"):  # a damaged record may hold any kind of NaN
            calls["took_s"] = np.where(on_device, kept["device_ms"] / 1e3, np.nan)
        over = np.where(kept["status"] >= COMPLETED, kept["completed_ns"], 0)
        issued, left = ring.records["enqueued_ns"][-1], ring.records["completed_ns"].max()
        placed = calls["group"] >= 0
        return Window(
            calls[placed],
            np.ascontiguousarray(kept["enqueued_ns"][placed]),
            np.ascontiguousarray(over[placed]),
            int(kept["enqueued_ns"].min(initial=_NEVER)),
            max(int(issued), int(left)),
        )

    def _place(self, calls: Calls, kept: Calls, ring: Ring) -> None:
        """Fill in groups, roots and peers; the group of a call without a known one stays -1."""
        calls["group"] = calls["root"] = calls["peer"] = -1
        for key in np.unique(kept["group"]):
            group = ring.tables.groups.get(int(key))
            known = self._known(group) if group is not None else None
            if known is None or ring.header.rank not in known.members:
                continue  # its name did not fit into the ring, or the file is damaged
            rows = kept["group"] == key
            calls["group"][rows] = known.number
            for name in ("root", "peer"):
                local = kept[name][rows]
                sound = (local >= 0) & (local < len(known.ranks))
                named = known.ranks[np.where(sound, local, 0)]
                calls[name][rows] = np.where(sound, named, np.where(local < 0, -1, OUTSIDE))

    def _known(self, group: Group) -> _Known:
        """Return a group's index and members; rings that share the object share the look-up."""
        known = self._of_object.get(id(group))
        if known is None or known.group is not group:
            number = self.groups.setdefault(group, len(self.groups))
            ranks = np.array(group.ranks, np.int32)
            known = _Known(group, number, frozenset(group.ranks), ranks)
            self._of_object[id(group)] = known
        return known


def _kept(records: Calls, window: int) -> npt.NDArray[np.bool_]:
    """Return which of a ring's records to keep."""
    wanted: npt.NDArray[np.bool_] = records["status"] != COMPLETED
    wanted[-window:] = True
    older = slice(0, max(0, len(records) - window))
    for group in np.unique(records["group"]):
        rows = np.flatnonzero((records["group"] == group) & (records["kind"] != P2P))
        wanted[rows[-_PER_GROUP:]] = True
    messages = np.flatnonzero(records["kind"][older] == P2P)
    if len(messages):
        columns = [records[name][messages] for name in ("group", "peer", "tag", "op")]
        keys = np.stack([column.astype(np.int64) for column in columns])
        _, first = np.unique(keys[:, ::-1], axis=1, return_index=True)
        wanted[messages[len(messages) - 1 - first]] = True
    return wanted
