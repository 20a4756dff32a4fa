"""Which rank waits for which, and the ranks with which the waiting begins.

A call that has not ended (or has failed) shows what its rank waits for: a collective waits for the
members of its group that have not issued that sequence number, a message for its other end. Those
ranks are in a call themselves, which shows what they wait for, or they are where the hang starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import (
    ALIVE,
    COLLECTIVE,
    COMPLETED,
    GONE,
    OUTSIDE,
    P2P,
    RECV,
    SEND,
    STOPPED,
    UNKNOWN,
    Bools,
    Calls,
    RankState,
    Snapshot,
)
from rankcall.record import FLAG_DEVICE, FROM_ROOT, OPS, SYNCHRONISING

Rows = npt.NDArray[np.intp]

_NEVER = np.iinfo(np.int64).max
_SYNCHRONISING = [OPS.index(name) for name in SYNCHRONISING]
_FROM_ROOT = [OPS.index(name) for name in FROM_ROOT]
# Functions that return only when their message is gone. The others are waited for later.
BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")


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
    behind: bool = False  # other members have left the collective, so nothing holds the waiters


def waits_of(snapshot: Snapshot, blocked: Bools, hung: Bools) -> list[Wait]:
    """Return the waits behind the calls in ``blocked``. Calls in ``hung`` are overdue."""
    calls = snapshot.calls
    collectives = np.flatnonzero(blocked & (calls["kind"] == COLLECTIVE))
    messages = np.flatnonzero(blocked & (calls["kind"] == P2P))
    waits = list(_collective_waits(snapshot, collectives, hung)) if len(collectives) else []
    if len(messages):
        waits += _message_waits(snapshot, messages, hung)
    return waits


def _collective_waits(snapshot: Snapshot, rows: Rows, hung: Bools) -> Iterator[Wait]:
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
        behind = int(calls["op"][piece[0]]) in _SYNCHRONISING and progress.left(group, seq)
        if behind:
            # No member can leave before all have come: this outweighs records that are lost.
            absent, came = absent[:0], members
        yield Wait(
            group,
            seq,
            piece,
            calls["rank"][piece].tolist(),
            absent.tolist(),
            came.tolist(),
            float(calls["age_s"][piece].max()),
            bool(hung[piece].any()),
            behind=behind,
        )


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

    def left(self, group: int, seq: int) -> bool:
        """Tell whether the device of any rank has left ``seq`` in a group, or a later one."""
        return bool((self._left[self._of(group)] >= seq).any())

    def _of(self, group: int) -> slice:
        return slice(*np.searchsorted(self._group, [group, group + 1]))


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
    rows = rows[calls["peer"][rows] != OUTSIDE]  # a back end will refuse these
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
    newest: dict[tuple[int, int, int, int, int], int],
    open_to_any: set[tuple[int, int, int]],
    hung: Bools,
) -> Iterator[Wait]:
    call = snapshot.calls[row]
    group, op, rank, peer, tag = key
    seq, age = int(call["seq"]), float(call["age_s"])
    me = [rank]
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
        )
        return
    other_op = RECV if op == SEND else SEND
    came = newest.get((group, other_op, peer, rank, tag), 0) >= seq
    came = came or (op == SEND and (group, peer, tag) in open_to_any)
    soft = op == SEND and _api(snapshot, row) not in BLOCKING
    if soft and came:
        # The message was received. The end of an isend that is not waited for is never recorded.
        return
    channel = Channel(rank, peer, tag) if op == SEND else Channel(peer, rank, tag)
    yield Wait(
        group,
        seq,
        np.array([row]),
        me,
        [] if came else [peer],
        [rank, peer] if came else me,
        age,
        bool(hung[row]),
        channel,
        soft,
    )


def _api(snapshot: Snapshot, row: int) -> str:
    site = int(snapshot.calls["site"][row])
    return snapshot.sites[site].api if 0 < site < len(snapshot.sites) else ""


class WaitGraph:
    """The waits by the ranks that are in them, and by the ranks that are absent from them."""

    def __init__(self, waits: Sequence[Wait], blind: Collection[int] = ()) -> None:
        self.waits = waits
        if blind:
            for wait in waits:
                _presume(wait, blind)
        self.in_wait: dict[int, list[Wait]] = {}
        self.waits_for: dict[int, list[Wait]] = {}
        late = {rank for wait in waits if wait.behind for rank in wait.waiters}
        for wait in waits:
            # A rank that is late on its device has issued other calls behind the one that it is in.
            # If no rank is missing there, they are no reason why it does not go on.
            held = late if not wait.absent else ()
            for rank in [*wait.waiters, *wait.presumed]:
                if rank not in held:
                    self.in_wait.setdefault(rank, []).append(wait)
            for rank in wait.absent:
                self.waits_for.setdefault(rank, []).append(wait)

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


def _presume(wait: Wait, blind: Collection[int]) -> None:
    """Take ranks without records for victims if a rank with records has not arrived."""
    unseen = [rank for rank in wait.absent if rank in blind]
    if unseen and len(unseen) < len(wait.absent) and not wait.any_source:
        wait.absent = [rank for rank in wait.absent if rank not in blind]
        wait.presumed = unseen


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


# Ranks that others wait for and that wait for no other rank, and how processes ended.
#
# A process that fails takes the job with it: its peers' collectives fail, and the launcher ends the
# rest. If the job hangs, its own watchers may end it: the processes that they end were waiting, or
# were waited for. A launcher that a signal stops takes its node's ranks with it. In a job on
# several nodes those may be the first to end, for example on a node that is preempted.


# Exit codes of processes that a launcher or a person ended: the signal, or 128 + n.
_ASKED = (-2, -15, 130, 143)
_KILLED = (-9, 137)
_KILLED_LATER_S = 20.0  # torchrun sends SIGKILL 30 s after SIGTERM
_AT_ONCE_S = 0.02  # processes that get a signal together end within that time
# A process that stood still for long and then ended was ended with the whole job, and so were those
# that ended at that time.
_TOGETHER_S = 1.0
BEATS_S = 1.5  # three heartbeats: times of death without a noted end are no more exact
# A heartbeat comes twice a second. If it is this old, and older than half of the time that the
# others have waited, it stopped when the waiting began. Otherwise the machine is only busy.
FROZEN_S, FROZEN_SHARE = 2.5, 0.5


@dataclass
class Exits:
    """The ranks whose processes are gone, by the reason."""

    own: set[int] = field(default_factory=set)  # of a signal or an error of their own
    left: set[int] = field(default_factory=set)  # they ended well
    first_s: float | None = None  # since the first of ``own`` ended
    together: set[int] = field(default_factory=set)  # ended at the same time, without a note of how


def exits_of(snapshot: Snapshot, victims: Collection[int]) -> Exits:
    """Sort the ranks that are gone by the reason.

    A collective failed on ``victims``, so the error that ended them is not their own.
    """
    gone = [state for state in snapshot.ranks if state.state == GONE]
    exits = Exits(left={state.rank for state in gone if _ended_well(state)})
    rest = [state for state in gone if state.rank not in exits.left and state.rank not in victims]
    ends = sorted((_ago(state) for state in gone if state.rank not in exits.left), reverse=True)
    live = snapshot.live
    known = [state for state in snapshot.ranks if not state.blind]
    last = min((state.silent_s for state in known), default=0.0)
    frozen_s = FROZEN_S + min((state.mute_s for state in known), default=0.0)
    ends_of_stopped = [_ago(state) for state in gone if _was_stopped(state, frozen_s)]
    first_failure = max((_ago(state) for state in gone if state.failure), default=0.0)
    for state in rest:
        ended_with_stopped = any(abs(_ago(state) - end) < _TOGETHER_S for end in ends_of_stopped)
        with_stopped = ended_with_stopped and state.exit in (None, *_KILLED, *_ASKED)
        if state.aborted or state.ended_by_launcher or with_stopped:
            own = False
        elif state.exit is None:
            own = bool(state.failure) or live or state.silent_s > last + BEATS_S
        elif state.exit > 0 and not state.failure and first_failure - _ago(state) > _AT_ONCE_S:
            own = False  # after another rank's exception, its launcher has asked it to end
        elif state.exit in _ASKED:
            own = _ago(state) == ends[0] and (len(ends) == 1 or ends[0] - ends[1] > _AT_ONCE_S)
        else:
            own = state.exit not in _KILLED or ends[0] - _ago(state) < _KILLED_LATER_S
        if own:
            exits.own.add(state.rank)
    ended_with_launcher = {state.rank for state in gone if state.launcher_signal}
    if ended_with_launcher and _cut_off(snapshot, ended_with_launcher, exits.own):
        exits.own |= ended_with_launcher
    exits.together = _together(snapshot, victims) - exits.own
    if exits.own:
        exits.first_s = max(_ago(snapshot.ranks[rank]) for rank in exits.own)
    return exits


def _was_stopped(state: RankState, frozen_s: float) -> bool:
    """Tell whether a process gave no sign of life for long before it ended, unlike the others.

    It existed all that time: something stopped it, and its end is that of the whole job.
    """
    return state.mute_s > frozen_s and state.exit in (None, *_KILLED, *_ASKED)


def _cut_off(
    snapshot: Snapshot, ended_with_launcher: Collection[int], own: Collection[int]
) -> bool:
    """Tell whether ranks that ended with their launcher left others behind, as on a lost node.

    If all ranks ended that way, or ended well, the job was ended on purpose.
    """
    rest = [state for state in snapshot.ranks if state.rank not in ended_with_launcher]
    first = max(_ago(snapshot.ranks[rank]) for rank in ended_with_launcher)
    behind = any(
        state.state in (ALIVE, STOPPED)
        or (state.exit not in (None, 0) and not state.ended_by_launcher)
        for state in rest
    )
    return behind and all(_ago(snapshot.ranks[rank]) <= first for rank in own)


def _together(snapshot: Snapshot, victims: Collection[int]) -> set[int]:
    """Return the ranks that cannot go on and have no noted end; in a copy, they may have ended."""
    if snapshot.live or snapshot.dumped:
        return set()
    return {
        state.rank
        for state in snapshot.ranks
        if state.state in (GONE, UNKNOWN)
        and state.exit is None
        and not state.ended_by_launcher
        and state.rank not in victims
        and not (state.closed or state.aborted or state.blind)
    }


def _ended_well(state: RankState) -> bool:
    """Tell whether a process came to the end of its program, as far as is known.

    A ring that was closed before that is of a program that an exception ended, or that called
    ``rankcall.disable``.
    """
    return state.exit == 0 or (state.exit is None and state.closed and not state.failure)


def _ago(state: RankState) -> float:
    return state.gone_s if state.gone_s is not None else state.silent_s


@dataclass
class Suspects:
    """All that is known when the ranks that hold others up are classified."""

    snapshot: Snapshot
    graph: WaitGraph
    exits: Exits
    hang_after: float
    clashing: Collection[int]  # ranks in a call whose members do not agree
    explained: Callable[[Wait], bool]  # whether a disagreement explains a wait
    halted: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.halted = halted_ranks(self.snapshot, self.graph, self.exits)

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank's program has ended well, or is ending."""
        return rank in self.exits.left or self.snapshot.ranks[rank].leaving

    def overdue(self, waits: Iterable[Wait]) -> list[Wait]:
        """Return the overdue waits behind some waits, but not those of halted ranks alone."""
        reached = [wait for wait in self.graph.reach(waits) if wait.hung]
        return [wait for wait in reached if not self.halted.issuperset(wait.waiters)]


@dataclass
class Suspect:
    """One rank that others wait for and that waits for no other rank, with the waits for it."""

    state: RankState
    waits: list[Wait]

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.state.rank

    @property
    def longest(self) -> Wait | None:
        """The wait for it that has lasted longest."""
        return max(self.waits, key=lambda wait: wait.age_s, default=None)


@dataclass
class Case(Suspect):
    """A suspect with the kind of verdict that fits it."""

    kind: CulpritKind
    confidence: str


class CulpritKind(Protocol):
    """The part of a kind of verdict that classifies one rank."""

    may_have_skipped: bool
    """Whether the rank may be out of step with the others: its calls are compared with theirs."""

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Return how sure it is that this kind fits a suspect; None if it does not."""

    def counts(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether a case is a cause that must be reported."""


def culprit_cases(suspects: Suspects, kinds: Sequence[CulpritKind]) -> list[Case]:
    """Return all ranks that hold others up. The first kind that fits a rank classifies it."""
    cases = []
    for rank in _candidates(suspects):
        if suspects.snapshot.ranks[rank].may_be_silent(suspects.hang_after):
            continue
        case = _case(suspects, rank, kinds)
        if case is not None and case.kind.counts(suspects, case):
            cases.append(case)
    return cases


def _candidates(suspects: Suspects) -> list[int]:
    """Return the ranks that are waited for and do not wait themselves, and the halted ranks."""
    absent: set[int] = set()
    for wait in suspects.graph.waits:
        absent.update(rank for rank in wait.absent if not suspects.graph.blocked(rank))
    return sorted(absent | suspects.halted)


def _case(suspects: Suspects, rank: int, kinds: Sequence[CulpritKind]) -> Case | None:
    graph, halted = suspects.graph, suspects.halted
    waits = list(graph.waits_for.get(rank, ()))
    if rank in halted:
        # A halted rank also holds up the calls that it has arrived at, but not those in which all
        # other ranks are halted, too.
        waits = list({id(wait): wait for wait in [*waits, *graph.joined(rank)]}.values())
        waits = [wait for wait in waits if not halted.issuperset(wait.waiters)] or waits
    suspect = Suspect(suspects.snapshot.ranks[rank], waits)
    for kind in kinds:
        confidence = kind.confidence(suspects, suspect)
        if confidence is not None:
            return Case(suspect.state, waits, kind, confidence)
    return None


def halted_ranks(snapshot: Snapshot, graph: WaitGraph, exits: Exits) -> set[int]:
    """Return the ranks that cannot go on in any call: dead, stopped, or without a sign of life."""
    frozen_s = frozen_after_s(graph.waits)
    halted = {
        state.rank for state in snapshot.ranks if state.state == STOPPED or _still(state, frozen_s)
    }
    return halted | exits.own


def frozen_after_s(waits: Iterable[Wait]) -> float:
    """Return the age, in s, from which a heartbeat counts as frozen beside some waits."""
    return max(FROZEN_S, FROZEN_SHARE * max((wait.age_s for wait in waits), default=0.0))


def _still(state: RankState, frozen_s: float) -> bool:
    """Tell whether a process that still exists gives no sign of life."""
    frozen = state.silent_s > frozen_s and not state.closed
    return frozen and not state.blind and state.state != GONE
