"""Who waits for whom: the wait-for graph over all groups and messages.

A call that has not ended (or has failed) says what its rank waits for: the members of its group
that have not issued that sequence number; of a message, the other end. Those are either in a call
themselves, which says whom they wait for, or they are where it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.snapshot import (
    COLLECTIVE,
    COMPLETED,
    P2P,
    RECV,
    SEND,
    Bools,
    Calls,
    Snapshot,
)
from rankcall.record import OPS

Rows = npt.NDArray[np.intp]

_FROM_ROOT = [OPS.index(name) for name in ("broadcast", "scatter")]
_TO_ROOT = [OPS.index(name) for name in ("reduce", "gather")]
# The public functions that return only when their message has gone; others are waited for later.
BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")


class Channel(NamedTuple):
    """One direction between two ranks of a group; -1: any source."""

    source: int
    target: int
    tag: int


@dataclass
class Wait:
    """The ranks that are in one collective, or at one end of a message, and do not get out."""

    group: int
    seq: int
    rows: Rows  # the waiting calls, by rank
    waiters: list[int]
    absent: list[int]  # those of the others that have not come
    present: list[int]  # those that have come, the waiters included
    age_s: float  # of the longest waiting call
    hung: bool  # a call of it has lasted long enough to count
    channel: Channel | None = None
    soft: bool = False  # nobody need be waiting for it: an isend
    any_source: bool = False  # one of the absent would do
    presumed: list[int] = field(default_factory=list)  # left no records; may well be in it


def waits(snapshot: Snapshot, blocked: Bools, hung: Bools) -> list[Wait]:
    """Build the graph from the calls that block their rank; ``hung`` are those that count."""
    calls = snapshot.calls
    collectives = np.flatnonzero(blocked & (calls["kind"] == COLLECTIVE))
    messages = np.flatnonzero(blocked & (calls["kind"] == P2P))
    found = list(_collective_waits(snapshot, collectives, hung)) if len(collectives) else []
    if len(messages):
        found += _message_waits(snapshot, messages, hung)
    return found


def _collective_waits(snapshot: Snapshot, rows: Rows, hung: Bools) -> Iterator[Wait]:
    calls = snapshot.calls
    newest = _Newest(calls)
    # Of a rank's calls in a group only the first that is stuck says why; the rest queue behind it.
    order = rows[np.lexsort((calls["seq"][rows], calls["rank"][rows], calls["group"][rows]))]
    keys = np.stack([calls["group"][order], calls["rank"][order]])
    first = np.concatenate([[True], np.any(keys[:, 1:] != keys[:, :-1], axis=0)])
    order = order[first]
    order = order[np.lexsort((calls["rank"][order], calls["seq"][order], calls["group"][order]))]
    same = np.stack([calls["group"][order], calls["seq"][order]])
    cuts = np.flatnonzero(np.any(same[:, 1:] != same[:, :-1], axis=0)) + 1
    for piece in np.split(order, cuts):
        group, seq = int(calls["group"][piece[0]]), int(calls["seq"][piece[0]])
        came = newest.reached(group, seq)
        members = np.array(snapshot.groups[group].ranks, np.int64)
        absent = np.setdiff1d(members, came)
        absent = _only_root(calls[piece], absent)
        yield Wait(
            group, seq, piece, calls["rank"][piece].tolist(), absent.tolist(), came.tolist(),
            float(calls["age_s"][piece].max()), bool(hung[piece].any()),
        )  # fmt: skip


def _only_root(waiting: Calls, absent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Blame the root alone for what cannot begin without it, where it has not come."""
    op, root = int(waiting["op"][0]), int(waiting["root"][0])
    from_root = op in _FROM_ROOT and bool((waiting["root"] == root).all())
    return absent[absent == root] if from_root and root in absent else absent


class _Newest:
    """The newest collective that each rank has issued in each group."""

    def __init__(self, calls: Calls) -> None:
        rows = np.flatnonzero(calls["kind"] == COLLECTIVE)
        rows = rows[np.lexsort((calls["seq"][rows], calls["rank"][rows], calls["group"][rows]))]
        keys = np.stack([calls["group"][rows], calls["rank"][rows]])
        last = np.concatenate([np.any(keys[:, 1:] != keys[:, :-1], axis=0), [True]])
        rows = rows[last]
        self._group, self._rank = calls["group"][rows], calls["rank"][rows].astype(np.int64)
        self._seq = calls["seq"][rows]

    def reached(self, group: int, seq: int) -> npt.NDArray[np.int64]:
        """Return the ranks that have issued ``seq`` in a group, or a later one."""
        here = slice(*np.searchsorted(self._group, [group, group + 1]))
        came: npt.NDArray[np.int64] = self._rank[here][self._seq[here] >= seq]
        return came


def _message_waits(snapshot: Snapshot, rows: Rows, hung: Bools) -> list[Wait]:
    calls = snapshot.calls
    newest: dict[tuple[int, int, int, int, int], int] = {}  # of each end of each channel
    open_to_any: set[tuple[int, int, int]] = set()
    for row in np.flatnonzero(calls["kind"] == P2P).tolist():
        group, op, rank, peer, tag, seq = _end(calls, row)
        key = group, op, rank, peer, tag
        newest[key] = max(newest.get(key, 0), seq)
        if op == RECV and peer < 0 and calls["status"][row] < COMPLETED:
            open_to_any.add((group, rank, tag))
    first: dict[tuple[int, int, int, int, int], int] = {}
    for row in rows[np.argsort(calls["seq"][rows], kind="stable")].tolist():
        first.setdefault(_end(calls, row)[:5], row)
    return [
        wait
        for key, row in sorted(first.items(), key=lambda item: item[1])
        for wait in _message_wait(snapshot, key, row, newest, open_to_any, hung)
    ]


def _end(calls: Calls, row: int) -> tuple[int, int, int, int, int, int]:
    call = calls[row]
    return (
        int(call["group"]), int(call["op"]), int(call["rank"]), int(call["peer"]),
        int(call["tag"]), int(call["seq"]),
    )  # fmt: skip


def _message_wait(
    snapshot: Snapshot,
    key: tuple[int, int, int, int, int],
    row: int,
    newest: dict[tuple[int, int, int, int, int], int],
    open_to_any: set[tuple[int, int, int]],
    hung: Bools,
) -> Iterator[Wait]:
    call = snapshot.calls[row]
    group, op, rank, peer, tag = key
    seq, age = int(call["seq"]), float(call["age_s"])
    me = [rank]
    if peer < 0:
        others = [each for each in snapshot.groups[group].ranks if each != rank]
        yield Wait(
            group, seq, np.array([row]), me, others, me, age, bool(hung[row]),
            Channel(-1, rank, tag), any_source=True,
        )  # fmt: skip
        return
    other_op = RECV if op == SEND else SEND
    came = newest.get((group, other_op, peer, rank, tag), 0) >= seq
    came = came or (op == SEND and (group, peer, tag) in open_to_any)
    soft = op == SEND and _api(snapshot, row) not in BLOCKING
    if soft and came:
        return  # nobody waited for it: its end is not known, and it has been taken
    channel = Channel(rank, peer, tag) if op == SEND else Channel(peer, rank, tag)
    yield Wait(
        group, seq, np.array([row]), me, [] if came else [peer], [rank, peer] if came else me,
        age, bool(hung[row]), channel, soft,
    )  # fmt: skip


def _api(snapshot: Snapshot, row: int) -> str:
    site = int(snapshot.calls["site"][row])
    return snapshot.sites[site].api if 0 < site < len(snapshot.sites) else ""
