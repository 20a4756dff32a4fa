"""What each call that does not end waits for: the members that have not come to it.

A call that has not ended (or has failed) shows what its rank waits for: a collective waits for the
members of its group that have not issued that sequence number, a message for its other end.

A rank that has issued a call on a device has not come to it before the device starts it. If the
back end tells the starts, a rank whose device has not started a call that another one's has is
waited for, and does not wait there itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    OUTSIDE,
    P2P,
    RECV,
    SEND,
    START_SEEN,
    Bools,
    Calls,
    Snapshot,
)
from rankcall.analysis.verdicts.device_order import note_queued
from rankcall.analysis.verdicts.wait import Channel, Rows, Wait
from rankcall.record import BATCH, FLAG_DEVICE, FROM_ROOT, OPS, SYNCHRONISING

_NEVER = np.iinfo(np.int64).max
# A rank that has issued or left a call in this newest part of the wait for it goes on elsewhere.
GOES_ON = 0.5
_SYNCHRONISING = [OPS.index(name) for name in SYNCHRONISING]
_FROM_ROOT = [OPS.index(name) for name in FROM_ROOT]


def waits_of(snapshot: Snapshot, blocked: Bools, hung: Bools, idle: Bools) -> list[Wait]:
    """Return the waits behind the calls in ``blocked``.

    Calls in ``hung`` are overdue. Devices are known not to have started those in ``idle``.
    """
    calls = snapshot.calls
    collectives = np.flatnonzero(blocked & (calls["kind"] == COLLECTIVE))
    messages = np.flatnonzero(blocked & (calls["kind"] == P2P))
    waits = list(_collective_waits(snapshot, collectives, hung, idle)) if len(collectives) else []
    if len(messages):
        waits += _message_waits(snapshot, messages, hung, idle)
    note_queued(snapshot, waits)
    return _without_misdirected(snapshot, waits)


def _without_misdirected(snapshot: Snapshot, waits: list[Wait]) -> list[Wait]:
    """Leave out receives of messages from a rank that has nothing to do with them.

    The other one has never sent the receiver any, and has left, or has gone on for most of the
    time. And a third rank, from which it has had messages before, cannot send it the next one. So
    it most likely asks the wrong rank, and the third one waits for it.
    """
    senders: dict[int, set[int]] = {}  # that cannot send the next message, by receiver
    for wait in waits:
        if wait.channel is not None and wait.seq > 1 and wait.absent == [wait.channel.target]:
            senders.setdefault(wait.channel.target, set()).add(wait.channel.source)
    return [wait for wait in waits if not _is_misdirected(snapshot, wait, senders)]


def _is_misdirected(snapshot: Snapshot, wait: Wait, senders: Mapping[int, set[int]]) -> bool:
    if wait.channel is None or not wait.absent or wait.seq > 1 or wait.any_source:
        return False
    source, target = wait.channel.source, wait.channel.target
    if wait.waiters != [target] or not senders.get(target, set()) - {source}:
        return False
    calls, state = snapshot.calls, snapshot.ranks[source]
    newest_s = calls["age_s"][calls["rank"] == source].min(initial=np.inf)
    return state.closed or state.exit == 0 or bool(newest_s < GOES_ON * wait.age_s)


def _collective_waits(snapshot: Snapshot, rows: Rows, hung: Bools, idle: Bools) -> Iterator[Wait]:
    calls = snapshot.calls
    progress = _Progress(calls, rows)
    # Only the first stuck call of a rank in a group shows why; the later ones queue behind it.
    order = rows[np.lexsort((calls["seq"][rows], calls["rank"][rows], calls["group"][rows]))]
    keys = np.stack([calls["group"][order], calls["rank"][order]])
    first = np.concatenate([[True], np.any(keys[:, 1:] != keys[:, :-1], axis=0)])
    order = order[first]
    order = order[np.lexsort((calls["rank"][order], calls["seq"][order], calls["group"][order]))]
    same = np.stack([calls["group"][order], calls["seq"][order]])
    cuts = np.flatnonzero(np.any(same[:, 1:] != same[:, :-1], axis=0)) + 1
    for piece in np.split(order, cuts):
        group, seq = int(calls["group"][piece[0]]), int(calls["seq"][piece[0]])
        came = progress.reached(group, seq)
        members = np.array(snapshot.groups[group].ranks, np.int64)
        absent = np.setdiff1d(members, came)
        absent = _only_root(calls[piece], absent)
        left = progress.left(group, seq)
        behind = int(calls["op"][piece[0]]) in _SYNCHRONISING and len(left) > 0
        if behind:
            # No member can leave before all have come: this outweighs records that are lost.
            absent, came = absent[:0], members
        records = dict(
            zip(calls["rank"][piece].tolist(), calls["index"][piece].tolist(), strict=True)
        )
        piece, idle_rows = _split_unstarted(calls, piece, idle, came)
        unstarted = calls["rank"][idle_rows].astype(np.int64)
        absent, came = np.union1d(absent, unstarted), np.setdiff1d(came, unstarted)
        yield Wait(
            group,
            seq,
            piece,
            calls["rank"][piece].tolist(),
            absent.tolist(),
            came.tolist(),
            float(calls["age_s"][piece].max()),
            bool(hung[piece].any()),
            left=np.setdiff1d(left, calls["rank"][piece]).tolist(),
            behind=behind,
            unstarted=unstarted.tolist(),
            records=records,
            idle_rows=idle_rows.tolist(),
        )


def _split_unstarted(
    calls: Calls, waiting: Rows, idle: Bools, came: npt.NDArray[np.int64]
) -> tuple[Rows, Rows]:
    """Return the calls that devices have started, and those that devices have not.

    If no device has started the collective, they all wait for something else.
    """
    begun = waiting[~idle[waiting]]
    has_left = len(np.setdiff1d(came, calls["rank"][waiting])) > 0
    if not len(begun) or not (has_left or (calls["flags"][begun] & START_SEEN).any()):
        return waiting, waiting[:0]
    return begun, waiting[idle[waiting]]


def _only_root(waiting: Calls, absent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the root alone if it is absent and the op cannot begin without it."""
    op, root = int(waiting["op"][0]), int(waiting["root"][0])
    from_root = op in _FROM_ROOT and bool((waiting["root"] == root).all())
    return absent[absent == root] if from_root and root in absent else absent


class _Progress:
    """How far each rank has come in the collectives of each group.

    A rank arrives at a collective when it issues it. But a device runs the collectives of a group
    in order, and the host may have issued hundreds behind one that never ends. There, a rank has
    arrived only if it has left all earlier ones.
    """

    def __init__(self, calls: Calls, stuck: Rows) -> None:
        rows = np.flatnonzero(calls["kind"] == COLLECTIVE)
        rows = rows[np.lexsort((calls["seq"][rows], calls["rank"][rows], calls["group"][rows]))]
        keys = np.stack([calls["group"][rows], calls["rank"][rows]])
        changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
        first = np.flatnonzero(np.concatenate([[True], changes]))
        seq, on_device = calls["seq"][rows], calls["flags"][rows] & FLAG_DEVICE != 0
        self._group = calls["group"][rows][first]
        self._rank = calls["rank"][rows][first].astype(np.int64)
        self._newest = np.maximum.reduceat(seq, first)
        held = on_device & np.isin(rows, stuck)
        self._oldest_stuck = np.minimum.reduceat(np.where(held, seq, _NEVER), first)
        done = on_device & (calls["status"][rows] == COMPLETED)
        self._left = np.maximum.reduceat(np.where(done, seq, -1), first)

    def reached(self, group: int, seq: int) -> npt.NDArray[np.int64]:
        """Return the ranks that have arrived at ``seq`` in a group, or at a later one."""
        here = self._of(group)
        arrived = (self._newest[here] >= seq) & (self._oldest_stuck[here] >= seq)
        came: npt.NDArray[np.int64] = self._rank[here][arrived]
        return came

    def left(self, group: int, seq: int) -> npt.NDArray[np.int64]:
        """Return the ranks whose devices have left ``seq`` in a group, or a later one."""
        here = self._of(group)
        ranks: npt.NDArray[np.int64] = self._rank[here][self._left[here] >= seq]
        return ranks

    def _of(self, group: int) -> slice:
        return slice(*np.searchsorted(self._group, [group, group + 1]))


def _message_waits(snapshot: Snapshot, rows: Rows, hung: Bools, idle: Bools) -> list[Wait]:
    calls = snapshot.calls
    ends, numbers = _device_ends(calls, idle), _numbers(snapshot)
    newest: dict[tuple[int, int, int, int, int], int] = {}  # of each end of each channel
    open_to_any: set[tuple[int, int, int]] = set()
    for row in np.flatnonzero(calls["kind"] == P2P).tolist():
        group, op, rank, peer, tag, seq = _end(calls, row)
        key = group, op, rank, peer, tag
        newest[key] = max(newest.get(key, 0), seq)
        if op == RECV and peer < 0 and calls["status"][row] < COMPLETED:
            open_to_any.add((group, rank, tag))
    first: dict[tuple[int, int, int, int, int], int] = {}
    rows = rows[calls["peer"][rows] != OUTSIDE]  # a back end will refuse these
    for row in rows[np.argsort(calls["seq"][rows], kind="stable")].tolist():
        first.setdefault(_end(calls, row)[:5], row)
    return [
        wait
        for key, row in sorted(first.items(), key=lambda item: item[1])
        for wait in _message_wait(
            snapshot, key, row, int(numbers[row]), newest, open_to_any, hung, ends
        )
    ]


def _numbers(snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """Return the number of each call's record; of messages in a batch, that of the first one.

    The messages of a batch have no order among themselves. Where one batch ends and the next one
    begins is not on record, so all that follow one another in a group are taken for one.
    """
    calls = snapshot.calls
    batched = [number for number, site in enumerate(snapshot.sites) if site.api == BATCH]
    numbers: npt.NDArray[np.int64] = calls["index"].astype(np.int64)
    rows = np.flatnonzero((calls["kind"] == P2P) & np.isin(calls["site"], batched))
    rows = rows[np.lexsort((calls["index"][rows], calls["rank"][rows]))]
    if len(rows):
        index, rank, group = numbers[rows], calls["rank"][rows], calls["group"][rows]
        goes_on = (np.diff(index) == 1) & (np.diff(rank) == 0) & (group[1:] == group[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        numbers[rows] = np.repeat(index[first], np.diff([*first, len(rows)]))
    return numbers


class _DeviceEnds(NamedTuple):
    """The ends of messages that devices are known not to have started, and those begun or over.

    The former with the number of its record.
    """

    unstarted: dict[tuple[int, int, int, int, int, int], int]
    begun: set[tuple[int, int, int, int, int, int]]


def _device_ends(calls: Calls, idle: Bools) -> _DeviceEnds:
    idle = idle & (calls["kind"] == P2P)
    if not idle.any():
        return _DeviceEnds({}, set())
    begun = (calls["flags"] & START_SEEN != 0) | (calls["status"] == COMPLETED)
    rows = np.flatnonzero(begun & (calls["kind"] == P2P))
    return _DeviceEnds(
        {_end(calls, row): int(calls["index"][row]) for row in np.flatnonzero(idle).tolist()},
        {_end(calls, row) for row in rows.tolist()},
    )


def _end(calls: Calls, row: int) -> tuple[int, int, int, int, int, int]:
    call = calls[row]
    return (
        int(call["group"]),
        int(call["op"]),
        int(call["rank"]),
        int(call["peer"]),
        int(call["tag"]),
        int(call["seq"]),
    )


def _message_wait(
    snapshot: Snapshot,
    key: tuple[int, int, int, int, int],
    row: int,
    number: int,
    newest: dict[tuple[int, int, int, int, int], int],
    open_to_any: set[tuple[int, int, int]],
    hung: Bools,
    ends: _DeviceEnds,
) -> Iterator[Wait]:
    call = snapshot.calls[row]
    group, op, rank, peer, tag = key
    seq, age = int(call["seq"]), float(call["age_s"])
    me, records = [rank], {rank: number}
    if peer < 0:
        others = [member for member in snapshot.groups[group].ranks if member != rank]
        yield Wait(
            group,
            seq,
            np.array([row]),
            me,
            others,
            me,
            age,
            bool(hung[row]),
            Channel(-1, rank, tag),
            any_source=True,
            records=records,
        )
        return
    other_op = RECV if op == SEND else SEND
    came = newest.get((group, other_op, peer, rank, tag), 0) >= seq
    came = came or (op == SEND and (group, peer, tag) in open_to_any)
    # On the CPU, the end of an isend that is not waited for is never recorded. On a device it is.
    soft = (
        op == SEND
        and snapshot.api(int(snapshot.calls["site"][row])) not in BLOCKING
        and not call["flags"] & FLAG_DEVICE
    )
    if soft and came:
        return  # the message was received
    channel = Channel(rank, peer, tag) if op == SEND else Channel(peer, rank, tag)
    own, other = (group, op, rank, peer, tag, seq), (group, other_op, peer, rank, tag, seq)
    if own in ends.unstarted and other in ends.begun:
        return  # its device is what the other end waits for
    unstarted = [peer] if other in ends.unstarted and own in ends.begun else []
    if unstarted:
        records[peer] = ends.unstarted[other]
    here = came and not unstarted
    yield Wait(
        group,
        seq,
        np.array([row]),
        me,
        [] if here else [peer],
        [rank, peer] if here else me,
        age,
        bool(hung[row]),
        channel,
        soft,
        unstarted=unstarted,
        records=records,
    )
