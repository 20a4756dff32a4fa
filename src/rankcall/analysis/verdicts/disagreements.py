"""Members that do not issue the same collective at the same place of a group's sequence.

All members of a group must issue the same collectives in the same order. At one (group, seq), the
order differs if the members' ops differ, or if a member is some calls ahead or behind. If the op
is the same, its size, dtype, root, reduce op or splits can differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    OUTSIDE,
    P2P,
    RECV,
    SEND,
    Bools,
    Calls,
    Snapshot,
)
from rankcall.analysis.verdicts.out_of_step import (
    ENOUGH,
    History,
    Shift,
    agree_again,
    shift_between,
    too_many,
    turns_more,
)
from rankcall.analysis.verdicts.wait import Wait
from rankcall.record import DTYPES, OPS, REDUCE_OPS, SIZE_TO_AGREE_ON
from rankcall.ring.tables import JOIN

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]

_BARRIER, _ALL_TO_ALL = OPS.index("barrier"), OPS.index("all_to_all")
SPLITS = "splits"  # a field that differs between what members send and what they receive
FIELDS = ("op", "dtype", "root", "reduce_op", "size")
_UNKNOWN = -1

# The rows of a message's ends, by op. The key: group, source, target, tag, seq.
Ends = dict[tuple[int, int, int, int, int], dict[int, int]]


@dataclass(frozen=True)
class Side:
    """Members that do the same: their calls, one each."""

    ranks: tuple[int, ...]
    row: int  # a call of one of them


@dataclass(frozen=True)
class Loop:
    """A side that went through a loop more often, and then came to what the other had issued."""

    ranks: tuple[int, ...]
    row: int  # its first call of the first turn more
    turns: int


class OtherLine(NamedTuple):
    """The rows of an earlier call of the first and the last side, issued from two lines.

    It is the only one before at which their lines differ, or the first of a single run of them. A
    call too many can match one of the others' and go through.
    """

    mine: int
    theirs: int


@dataclass(frozen=True)
class Disagreement:
    """A place in a group's sequence at which members differ. The smallest side comes first."""

    order_differs: bool  # the calls come in another order, not only with other arguments
    group: int
    seq: int
    differing: tuple[str, ...]  # of FIELDS
    sides: tuple[Side, ...]
    rows: Rows  # the calls at that place
    open: bool  # a member is still in its call there, or the call failed
    shift: Shift | None = None  # of the first side, if enough calls show one
    message: bool = False  # two ends of a message, not a collective
    loop: Loop | None = None  # that explains it
    other_line: OtherLine | None = None
    in_join: tuple[int, ...] = ()  # ranks whose call is their Join's own, unlike that of others
    lines_differ: bool = False  # of the first and the last side, which both are known

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks of all sides but the largest; empty if two sides are the largest.

        Of two equal sides, the one that left a loop first is named: its inputs ended, so that it
        went on to the calls that the others did not expect.
        """
        if len(self.sides) < 2:
            return ()
        has_left_first = self.loop is not None and len(self.sides) == 2
        if len(self.sides[-1].ranks) == len(self.sides[-2].ranks) and not has_left_first:
            return ()
        return tuple(sorted(rank for side in self.sides[:-1] for rank in side.ranks))


def signatures(calls: Calls) -> dict[str, Ints]:
    """Return what members must agree on, by field; -1 if it is unknown or does not apply."""
    size = np.full(len(calls), _UNKNOWN, np.int64)
    for name, column in SIZE_TO_AGREE_ON.items():
        rows = calls["op"] == OPS.index(name)
        size[rows] = calls[column][rows]
    # With even splits, each member sends to each other one what that one expects. With splits of
    # its own, a member may send and receive any sizes.
    even = (calls["op"] == _ALL_TO_ALL) & (calls["shape_hash"] == 0)
    size[even] = calls["in_bytes"][even]
    size[size <= 0] = _UNKNOWN
    dtype, reduce_op = (calls[name].astype(np.int64) for name in ("dtype", "reduce_op"))
    dtype[(dtype == 0) | (calls["op"] == _BARRIER)] = _UNKNOWN
    reduce_op[reduce_op == 0] = _UNKNOWN
    return {
        "op": calls["op"].astype(np.int64),
        "dtype": dtype,
        "root": calls["root"].astype(np.int64),
        "reduce_op": reduce_op,
        "size": size,
    }


def disagreements_in(snapshot: Snapshot, stuck: Bools) -> list[Disagreement]:
    """Return the first disagreement of each group, and those of stuck messages."""
    calls = snapshot.calls
    rows = np.flatnonzero(calls["kind"] == COLLECTIVE)
    disagreements: list[Disagreement] = []
    seen: set[int] = set()
    if len(rows):
        rows = rows[np.lexsort((calls["rank"][rows], calls["seq"][rows], calls["group"][rows]))]
        for piece, differing in places_that_differ(calls, rows):
            group = int(calls["group"][piece[0]])
            if group not in seen:
                seen.add(group)
                disagreements.append(_disagreement(snapshot, piece, differing, stuck))
    exchanges = [exchange for exchange in _uneven_exchanges(snapshot) if exchange.group not in seen]
    return [*disagreements, *exchanges, *_messages(snapshot, stuck)]


def places_that_differ(calls: Calls, rows: Rows) -> Iterator[tuple[Rows, tuple[str, ...]]]:
    """Yield the places where calls differ, with the fields that differ.

    ``rows`` are collectives, in order of group and sequence number.
    """
    same = np.stack([calls["group"][rows], calls["seq"][rows]])
    starts = np.flatnonzero(np.concatenate([[True], np.any(same[:, 1:] != same[:, :-1], axis=0)]))
    ends = np.concatenate([starts[1:], [len(rows)]])
    differs = {}
    for name, column in signatures(calls[rows]).items():
        known = column != _UNKNOWN
        least = np.minimum.reduceat(np.where(known, column, np.iinfo(np.int64).max), starts)
        most = np.maximum.reduceat(np.where(known, column, np.iinfo(np.int64).min), starts)
        differs[name] = least < most
    for place in np.flatnonzero(np.any(list(differs.values()), axis=0)):
        fields = tuple(name for name in FIELDS if differs[name][place])
        yield rows[starts[place] : ends[place]], fields


def _disagreement(
    snapshot: Snapshot, rows: Rows, differing: tuple[str, ...], stuck: Bools
) -> Disagreement:
    calls = snapshot.calls
    sides = _sides(calls, rows, differing)
    group, seq = int(calls["group"][rows[0]]), int(calls["seq"][rows[0]])
    mine, theirs = (_history(calls, group, side.row) for side in (sides[0], sides[-1]))
    first = _first_unlike(snapshot, mine, theirs, seq)
    if first is not None:
        at_first = _at_first(calls, group, first, (mine, theirs), seq, bool(stuck[rows].any()))
        # Whoever differs there must be who differs here, if that is known.
        is_tie = len(sides) == 2 and len(sides[0].ranks) == len(sides[1].ranks)
        unlike = {rank for side in sides[: None if is_tie else -1] for rank in side.ranks}
        if at_first is not None and unlike.issuperset(at_first.culprits):
            return at_first
    answered = _answered_by_join(snapshot, mine, theirs, seq)
    if answered is not None:
        place = _at_line(calls, group, answered)
        return replace(place, open=bool(stuck[rows].any()), in_join=_in_join(snapshot, place.sides))
    shift = shift_between(mine, theirs, seq)
    # Both sides make both calls, so only the order differs.
    swapped = (
        mine[seq] != theirs[seq] and mine[seq] in theirs.values() and theirs[seq] in mine.values()
    )
    if shift is not None and agree_again(mine, theirs, seq):
        shift = None
    in_join = _in_join(snapshot, sides)
    order_differs = "op" in differing or shift is not None or swapped or bool(in_join)
    if shift is not None and shift.shown_by < ENOUGH:
        shift = None
    if shift is not None and shift.since < seq:
        seq = shift.since
        rows = np.flatnonzero(
            (calls["kind"] == COLLECTIVE) & (calls["group"] == group) & (calls["seq"] == seq)
        )
        sides = [_moved(calls, rows, side) for side in sides]
    return Disagreement(
        order_differs,
        group,
        seq,
        differing,
        tuple(sides),
        rows,
        bool(stuck[rows].any()),
        shift,
        in_join=in_join,
        other_line=_other_line(snapshot, sides, seq) if order_differs else None,
        lines_differ=0 != calls["site"][sides[0].row] != calls["site"][sides[-1].row] != 0,
    )


def _in_join(snapshot: Snapshot, sides: Sequence[Side]) -> tuple[int, ...]:
    """Return the ranks whose call is one of their Join's own, if that of others is not."""
    calls = snapshot.calls
    inside = [side for side in sides if snapshot.api(int(calls["site"][side.row])) == JOIN]
    if len(inside) == len(sides):
        return ()
    return tuple(sorted(rank for side in inside for rank in side.ranks))


def _answered_by_join(snapshot: Snapshot, mine: History, theirs: History, seq: int) -> int | None:
    """Return where a rank's Join answered a call that the program of another one had made itself.

    Messages of Joins are alike on all ranks. So if two of them differ, they have got out of step:
    such an answer, of the same size, went through before.
    """
    if not _is_of_join(snapshot, mine[seq]) or not _is_of_join(snapshot, theirs[seq]):
        return None
    for before in sorted(mine.keys() & theirs.keys(), reverse=True):
        pair = mine[before], theirs[before]
        if before < seq and len({_is_of_join(snapshot, call) for call in pair}) == 2:
            return before
    return None


def _is_of_join(snapshot: Snapshot, call: tuple[int, ...]) -> bool:
    return snapshot.api(call[-1]) == JOIN


def _first_unlike(snapshot: Snapshot, mine: History, theirs: History, before: int) -> int | None:
    """Return the first place at which two ranks issued calls of two lines that both of them have.

    Their sizes may match, so that the calls went through, as if a loop had ended one turn early on
    one rank. A line that only one of them has may be that rank's way to the same call. A rank that
    shadows in a ``Join`` answers calls of any line.
    """
    lines, own_lines = set(theirs.values()), set(mine.values())
    for seq in sorted(mine.keys() & theirs.keys()):
        if seq >= before:
            return None
        pair = mine[seq], theirs[seq]
        unlike = pair[0] != pair[1] and pair[0] in lines and pair[1] in own_lines
        sites = [call[-1] for call in pair]
        if unlike and all(sites) and JOIN not in map(snapshot.api, sites):
            return seq
    return None


def _other_line(snapshot: Snapshot, sides: Sequence[Side], before: int) -> OtherLine | None:
    """Return where the first side may have issued a call too many, or in place of another one."""
    calls, group = snapshot.calls, int(snapshot.calls["group"][sides[0].row])
    mine, theirs = (_history(calls, group, side.row) for side in (sides[0], sides[-1]))
    both = [seq for seq in sorted(mine.keys() & theirs.keys()) if seq < before]
    apart = [at for at, seq in enumerate(both) if mine[seq][-1] != theirs[seq][-1]]
    if not apart or apart[0] < ENOUGH or (len(apart) > 1 and apart[-1] - apart[0] >= len(apart)):
        return None
    seq = both[apart[0]]
    lines = mine[seq][-1], theirs[seq][-1]
    if not all(lines) or JOIN in map(snapshot.api, lines):
        return None
    there = (calls["group"] == group) & (calls["kind"] == COLLECTIVE) & (calls["seq"] == seq)
    ranks = [calls["rank"][side.row] for side in (sides[0], sides[-1])]
    return OtherLine(*(int(np.flatnonzero(there & (calls["rank"] == rank))[0]) for rank in ranks))


def _at_first(
    calls: Calls, group: int, seq: int, both: tuple[History, History], last: int, is_open: bool
) -> Disagreement | None:
    """Return the disagreement at the first place at which the lines of two ranks differ.

    None if they are not out of step from there on: a branch in a rank's program, for example for a
    batch without data, leads to the same call from another line.
    """
    mine, theirs = both
    rows = np.flatnonzero(
        (calls["kind"] == COLLECTIVE) & (calls["group"] == group) & (calls["seq"] == seq)
    )
    sides = _by_line(calls, rows)
    lines = {side: int(calls["site"][side.row]) for side in sides}
    loop = None
    for longer, shorter in ((theirs, mine), (mine, theirs)):
        turns = turns_more(longer, shorter, seq)
        side = next((side for side in sides if lines[side] == longer[seq][-1]), None)
        if turns and side is not None:
            loop = Loop(side.ranks, side.row, turns)
            break
    if loop is not None:  # of two equal sides, the one that left the loop comes first
        sides.sort(key=lambda side: (len(side.ranks), side.ranks == loop.ranks, side.ranks))
    shift = None if loop is not None else shift_between(mine, theirs, last)
    if shift is not None and (shift.since != seq or shift.shown_by < ENOUGH):
        shift = None
    if loop is None and shift is None:
        return None
    return Disagreement(True, group, seq, (), tuple(sides), rows, is_open, shift, loop=loop)


def _by_line(calls: Calls, rows: Rows) -> list[Side]:
    """Return the sides of the members that issued their calls from the same line."""
    by_line: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_line.setdefault(int(calls["site"][row]), []).append(row)
    sides = [
        Side(tuple(sorted(calls["rank"][side_rows].tolist())), side_rows[0])
        for side_rows in by_line.values()
    ]
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))


def _moved(calls: Calls, rows: Rows, side: Side) -> Side:
    """Return a side with its call at another place."""
    there = rows[np.isin(calls["rank"][rows], side.ranks)]
    return Side(side.ranks, int(there[0]) if len(there) else side.row)


def _sides(calls: Calls, rows: Rows, differing: Sequence[str]) -> list[Side]:
    by_field = signatures(calls[rows])
    # Other fields are not compared between different ops.
    names = ("op",) if "op" in differing else tuple(differing)
    keys = np.stack([by_field[name] for name in names])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.ravel()
    sides = []
    for number in range(int(which.max()) + 1):
        mine = rows[which == number]
        sides.append(Side(tuple(np.unique(calls["rank"][mine]).tolist()), int(mine[0])))
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))


def off_by_n(
    snapshot: Snapshot, wait: Wait, rank: int, *, has_left: bool = False
) -> Disagreement | None:
    """Return the shift behind a rank that did not arrive, if its calls so far show one.

    It may be a call short because it skipped one of the same kind, which no comparison could show
    at that time. Or those that wait for it have issued one too many.

    Args:
        snapshot: The job.
        wait: The wait.
        rank: One that others wait for there.
        has_left: It will issue no more calls, so that the numbers of calls differ for good.
    """
    calls = snapshot.calls
    there = (calls["group"] == wait.group) & (calls["kind"] == COLLECTIVE)
    mine = np.flatnonzero(there & (calls["rank"] == rank))
    if wait.channel is not None or not len(mine):
        return None
    newest = int(mine[np.argmax(calls["seq"][mine])])
    last = int(calls["seq"][newest])
    own, others = (_history(calls, wait.group, row) for row in (newest, int(wait.rows[0])))
    surplus = too_many(own, others, wait.seq - last) if has_left else None
    if surplus is not None:
        return _if_between(calls, wait, _at_line(calls, wait.group, surplus))
    first = _first_unlike(snapshot, own, others, wait.seq)
    if first is not None:
        at_first = _at_first(calls, wait.group, first, (own, others), last, True)
        if at_first is not None:
            # Of a pair, the one that has not come left the loop, and not the one that waits.
            is_pair = {len(side.ranks) for side in at_first.sides} == {1}
            if is_pair and at_first.loop is not None and rank not in at_first.culprits:
                return None
            return _if_between(calls, wait, at_first)
    shift = shift_between(own, others, last)
    if shift is None:
        return None
    is_shown = shift.shown_by >= ENOUGH
    apart = [seq for seq in own.keys() & others.keys() if own[seq] != others[seq]]
    place = min(apart, default=shift.since)
    if sum(seq < shift.since for seq in apart) != shift.since - place:  # not one run up to it
        if not is_shown:
            return None  # that lines differ is usual here
        place = shift.since
    at_line = _at_line(calls, wait.group, place)
    if rank not in at_line.sides[0].ranks:  # a shift is that of the first side
        shift = shift_between(others, own, max(others)) if is_shown else None
        is_shown = shift is not None and shift.shown_by >= ENOUGH
    return _if_between(calls, wait, replace(at_line, shift=shift if is_shown else None))


def _if_between(calls: Calls, wait: Wait, disagreement: Disagreement) -> Disagreement | None:
    """Return a disagreement if those that wait are on other sides than all that have not come.

    Otherwise the lines differ for a reason of their own.
    """
    absent = set(calls["rank"][disagreement.rows].tolist()) & set(wait.absent)
    sides = [set(side.ranks) for side in disagreement.sides if not absent.isdisjoint(side.ranks)]
    is_between = len(sides) == 1 and absent <= sides[0] and sides[0].isdisjoint(wait.waiters)
    return disagreement if is_between else None


def _at_line(calls: Calls, group: int, seq: int) -> Disagreement:
    """Return the place as one at which members issued their calls from different lines."""
    rows = np.flatnonzero(
        (calls["kind"] == COLLECTIVE) & (calls["group"] == group) & (calls["seq"] == seq)
    )
    return Disagreement(True, group, seq, (), tuple(_by_line(calls, rows)), rows, True)


def _history(calls: Calls, group: int, row: int) -> History:
    """Return the calls and call sites of the rank of a call in a group, by seq."""
    rows = np.flatnonzero(
        (calls["rank"] == calls["rank"][row])
        & (calls["group"] == group)
        & (calls["kind"] == COLLECTIVE)
    )
    by_field = signatures(calls[rows])
    columns = [by_field[name] for name in FIELDS]
    table = np.stack([*columns, calls["site"][rows].astype(np.int64)], axis=1)
    seqs = calls["seq"][rows].tolist()
    return {seq: tuple(line) for seq, line in zip(seqs, table.tolist(), strict=True)}


def _messages(snapshot: Snapshot, stuck: Bools) -> Iterator[Disagreement]:
    """Yield messages whose two ends differ in size or dtype: the stuck ones, and one of a channel.

    A back end may let such a message through. The receiver then gets a part of it, or wrong values.
    """
    calls = snapshot.calls
    ends: Ends = {}
    for row in np.flatnonzero((calls["kind"] == P2P) & (calls["peer"] >= 0)).tolist():
        call = calls[row]
        pair = int(call["rank"]), int(call["peer"])
        source, target = pair if call["op"] == SEND else pair[::-1]
        key = int(call["group"]), source, target, int(call["tag"]), int(call["seq"])
        ends.setdefault(key, {})[int(call["op"])] = row
    ends.update(_sends_for_any_source(calls, stuck, ends))
    reported_channels = set()
    for (group, *channel, _, seq), both in ends.items():
        if len(both) < 2:
            continue
        send, recv = both[SEND], both[RECV]
        differing = tuple(
            name
            for name, column in (("dtype", "dtype"), ("size", "message_bytes"))
            if calls[column][send] != calls[column][recv] and calls[column][[send, recv]].all()
        )
        is_stuck = bool(stuck[send] or stuck[recv])
        if not differing or (is_stuck and "size" not in differing):
            continue
        if not is_stuck and (
            (group, *channel) in reported_channels or calls["status"][recv] != COMPLETED
        ):
            continue
        reported_channels.add((group, *channel))
        sides = tuple(Side((int(calls["rank"][row]),), row) for row in (send, recv))
        yield Disagreement(
            False, group, seq, differing, sides, np.array([send, recv]), is_stuck, message=True
        )


def _sends_for_any_source(calls: Calls, stuck: Bools, ends: Ends) -> Ends:
    """Return the only message that each stuck receive from any source can be of.

    Such a receive does not know its source while it has not ended.
    """
    waiting: dict[tuple[int, int, int], list[tuple[tuple[int, int, int, int, int], int]]] = {}
    for key, both in ends.items():
        if SEND in both and RECV not in both:
            waiting.setdefault((key[0], key[2], key[3]), []).append((key, both[SEND]))
    messages: Ends = {}
    for row in np.flatnonzero(stuck & (calls["op"] == RECV) & (calls["peer"] == -1)).tolist():
        call = calls[row]
        place = int(call["group"]), int(call["rank"]), int(call["tag"])
        sends = waiting.pop(place, [])
        if len(sends) == 1:
            key, send = sends[0]
            messages[key] = {SEND: send, RECV: row}
    return messages


def _uneven_exchanges(snapshot: Snapshot) -> Iterator[Disagreement]:
    """Yield the first all_to_all of each group whose members send more or less than they receive.

    Each member may have sizes of its own, so only the sums over all members can be compared.
    """
    calls = snapshot.calls
    rows = np.flatnonzero((calls["kind"] == COLLECTIVE) & (calls["op"] == _ALL_TO_ALL))
    if not len(rows):
        return
    rows = rows[np.lexsort((calls["seq"][rows], calls["group"][rows]))]
    keys = np.stack([calls["group"][rows], calls["seq"][rows]])
    cuts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    reported_groups = set()
    for piece in np.split(rows, cuts):
        group, seq = int(calls["group"][piece[0]]), int(calls["seq"][piece[0]])
        members = snapshot.groups[group].ranks
        if group in reported_groups or len(piece) != len(members):
            continue
        if calls["in_bytes"][piece].sum() != calls["out_bytes"][piece].sum():
            reported_groups.add(group)
            ranks = tuple(sorted(calls["rank"][piece].tolist()))
            is_open = bool((calls["status"][piece] != COMPLETED).any())
            yield Disagreement(
                False, group, seq, (SPLITS,), (Side(ranks, int(piece[0])),), piece, is_open
            )


def value(snapshot: Snapshot, row: int, name: str) -> str:
    """Write one of ``FIELDS`` of a call."""
    call = snapshot.calls[row]
    if name == "op":
        return OPS[int(call["op"])]
    if name == "dtype":
        return DTYPES[int(call["dtype"])]
    if name == "reduce_op":
        return REDUCE_OPS[int(call["reduce_op"])]
    if name == "root":
        root = int(call["root"])
        return "a rank outside the group" if root == OUTSIDE else f"rank {root}"
    column = "in_bytes" if call["op"] == _ALL_TO_ALL else "message_bytes"
    return f"{int(call[SIZE_TO_AGREE_ON.get(OPS[int(call['op'])], column)]):,} bytes"


def values_of(
    snapshot: Snapshot, disagreement: Disagreement, side: Side
) -> tuple[tuple[str, str], ...]:
    """Return the fields in which a side differs from the others, each with its value."""
    return tuple((name, value(snapshot, side.row, name)) for name in disagreement.differing)
