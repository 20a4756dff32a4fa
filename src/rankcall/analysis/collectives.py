"""The collectives and messages of one group, lined up over its members, on one clock for all hosts.

``columns_of`` copies the columns that analysis needs out of a ring, ``split_by_group`` splits them
by group, and ``collective_table`` and ``message_table`` line up what all members left. A record
takes 192 bytes in the ring and some 24 here: what the members of a collective agree on (op, sizes,
root) is kept once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.record import (
    FLAG_DEVICE,
    KINDS,
    OPS,
    STATUSES,
    bandwidth_sizes,
    has_duration,
)
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite, Group, Tables
from rankcall.run.load import Run

Ints = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

# In all time columns: there is no such record, or the op has not got that far. CLOCK_MONOTONIC is
# never 0 in a process.
MISSING = 0
# What an op's arrival is. The larger one counts for a collective whose members differ.
HOST = 0  # the host's time of the issue: on the CPU, an op begins then
DEVICE = 1  # from the durations on the members' devices
ISSUE = 2  # the host's time of the issue, but the op runs on a device, later: no one has come then
UNKNOWN_SITE = CallSite("unknown", 0, "", "")

# Functions that return only when their message is gone, or here. The others are waited for later.
BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")

# The op of a collective whose members issued different ones: nobody waits for others in it. The
# names of a table's ops.
DIFFERS = len(OPS)
OP_NAMES = (*OPS, "(differ)")

_COLLECTIVE, _P2P = KINDS.index("collective"), KINDS.index("p2p")
_FAILED = STATUSES.index("failed")
_RECV = OPS.index("recv")
_WANTED = (
    "seq",
    "enqueued_ns",
    "started_ns",
    "completed_ns",
    "message_bytes",
    "in_bytes",
    "out_bytes",
    "step",
    "tag",
    "group",
    "call_site",
    "root",
    "peer",
    "kind",
    "op",
    "status",
    "flags",
    "device_ms",
)
_LARGEST = 1 << 62  # no count or size beyond this is believed
_LATEST = 1 << 60  # ns; 36 years of uptime. Differences and sums of such times cannot overflow
_LARGEST_NS = 86_400 * 10**9  # a day: no longer duration is believed, so that sums do not overflow
_NOTHING = np.zeros(0, np.int64)
# If there are more columns than this for each one in use, the columns are numbered anew: a damaged
# sequence number must not cost memory.
_SPARSE = 4


@dataclass(frozen=True)
class Session:
    """One life of the job's processes. Sequence numbers of two sessions never belong together."""

    attempt: int
    incarnation: int  # of the same rank and attempt, in order of start


@dataclass
class RankCollectives:
    """One rank's records in one group, by ascending ``seq``. Times are its host's monotonic ns."""

    rank: int
    host: int  # index of the host's clock
    seq: Ints
    arrival: Ints  # when the rank arrived; the agreed ``source`` says what that is
    started: Ints
    completed: Ints
    agreed: Columns  # op, root, size (S), bytes, source; shared with other members where equal


@dataclass
class RankMessages:
    """One rank's sends and receives in one group. Ranks are the group's own."""

    rank: int
    host: int
    # seq, arrival, started, completed, own, peer, tag, op, size, bytes, source, blocking
    columns: Columns


@dataclass
class ByGroup:
    """One ring's records by group."""

    collectives: dict[Group, RankCollectives] = field(default_factory=dict)
    messages: dict[Group, RankMessages] = field(default_factory=dict)


def columns_of(ring: Ring) -> Columns:
    """Copy the columns that analysis needs out of a ring; add ``arrival`` and ``source``.

    A failed op has no completion here, because the length of a timeout says nothing about a
    transfer. An op on a device without device times has none either: the time at which its end
    was noticed is not the time at which it ended.
    """
    records = ring.records
    columns: Columns = {name: np.ascontiguousarray(records[name]) for name in _WANTED}
    for name in ("seq", "message_bytes", "in_bytes", "out_bytes", "step"):
        np.minimum(columns[name], np.uint64(_LARGEST), out=columns[name])
        columns[name] = columns[name].view(np.int64)
    for name in ("enqueued_ns", "started_ns", "completed_ns"):
        np.clip(columns[name], MISSING, _LATEST, out=columns[name])
    enqueued, started = columns["enqueued_ns"], columns["started_ns"]
    if not started.all():
        columns["started_ns"] = np.where(started == 0, enqueued, started)
    on_device = (columns["flags"] & FLAG_DEVICE) != 0
    columns["source"] = np.zeros(len(enqueued), np.uint8)
    untimed = columns["status"] == _FAILED
    if on_device.any():
        untimed |= ~has_duration(columns["flags"], columns["device_ms"])
        timed = on_device & ~untimed & (columns["completed_ns"] != MISSING)
        columns["source"][on_device] = np.where(timed, DEVICE, ISSUE)[on_device]
        # Whoever notes a start on a device notices it late, as it does an end.
        columns["started_ns"] = np.where(on_device, enqueued, columns["started_ns"])
        _place_on_device(columns, timed)
    columns["arrival"] = np.where(on_device, columns["started_ns"], enqueued)
    if untimed.any():
        columns["completed_ns"][untimed] = MISSING
    return columns


def _place_on_device(columns: Columns, timed: npt.NDArray[np.bool_]) -> None:
    """Set the starts and ends of ops by their durations on the device.

    The ends were noticed some time later. A device runs the collectives of a group in order; the
    messages of a batch run at once.
    """
    took = np.clip(np.where(timed, columns["device_ms"], 0.0) * 1e6, 0, _LARGEST_NS).astype(
        np.int64
    )
    begun = columns["started_ns"].copy()
    ended = begun + took
    in_line = timed & (columns["kind"] == _COLLECTIVE)
    for group in np.unique(columns["group"][in_line]):
        rows = in_line & (columns["group"] == group)
        ended[rows] = in_order(begun[rows], took[rows])
    columns["completed_ns"][timed] = np.minimum(ended, _LATEST)[timed]
    columns["started_ns"][timed] = np.minimum(ended - took, _LATEST)[timed]


def in_order(issued: Ints, took: Ints) -> Ints:
    """Return when ops end that run one after the other, each for its time, none before its issue.

    ``end[k] = max(issued[k], end[k - 1]) + took[k]``, without a loop.
    """
    total = np.cumsum(took)
    ends: Ints = total + np.maximum.accumulate(issued + took - total)
    return ends


def split_by_group(ring: Ring, columns: Columns, host: int) -> ByGroup:
    """Split one ring's columns by group and kind; leave out groups that the ring does not name."""
    by_group = ByGroup()
    rank, kind = ring.header.rank, columns["kind"]
    only_collectives = bool((kind == _COLLECTIVE).all())
    for key, group in ring.tables.groups.items():
        mine = columns["group"] == key
        if rank not in group.ranks or not mine.any():
            continue
        rows = mine if only_collectives else mine & (kind == _COLLECTIVE)
        if rows.any():
            by_group.collectives[group] = _rank_collectives(
                rank, host, _only(columns, rows), len(group.ranks)
            )
        rows = mine & (kind == _P2P)
        if not only_collectives and rows.any():
            own = group.ranks.index(rank)
            messages = _only(columns, rows)
            messages["blocking"] = np.isin(messages["call_site"], sites_that_block(ring.tables))
            by_group.messages[group] = _rank_messages(rank, host, own, messages)
    return by_group


def sites_that_block(tables: Tables) -> list[int]:
    """Return the call sites whose caller does not go on before its message has gone.

    A send that does not block (``isend``, a batch) is in flight until somebody waits for it, and
    its rank may compute meanwhile.
    """
    return [key for key, site in tables.sites.items() if site.api in BLOCKING]


def _only(columns: Columns, rows: npt.NDArray[np.bool_]) -> Columns:
    if rows.all():
        return columns
    return {name: column[rows] for name, column in columns.items()}


def _rank_collectives(rank: int, host: int, columns: Columns, size: int) -> RankCollectives:
    seq = columns["seq"]
    if np.any(seq[1:] <= seq[:-1]):
        # Several threads may commit out of order. A number that occurs twice is damage.
        order = np.unique(seq, return_index=True)[1]
        columns = {name: column[order] for name, column in columns.items()}
    agreed = {
        "op": columns["op"],
        "root": columns["root"],
        "size": bandwidth_sizes(columns, size),
        "bytes": columns["message_bytes"],
        "source": columns["source"],
    }
    return RankCollectives(
        rank,
        host,
        columns["seq"],
        columns["arrival"],
        columns["started_ns"],
        columns["completed_ns"],
        agreed,
    )


def _rank_messages(rank: int, host: int, own: int, columns: Columns) -> RankMessages:
    message_columns = {
        name: columns[name]
        for name in ("seq", "arrival", "peer", "tag", "op", "source", "blocking")
    }
    message_columns["started"], message_columns["completed"] = (
        columns["started_ns"],
        columns["completed_ns"],
    )
    message_columns["size"] = columns["message_bytes"].astype(np.float64)
    message_columns["bytes"] = columns["message_bytes"]
    message_columns["own"] = np.full(len(columns["seq"]), own, np.int32)
    return RankMessages(rank, host, message_columns)


def share_agreed(member: RankCollectives, other: RankCollectives) -> None:
    """Make ``member`` use ``other``'s arrays if both hold the same values."""
    if np.array_equal(member.seq, other.seq):
        member.seq = other.seq
        for name, column in other.agreed.items():
            if np.array_equal(member.agreed[name], column):
                member.agreed[name] = column


@dataclass
class CollectiveTable:
    """One group's collectives in one session: ``[member, collective]``, times in host ns.

    Only members that left records have a row. ``MISSING`` means that a member has no record of a
    collective, or has not finished it.
    """

    session: Session
    group: Group
    ranks: npt.NDArray[np.intp]
    hosts: npt.NDArray[np.intp]
    seq: Ints
    arrival: Ints
    started: Ints
    completed: Ints
    op: npt.NDArray[np.uint8]
    root: npt.NDArray[np.intp]  # row of the root; -1: none, or it left no records
    size: npt.NDArray[np.float64]  # S
    bytes: Ints
    source: npt.NDArray[np.uint8]  # HOST, DEVICE or ISSUE

    @property
    def members(self) -> int:
        """The group's size, members without records included."""
        return len(self.group.ranks)


def collective_table(
    session: Session, group: Group, members: list[RankCollectives]
) -> CollectiveTable:
    """Line up the members' records by sequence number; empty ``members`` on the way."""
    seq = _columns([member.seq for member in members])
    shape = len(members), len(seq)
    places = [_place(member.seq, seq) for member in members]
    whole = all(isinstance(at, slice) and at == slice(0, shape[1]) for at in places)
    make = np.empty if whole else np.zeros
    arrival, started, completed = (make(shape, np.int64) for _ in range(3))
    agreed = _agreed(members, places, shape[1])
    ranks = np.array([member.rank for member in members], np.intp)
    hosts = np.array([member.host for member in members], np.intp)
    for row, at in enumerate(places):
        member = members[row]
        arrival[row, at], started[row, at] = member.arrival, member.started
        completed[row, at] = member.completed
        member.arrival = member.started = member.completed = _NOTHING
    members.clear()
    root = _rows_of_roots(agreed.pop("root"), group, ranks)
    return CollectiveTable(
        session, group, ranks, hosts, seq, arrival, started, completed, root=root, **agreed
    )


def _columns(seqs: Sequence[Ints]) -> Ints:
    """Return the sequence numbers that any member has, ascending."""
    first, last = min(int(seq[0]) for seq in seqs), max(int(seq[-1]) for seq in seqs)
    if last - first + 1 <= _SPARSE * max(len(seq) for seq in seqs) + 1024:
        return np.arange(first, last + 1)
    return np.unique(np.concatenate(seqs))


def _place(own: Ints, seq: Ints) -> slice | npt.NDArray[np.intp]:
    """Return which columns a member fills: a slice if it has no gaps."""
    start = int(np.searchsorted(seq, own[0]))
    end = start + len(own)
    if end <= len(seq) and seq[end - 1] == own[-1] and np.array_equal(seq[start:end], own):
        return slice(start, end)
    return np.searchsorted(seq, own)


def _agreed(
    members: Sequence[RankCollectives], places: Sequence[slice | npt.NDArray[np.intp]], width: int
) -> dict[str, npt.NDArray[Any]]:
    """Return what members agree on, by column: the largest value if they do not.

    Ops that differ are none of the members' ops: a barrier is no all_reduce that took long.
    """
    agreed: dict[str, npt.NDArray[Any]] = {}
    for name, like in members[0].agreed.items():
        lowest = -1 if name == "root" else 0
        merged = agreed[name] = np.full(width, lowest, like.dtype)
        seen: set[int] = set()
        for member, at in zip(members, places, strict=True):
            column = member.agreed[name]
            if id(column) not in seen:
                seen.add(id(column))
                merged[at] = np.maximum(merged[at], column)
    ops, compared = agreed["op"], set[int]()
    for member, at in zip(members, places, strict=True):
        column = member.agreed["op"]
        if id(column) not in compared:
            compared.add(id(column))
            ops[at] = np.where(ops[at] == column, ops[at], DIFFERS)
    return agreed


def _rows_of_roots(
    root: npt.NDArray[Any], group: Group, ranks: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Translate roots from ranks in the group to rows of the matrices."""
    row_of = {int(rank): row for row, rank in enumerate(ranks)}
    table = np.array([row_of.get(rank, -1) for rank in group.ranks] + [-1], np.intp)
    known = (root >= 0) & (root < len(group.ranks))
    return table[np.where(known, root, len(group.ranks))]


def present(times: Ints) -> npt.NDArray[np.bool_]:
    """Return which elements hold a record (of ``arrival``) or an end (of ``completed``)."""
    is_present: npt.NDArray[np.bool_] = times != MISSING
    return is_present


@dataclass
class MessageTable:
    """One group's messages in one session; ``sent[i]`` and ``received[i]`` are one message.

    Both are row numbers of ``columns``, which has those of ``RankMessages`` and ``rank`` and
    ``host``; -1 stands for an end that left no record.
    """

    session: Session
    group: Group
    columns: Columns
    sent: npt.NDArray[np.intp]
    received: npt.NDArray[np.intp]


def message_table(session: Session, group: Group, messages: Sequence[RankMessages]) -> MessageTable:
    """Find both ends of every message of a group."""
    names = list(messages[0].columns)
    columns: Columns = {
        name: np.concatenate([member.columns[name] for member in messages]) for name in names
    }
    lengths = [len(member.columns["seq"]) for member in messages]
    columns["rank"] = np.repeat([member.rank for member in messages], lengths)
    columns["host"] = np.repeat([member.host for member in messages], lengths)
    is_recv = columns["op"] == _RECV
    source = np.where(is_recv, columns["peer"], columns["own"])
    target = np.where(is_recv, columns["own"], columns["peer"])
    order = np.lexsort((is_recv, columns["seq"], columns["tag"], target, source))
    sent, received = _pairs(order, is_recv, columns, source, target)
    return MessageTable(session, group, columns, sent, received)


def _pairs(
    order: npt.NDArray[np.intp],
    is_recv: npt.NDArray[np.bool_],
    columns: Columns,
    source: npt.NDArray[np.int32],
    target: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Pair neighbours in ``order`` that are a send and a receive of the same message."""
    first, second = order[:-1], order[1:]
    same = ~is_recv[first] & is_recv[second]
    for column in (columns["seq"], columns["tag"], source, target):
        same &= column[first] == column[second]
    # An any-source receive in flight has no peer and no number yet, so it matches nothing.
    same &= (source[first] >= 0) & (columns["seq"][first] > 0)
    alone = np.ones(len(order), bool)
    alone[first[same]] = alone[second[same]] = False
    lonely = np.flatnonzero(alone)
    sends, receives = lonely[~is_recv[lonely]], lonely[is_recv[lonely]]
    sent = np.concatenate([first[same], sends, np.full(len(receives), -1)])
    received = np.concatenate([second[same], np.full(len(sends), -1), receives])
    return sent, received


def sessions_of(run: Run) -> dict[str, Session]:
    """Return the session of each ring: a restart of the job begins one, and so does a re-run."""
    lives: dict[tuple[int, int], int] = {}
    sessions: dict[str, Session] = {}
    for head in sorted(run.heads, key=lambda head: head.header.anchor_epoch_ns):
        key = head.header.attempt, head.header.rank
        lives[key] = lives.get(key, 0) + 1
        sessions[head.path.name] = Session(head.header.attempt, lives[key])
    return sessions
