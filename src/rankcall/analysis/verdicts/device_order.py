"""In which order devices come to the calls that do not end.

A rank that has issued a call on a device has not come to it before the device starts it. If nothing
tells the starts, the order of the calls still does in one case: a stream comes to no call behind
one that it waits in, and a communicator to none behind one that it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.snapshot import BLOCKS, P2P, START_SEEN, Snapshot
from rankcall.analysis.verdicts.wait import Place, Wait
from rankcall.record import BATCH, FLAG_DEVICE

# What runs calls on a rank's device one behind the other: a thread's stream (rank, thread, -1), or
# a group's communicator (rank, 0, group).
_Lane = tuple[int, int, int]


def note_queued(snapshot: Snapshot, waits: Sequence[Wait]) -> None:
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
        ranks = queued.get(wait.place, {})
        stays = [number for number, rank in enumerate(wait.waiters) if rank not in ranks]
        wait.queued = bool(ranks) and not stays
        if ranks and stays and not (wait.absent or wait.behind):
            wait.rows = wait.rows[stays]
            wait.waiters = [wait.waiters[number] for number in stays]
            wait.absent = wait.unstarted = sorted(ranks)
            wait.present = [rank for rank in wait.present if rank not in ranks]
            wait.records |= ranks


def _queued_ranks(snapshot: Snapshot, waits: Sequence[Wait]) -> dict[Place, dict[int, int]]:
    """Return by call the members whose devices are held before it, with the number of its record.

    A call that lacks a member holds the devices that are in it. One that lacks none ends once all
    devices have come to it, as far as is known, so it holds none for good, and is not taken for
    what comes first. If calls are left of which each holds a device back from another one, their
    members have issued them in orders that do not go together.
    """
    lacking = {wait.place for wait in waits if wait.absent and not wait.soft}
    lanes = _lanes(snapshot, waits)
    queued: dict[Place, set[_Lane]] = {}
    for lane, issued in lanes.items():
        for call in issued:
            if not call.is_begun:
                queued.setdefault(call.place, set()).add(lane)
    # Let all calls end that can, and each lane go on to the next call that holds it.
    over: set[Place] = set()
    held_in: dict[Place, list[_Lane]] = {}
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
    place: Place
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
            is_batch = snapshot.api(int(calls["site"][row])) == BATCH
            runs = [(stream, _holds_stream(snapshot, row) and can_hold)]
            if calls["flags"][row] & FLAG_DEVICE and (is_batch or wait.channel is None):
                runs.append((communicator, can_hold))
            for lane, holds in runs:
                if holds and (lane is stream or is_batch):
                    holding.add(lane)
                is_begun = bool(calls["flags"][row] & START_SEEN)
                call = _OnDevice(wait.records[rank], wait.place, holds, is_begun)
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
