"""One ring's records, split by group, with only the columns that analysis needs.

A record is 192 bytes and a part of this takes 24: what the members of a collective agree on (op,
sizes, root) is kept once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.bandwidth import sizes
from rankcall.record import FLAG_DEVICE, KINDS, STATUSES, has_duration
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite, Group

Ints = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

# In all time columns: there is no such record, or it has not come so far. CLOCK_MONOTONIC is
# never 0 in a process.
MISSING = 0
UNKNOWN_SITE = CallSite("unknown", 0, "", "")

_COLLECTIVE, _P2P = KINDS.index("collective"), KINDS.index("p2p")
_FAILED = STATUSES.index("failed")
_WANTED = (
    "seq", "enqueued_ns", "started_ns", "completed_ns", "message_bytes", "in_bytes", "out_bytes",
    "step", "tag", "group", "call_site", "root", "peer", "kind", "op", "status", "flags",
    "device_ms",
)  # fmt: skip
_LARGEST = 1 << 62  # no count or size beyond this is believed
_LATEST = 1 << 60  # ns; 36 years of uptime. Differences and sums of such times cannot overflow


@dataclass(frozen=True)
class Session:
    """One life of the job's processes: sequence numbers of two never belong together."""

    attempt: int
    incarnation: int  # of the same rank and attempt, in order of start


@dataclass
class Part:
    """One rank's records in one group, by ascending ``seq``. Times are its host's monotonic ns."""

    rank: int
    host: int  # index of the host's clock
    seq: Ints
    arrival: Ints  # when it came: enqueued, or started on a device
    started: Ints
    completed: Ints
    agreed: Columns  # op, root, size (S), bytes; shared with other members where equal


@dataclass
class Messages:
    """One rank's sends and receives in one group. Ranks are the group's own."""

    rank: int
    host: int
    columns: Columns  # seq, arrival, started, completed, own, peer, tag, op, size, bytes


@dataclass
class Extract:
    """What one ring contributes."""

    parts: dict[Group, Part] = field(default_factory=dict)
    messages: dict[Group, Messages] = field(default_factory=dict)


def pull(ring: Ring) -> Columns:
    """Copy the wanted columns out of a ring; ``started_ns`` and ``arrival`` are filled in.

    A failed op has no completion here: how long a timeout took says nothing about a transfer. Nor
    has an op on a device without device times, whose end was only noticed at some time.
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
    columns["arrival"] = (
        np.where(on_device, columns["started_ns"], enqueued) if on_device.any() else enqueued
    )
    untimed = columns["status"] == _FAILED
    if on_device.any():
        untimed |= ~has_duration(columns["flags"], columns["device_ms"])
        _end_on_device(columns, on_device & ~untimed & (columns["completed_ns"] != MISSING))
    if untimed.any():
        columns["completed_ns"][untimed] = MISSING
    return columns


def _end_on_device(columns: Columns, timed: npt.NDArray[np.bool_]) -> None:
    """Let ops end when their device took them to: their ends were noticed some time later."""
    took_ns = np.clip(np.where(timed, columns["device_ms"], 0.0) * 1e6, 0, _LATEST).astype(np.int64)
    ended = np.minimum(columns["started_ns"] + took_ns, _LATEST)
    columns["completed_ns"][timed] = ended[timed]


def extract(ring: Ring, columns: Columns, host: int) -> Extract:
    """Split one ring's columns by group and kind; groups it does not name are left out."""
    found = Extract()
    rank, kind = ring.header.rank, columns["kind"]
    only_collectives = bool((kind == _COLLECTIVE).all())
    for key, group in ring.tables.groups.items():
        mine = columns["group"] == key
        if rank not in group.ranks or not mine.any():
            continue
        rows = mine if only_collectives else mine & (kind == _COLLECTIVE)
        if rows.any():
            found.parts[group] = _part(rank, host, _only(columns, rows), len(group.ranks))
        rows = mine & (kind == _P2P)
        if not only_collectives and rows.any():
            own = group.ranks.index(rank)
            found.messages[group] = _messages(rank, host, own, _only(columns, rows))
    return found


def _only(columns: Columns, rows: npt.NDArray[np.bool_]) -> Columns:
    if rows.all():
        return columns
    return {name: column[rows] for name, column in columns.items()}


def _part(rank: int, host: int, columns: Columns, size: int) -> Part:
    seq = columns["seq"]
    if np.any(seq[1:] <= seq[:-1]):
        # Several threads may commit out of order; a number that comes twice is damage.
        order = np.unique(seq, return_index=True)[1]
        columns = {name: column[order] for name, column in columns.items()}
    agreed = {
        "op": columns["op"],
        "root": columns["root"],
        "size": sizes(columns, size),
        "bytes": columns["message_bytes"],
    }
    return Part(
        rank,
        host,
        columns["seq"],
        columns["arrival"],
        columns["started_ns"],
        columns["completed_ns"],
        agreed,
    )


def _messages(rank: int, host: int, own: int, columns: Columns) -> Messages:
    kept = {name: columns[name] for name in ("seq", "arrival", "peer", "tag", "op")}
    kept["started"], kept["completed"] = columns["started_ns"], columns["completed_ns"]
    kept["size"] = columns["message_bytes"].astype(np.float64)
    kept["bytes"] = columns["message_bytes"]
    kept["own"] = np.full(len(columns["seq"]), own, np.int32)
    return Messages(rank, host, kept)


def share_agreed(part: Part, other: Part) -> None:
    """Let ``part`` use ``other``'s arrays wherever both say the same."""
    if np.array_equal(part.seq, other.seq):
        part.seq = other.seq
        for name, column in other.agreed.items():
            if np.array_equal(part.agreed[name], column):
                part.agreed[name] = column
