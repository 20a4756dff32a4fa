"""Which rank waits for which, and the ranks with which the waiting begins.

A call that has not ended (or has failed) shows what its rank waits for: a collective waits for the
members of its group that have not issued that sequence number, a message for its other end. Those
ranks are in a call themselves, which shows what they wait for, or they are where the hang starts.

A rank that has issued a call on a device has not come to it before the device starts it. If the
back end tells the starts, a rank whose device has not started a call that another one's has is
waited for, and does not wait there itself. If nothing tells the starts, the order of the calls
still does in one case: a stream comes to no call behind one that it waits in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.snapshot import (
    BLOCKS,
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
from rankcall.record import BATCH, FLAG_DEVICE, FROM_ROOT, OPS, SYNCHRONISING

Rows = npt.NDArray[np.intp]

_NEVER = np.iinfo(np.int64).max
# A rank that has issued or left a call in this newest part of the wait for it goes on elsewhere.
GOES_ON = 0.5
_SYNCHRONISING = [OPS.index(name) for name in SYNCHRONISING]
_FROM_ROOT = [OPS.index(name) for name in FROM_ROOT]


class Channel(NamedTuple):
    """One direction between two ranks of a group; -1: any source."""

    source: int
    target: int
    tag: int


@dataclass
class Wait:
    """Ranks that have not left one collective, or one end of a message."""

    group: int
    seq: int
    rows: Rows  # the waiting calls, by rank
    waiters: list[int]
    absent: list[int]  # ranks that have not arrived and are waited for
    present: list[int]  # ranks that have arrived, the waiters included
    age_s: float  # of the longest waiting call
    hung: bool  # one of its calls has lasted long enough to count
    channel: Channel | None = None
    soft: bool = False  # an isend: its rank need not be waiting for it
    any_source: bool = False  # any one of the absent ranks can end it
    presumed: list[int] = field(default_factory=list)  # ranks without records, probably in it
    unstarted: list[int] = field(default_factory=list)  # absent: issued, not started on the device
    left: list[int] = field(default_factory=list)  # members whose devices have left the collective
    behind: bool = False  # all have come, since others have left: nothing holds the waiters
    queued: bool = False  # no device has come to it: each is held in a call before it
    # Of waiters and unstarted, by rank. All messages of a batch have the number of the first one.
    records: dict[int, int] = field(default_factory=dict)
    idle_rows: Sequence[int] = ()  # the calls of the unstarted, as far as the back end tells


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
    _note_queued(snapshot, waits)
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


_Place = tuple[int, Channel | None, int]  # a collective of a group, or both ends of a message
# What runs calls on a rank's device one behind the other: a thread's stream (rank, thread, -1), or
# a group's communicator (rank, 0, group).
_Lane = tuple[int, int, int]


def _note_queued(snapshot: Snapshot, waits: Sequence[Wait]) -> None:
    """Note the ranks whose devices are held in one call, and so have not come to a later one.

    For example, rank 1 leaves out a call of a pair and goes on to one of the world. Rank 0 has
    issued both, but its device waits for rank 1 in the pair's, so rank 1 waits for rank 0 in the
    world's. Without this, all would have come to that one.

    Of a stream, only calls for which it waits count, and only calls of one thread, which most
    likely are on one stream: the stream is not on record. A batch of messages and a collective of
    one group share its communicator, which runs them in the order of their issue in any case.
    """
    queued = _queued_ranks(snapshot, waits)
    for wait in waits:
        ranks = queued.get(_place(wait), {})
        stays = [number for number, rank in enumerate(wait.waiters) if rank not in ranks]
        wait.queued = bool(ranks) and not stays
        if ranks and stays and not (wait.absent or wait.behind):
            wait.rows = wait.rows[stays]
            wait.waiters = [wait.waiters[number] for number in stays]
            wait.absent = wait.unstarted = sorted(ranks)
            wait.present = [rank for rank in wait.present if rank not in ranks]
            wait.records |= ranks


def _place(wait: Wait) -> _Place:
    return wait.group, wait.channel, wait.seq


def _queued_ranks(snapshot: Snapshot, waits: Sequence[Wait]) -> dict[_Place, dict[int, int]]:
    """Return by call the members whose devices are held before it, with the number of its record.

    A call that lacks a member holds the devices that are in it. One that lacks none ends once all
    devices have come to it, as far as is known, so it holds none for good, and is not taken for
    what comes first. If calls are left of which each holds a device back from another one, their
    members have issued them in orders that do not go together.
    """
    lacking = {_place(wait) for wait in waits if wait.absent and not wait.soft}
    lanes = _lanes(snapshot, waits)
    queued: dict[_Place, set[_Lane]] = {}
    for lane, issued in lanes.items():
        for call in issued:
            if not call.is_begun:
                queued.setdefault(call.place, set()).add(lane)
    # Let all calls end that can, and each lane go on to the next call that holds it.
    over: set[_Place] = set()
    held_in: dict[_Place, list[_Lane]] = {}
    ahead = {lane: _together(issued) for lane, issued in lanes.items()}
    todo = list(lanes)
    while todo:
        lane = todo.pop()
        while ahead[lane]:
            for call in ahead[lane][-1]:
                not_there = queued.get(call.place, set())
                not_there.discard(lane)
                if not not_there and call.place not in lacking and call.place not in over:
                    over.add(call.place)
                    todo += held_in.pop(call.place, [])
            holding = [call for call in ahead[lane][-1] if call.holds and call.place not in over]
            if holding:
                held_in.setdefault(holding[0].place, []).append(lane)
                break
            ahead[lane].pop()
    number = {(call.place, lane): call.record for lane in lanes for call in lanes[lane]}
    return {
        place: {lane[0]: number[place, lane] for lane in behind}
        for place, behind in queued.items()
        if behind
    }


class _OnDevice(NamedTuple):
    """A call in flight, as one of the calls of a lane."""

    record: int  # its number, which the messages of a batch have in common
    place: _Place
    holds: bool  # the lane goes on only when it is over
    is_begun: bool


def _together(issued: Sequence[_OnDevice]) -> list[list[_OnDevice]]:
    """Return the calls that a lane runs at once, the last ones first."""
    return [list(calls) for _, calls in groupby(issued, lambda call: call.record)][::-1]


def _lanes(snapshot: Snapshot, waits: Sequence[Wait]) -> dict[_Lane, list[_OnDevice]]:
    """Return the calls of some waits by lane, in the order of their issue.

    Only of lanes with a call that holds them: what the others run has no order. The collectives of
    a group alone need no lane, because a wait has the first one of a rank that does not end.
    """
    calls = snapshot.calls
    lanes: dict[_Lane, list[_OnDevice]] = {}
    holding: set[_Lane] = set()
    for wait in waits:
        can_hold = not wait.soft and not wait.behind
        for row in [*wait.rows.tolist(), *wait.idle_rows]:
            rank, group = int(calls["rank"][row]), int(calls["group"][row])
            stream, communicator = (rank, int(calls["thread"][row]), -1), (rank, 0, group)
            is_batch = _api(snapshot, row) == BATCH
            runs = [(stream, _holds_stream(snapshot, row) and can_hold)]
            if calls["flags"][row] & FLAG_DEVICE and (is_batch or wait.channel is None):
                runs.append((communicator, can_hold))
            for lane, holds in runs:
                if holds and (lane is stream or is_batch):
                    holding.add(lane)
                is_begun = bool(calls["flags"][row] & START_SEEN)
                call = _OnDevice(wait.records[rank], _place(wait), holds, is_begun)
                lanes.setdefault(lane, []).append(call)
    return {lane: sorted(lanes[lane], key=lambda call: call.record) for lane in holding}


def _holds_stream(snapshot: Snapshot, row: int) -> bool:
    """Tell whether the stream of a call's caller waits for it, as the record says."""
    call = snapshot.calls[row]
    if call["thread"] == 0 or not call["flags"] & FLAG_DEVICE:
        return False
    if call["kind"] == P2P:
        return snapshot.api(int(call["site"])) in BLOCKING
    return bool(call["flags"] & BLOCKS)


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
    soft = op == SEND and _api(snapshot, row) not in BLOCKING and not call["flags"] & FLAG_DEVICE
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


def _api(snapshot: Snapshot, row: int) -> str:
    return snapshot.api(int(snapshot.calls["site"][row]))


class WaitGraph:
    """The waits by the ranks that are in them, and by the ranks that are absent from them."""

    def __init__(self, waits: Sequence[Wait], blind: Collection[int] = ()) -> None:
        self.waits = waits
        if blind:
            for wait in waits:
                _presume(wait, blind)
            _without_earlier(waits)
        self._first: dict[int, int] = {}  # by rank: its first call that all have come to
        self._full: dict[_Place, list[Wait]] = {}  # their waits: a message has one of each end
        for wait in waits:
            if not (wait.absent or wait.soft):
                self._full.setdefault(_place(wait), []).append(wait)
                for rank in wait.waiters:
                    self._first[rank] = min(wait.records[rank], self._first.get(rank, _NEVER))
        self.in_wait: dict[int, list[Wait]] = {}
        self.waits_for: dict[int, list[Wait]] = {}
        self._late = _late(waits)
        for wait in waits:
            for rank in self._held(wait, [*wait.waiters, *wait.presumed]):
                self.in_wait.setdefault(rank, []).append(wait)
            for rank in wait.absent:
                self.waits_for.setdefault(rank, []).append(wait)

    def _held(self, wait: Wait, ranks: Iterable[int]) -> list[int]:
        """Return which ranks a wait may keep from going on.

        What a rank has issued behind the call that its device is late in does not. What it has
        issued before that call does.
        """
        late = self._late
        return [rank for rank in ranks if wait.records.get(rank, -1) < late.get(rank, _NEVER)]

    def cycles(self, halted: Collection[int]) -> list[Cycle]:
        """Return every circle of ranks that wait for each other; see ``cycles_in``."""
        waits = [replace(wait, waiters=self._held(wait, wait.waiters)) for wait in self.waits]
        return cycles_in(waits, halted)

    def is_first(self, wait: Wait) -> bool:
        """Tell whether its ranks have issued no other call before it that all have come to.

        Of a message, both ends: the one may hang because the other rank is held in another call.
        """
        ends = self._full[_place(wait)]
        return all(end.records[rank] == self._first[rank] for end in ends for rank in end.waiters)

    def blocked(self, rank: int) -> bool:
        """Tell whether a rank waits for another one."""
        return rank in self.in_wait

    def joined(self, rank: int) -> list[Wait]:
        """Return the waits that a rank is in, or has left before the others could leave."""
        return [wait for wait in self.waits if rank in wait.present]

    def reach(self, waits: Iterable[Wait]) -> list[Wait]:
        """Return some waits, the waits for the ranks in them, and so on."""
        todo = list(waits)
        reached = {id(wait): wait for wait in todo}
        seen: set[int] = set()
        while todo:
            wait = todo.pop()
            for rank in [*wait.waiters, *wait.presumed]:
                if rank not in seen:
                    seen.add(rank)
                    fresh = [
                        next_wait
                        for next_wait in self.waits_for.get(rank, ())
                        if id(next_wait) not in reached
                    ]
                    reached.update((id(next_wait), next_wait) for next_wait in fresh)
                    todo += fresh
        return list(reached.values())

    def victims(self, waits: Iterable[Wait]) -> set[int]:
        """Return the ranks in some waits, the ranks that wait for those, and so on."""
        return {rank for wait in self.reach(waits) for rank in wait.waiters}


def _late(waits: Sequence[Wait]) -> dict[int, int]:
    """Return by rank the first call to which its device has not come, or that only it is in."""
    late: dict[int, int] = {}
    for wait in waits:
        for rank in [*wait.unstarted, *(wait.waiters if wait.behind else ())]:
            late[rank] = min(wait.records[rank], late.get(rank, _NEVER))
    return late


def _presume(wait: Wait, blind: Collection[int]) -> None:
    """Take ranks without records for victims if a rank with records has not arrived."""
    unseen = [rank for rank in wait.absent if rank in blind]
    if unseen and len(unseen) < len(wait.absent) and not wait.any_source:
        wait.absent = [rank for rank in wait.absent if rank not in blind]
        wait.presumed = unseen


def _without_earlier(waits: Sequence[Wait]) -> None:
    """Presume no rank in a collective whose group waits for it in an earlier one.

    Ranks leave a collective at different times: if a host stops in the midst of one, some ranks are
    in it for ever, and others already in the next, where they wait for the former.
    """
    first: dict[tuple[int, int], int] = {}
    for wait in waits:
        for rank in wait.absent if wait.channel is None else ():
            first[wait.group, rank] = min(wait.seq, first.get((wait.group, rank), wait.seq))
    for wait in waits:
        if wait.channel is None:
            wait.presumed = [
                rank
                for rank in wait.presumed
                if first.get((wait.group, rank), wait.seq) >= wait.seq
            ]


Edges = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Cycle:
    """Ranks that wait for each other in a circle, and the waits that they are in."""

    ranks: tuple[int, ...]
    waits: tuple[Wait, ...]


def cycles_in(waits: Sequence[Wait], halted: Collection[int]) -> list[Cycle]:
    """Return every circle of ranks that wait for each other.

    Ranks in ``halted`` are dead or stopped, so the call that they are in is not why they do not go
    on.
    """
    waiting = {rank for wait in waits for rank in wait.waiters if rank not in halted}
    mine: dict[int, list[int]] = {}  # rank -> waits it is in
    for number, wait in enumerate(waits):
        for rank in waiting.intersection(wait.waiters):
            mine.setdefault(rank, []).append(number)
    # A receive from any source needs one of the ranks that it waits for. It is certain to need a
    # rank only if that is the only one left, or if none of them can ever send.
    stuck = _stuck_for_good(waits, mine)
    certain = [
        []
        if wait.any_source and len(wait.absent) > 1 and not stuck.issuperset(wait.absent)
        else [rank for rank in wait.absent if rank in waiting]
        for wait in waits
    ]
    edges = {number: [-1 - rank for rank in absent] for number, absent in enumerate(certain)}
    edges.update({-1 - rank: numbers for rank, numbers in mine.items()})
    return [
        Cycle(
            tuple(sorted(-1 - node for node in part if node < 0)),
            tuple(waits[node] for node in sorted(part) if node >= 0),
        )
        for part in components(edges)
    ]


def _stuck_for_good(waits: Sequence[Wait], mine: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the ranks that can go on only if another one of them does.

    Args:
        waits: All waits.
        mine: The waits that each rank is in, as indexes.
    """
    stuck = set(mine)

    def holds(wait: Wait) -> bool:
        if wait.any_source:
            return stuck.issuperset(wait.absent)
        return not stuck.isdisjoint(wait.absent)

    while True:
        free = {rank for rank in stuck if not any(holds(waits[number]) for number in mine[rank])}
        if not free:
            return stuck
        stuck -= free


def components(edges: Edges) -> list[list[int]]:
    """Return the strongly connected components of more than one node (Tarjan, without recursion).

    R. E. Tarjan, Depth-first search and linear graph algorithms, 1972.
    """
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    parts: list[list[int]] = []
    for root in edges:
        if root in number:
            continue
        path = [(root, 0)]
        while path:
            node, at = path.pop()
            if at == 0:
                number[node] = low[node] = len(number)
                stack.append(node)
                held.add(node)
            targets = edges.get(node, ())
            if at > 0:
                low[node] = min(low[node], low[targets[at - 1]])
            while at < len(targets):
                target = targets[at]
                at += 1
                if target not in number:
                    path += [(node, at), (target, 0)]
                    break
                if target in held:
                    low[node] = min(low[node], number[target])
            else:
                _close(node, number, low, stack, held, parts)
    return parts


def _close(
    node: int,
    number: Mapping[int, int],
    low: Mapping[int, int],
    stack: list[int],
    held: set[int],
    parts: list[list[int]],
) -> None:
    """Take a finished component off the stack."""
    if low[node] != number[node]:
        return
    part = []
    while True:
        top = stack.pop()
        held.discard(top)
        part.append(top)
        if top == node:
            break
    if len(part) > 1:
        parts.append(part)
