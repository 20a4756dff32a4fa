"""Waits that no time can end: a verdict on them needs no patience.

A call that lasts is no proof that a job hangs, so verdicts wait for ``hang_after``. Three kinds of
wait can be proved at once, from what the ranks have recorded:

* All members of a group are in one call, and do not agree on the op, the size or the root.
* A rank that has not come to a call never will: its process is gone, or an exception has ended its
  program. Or it died in the call, some time ago, and the others are still in it.
* Ranks wait for each other in a circle. The thread that would issue the call for which the next
  rank waits is blocked itself: it is in a function that returns only when its own call has ended.

Rings are read one after the other, so one reading can show a moment that never was. A proof holds
if two readings have it: it names the records, which then were in flight from the end of the first
reading to the begin of the second one. What is left to the threshold: calls of which one member is
not seen, messages of different sizes (back ends may let them through), differences of dtype or
reduce op (these end, with wrong results), processes that are stopped or wait for a disk (these may
go on), and every circle in which another thread may still come to the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.snapshot import (
    ALIVE,
    BLOCKS,
    COLLECTIVE,
    GONE,
    P2P,
    RECV,
    SEND,
    Bools,
    Calls,
    Snapshot,
    failed_for_good,
    not_started,
    unfinished,
)
from rankcall.analysis.verdicts.arrivals import waits_of
from rankcall.analysis.verdicts.disagreements import places_that_differ
from rankcall.analysis.verdicts.ends import Exits, exits_of, has_failed
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.wait import Rows, Wait
from rankcall.analysis.verdicts.wait_graph import cycles_in
from rankcall.record import FLAG_DEVICE, OPS, SYNCHRONISING, TO_ROOT
from rankcall.ring.tables import JOIN

# A call that began a moment ago is one that is being issued just now.
_BEGUN_S = 0.2
# A back end may let a call through whose members differ in the size, and then needs time for it. No
# link that is in use is slower than this, in bytes per second.
_SLOWEST = 10e6
# The others see the end of a process at once, or what it had sent before is enough for them. Ends
# of calls on devices are noticed two seconds late.
_SINCE_DEATH_S, _SINCE_DEATH_ON_DEVICE_S = 1.0, 4.0
_NEVER_AGREE = {"op", "size", "root"}
_SYNCHRONISING = frozenset(OPS.index(name) for name in SYNCHRONISING)
_TO_ROOT = frozenset(OPS.index(name) for name in TO_ROOT)

DIFFER, ENDED, CIRCLE = "differ", "ended", "circle"


class Proof(NamedTuple):
    """Why some calls never end.

    Attributes:
        why: ``DIFFER``, ``ENDED`` or ``CIRCLE``.
        group: The label of the group of the first call.
        ranks: The ranks that have ended, or that are in the circle; all members that differ.
        calls: The calls in flight, each as its rank and its index there.
    """

    why: str
    group: str
    ranks: tuple[int, ...]
    calls: frozenset[tuple[int, int]]


Proofs = frozenset[Proof]


def proofs_in(snapshot: Snapshot) -> Proofs:
    """Return the proofs of one reading. They hold if a later reading has them as well."""
    if (
        not snapshot.live
        or snapshot.mixed
        or snapshot.dumped
        # Calls of a group that is not known are left out, so a rank seems not to have come.
        or any(state.tables_lost for state in snapshot.ranks)
        # The job is being ended, and ranks may end one after the other.
        or any(state.told_s is not None or state.aborted for state in snapshot.ranks)
    ):
        return frozenset()
    calls = snapshot.calls
    in_flight = unfinished(calls) & (calls["age_s"] >= _BEGUN_S)
    if not in_flight.any():
        return frozenset()
    exits = exits_of(snapshot, set(calls["rank"][failed_for_good(calls)].tolist()))
    waits = [
        wait
        for wait in waits_of(snapshot, in_flight, in_flight, not_started(snapshot.calls))
        if not (wait.soft or wait.any_source or wait.behind or wait.unstarted)
    ]
    return frozenset(
        [
            *_differing(snapshot, in_flight),
            *_for_ended_ranks(snapshot, exits, waits),
            *_died_inside(snapshot, exits, waits),
            *_circles(snapshot, waits),
        ]
    )


def rows_of(snapshot: Snapshot, proofs: Proofs) -> Bools:
    """Return which calls of a snapshot the proofs are about."""
    named = {call for proof in proofs for call in proof.calls}
    calls = zip(snapshot.calls["rank"].tolist(), snapshot.calls["index"].tolist(), strict=True)
    return np.array([call in named for call in calls], bool)


def is_proved(finding: Finding, proofs: Proofs) -> bool:
    """Tell whether a finding says what a proof shows, and blames no other rank."""
    ranks = set(finding.ranks)
    if finding.kind in ("mismatch", "desync"):
        return any(proof.why == DIFFER and proof.group == finding.group for proof in proofs)
    if finding.kind in ("dead", "exhausted"):
        ended = {rank for proof in proofs if proof.why == ENDED for rank in proof.ranks}
        return bool(ranks) and ended.issuperset(ranks)
    return finding.kind == "deadlock" and any(
        proof.why == CIRCLE and ranks == set(proof.ranks) for proof in proofs
    )


def _proof(snapshot: Snapshot, why: str, ranks: Iterable[int], rows: Iterable[int]) -> Proof:
    calls, numbers = snapshot.calls, list(rows)
    return Proof(
        why,
        snapshot.labels[int(calls["group"][numbers[0]])],
        tuple(sorted(ranks)),
        frozenset((int(calls["rank"][row]), int(calls["index"][row])) for row in numbers),
    )


def _differing(snapshot: Snapshot, in_flight: Bools) -> Iterator[Proof]:
    """Yield the calls that all members of a group are in, and in which they differ."""
    calls = snapshot.calls
    rows = np.flatnonzero(in_flight & (calls["kind"] == COLLECTIVE))
    rows = rows[calls["flags"][rows] & FLAG_DEVICE == 0]
    if not len(rows):
        return
    rows = rows[np.lexsort((calls["rank"][rows], calls["seq"][rows], calls["group"][rows]))]
    for piece, differing in places_that_differ(calls, rows):
        members = snapshot.groups[int(calls["group"][piece[0]])].ranks
        if len(piece) != len(members) or set(calls["rank"][piece].tolist()) != set(members):
            continue
        # A Join answers the calls of others for a rank without inputs, as well as it can.
        by_join = JOIN in {snapshot.api(int(site)) for site in calls["site"][piece]}
        if by_join or _NEVER_AGREE.isdisjoint(differing):
            continue
        columns = [calls[name][piece].max() for name in ("message_bytes", "in_bytes", "out_bytes")]
        if calls["age_s"][piece].min() >= _BEGUN_S + float(max(columns)) / _SLOWEST:
            yield _proof(snapshot, DIFFER, members, piece.tolist())


def _for_ended_ranks(snapshot: Snapshot, exits: Exits, waits: Iterable[Wait]) -> Iterator[Proof]:
    """Yield the calls to which a rank that has ended did not come."""
    ended = [rank for rank in _ended(snapshot, exits) if not snapshot.ranks[rank].blind]
    for wait in waits:
        if not ended or not _needs_all(snapshot, wait):
            continue
        for rank in set(ended).intersection(wait.absent):
            if _is_seen_before(snapshot, wait, rank):
                rows = _rows_of(snapshot, wait, exclude=ended)
                if rows:
                    yield _proof(snapshot, ENDED, [rank], rows)


def _died_inside(snapshot: Snapshot, exits: Exits, waits: Iterable[Wait]) -> Iterator[Proof]:
    """Yield the calls in which a process has died some time ago, and in which others still are."""
    calls = snapshot.calls
    for wait in waits:
        on_device = bool((calls["flags"][wait.rows] & FLAG_DEVICE).any())
        settled_s = _SINCE_DEATH_ON_DEVICE_S if on_device else _SINCE_DEATH_S
        dead = [
            rank
            for rank in exits.own.intersection(wait.waiters)
            if (snapshot.ranks[rank].gone_s or 0.0) >= settled_s
        ]
        if wait.channel is None and not wait.absent and dead:
            rows = _rows_of(snapshot, wait, exclude=exits.own)
            if rows:
                yield _proof(snapshot, ENDED, dead, rows)


def _ended(snapshot: Snapshot, exits: Exits) -> list[int]:
    """Return the ranks that issue no more calls, and whose records say which they had issued."""
    gone = exits.own | exits.left
    return [
        state.rank
        for state in snapshot.ranks
        if has_failed(state)
        # A rank that stopped recording long before its end may have come to the call.
        or (state.state == GONE and state.rank in gone and (state.leaving or not state.closed))
    ]


def _needs_all(snapshot: Snapshot, wait: Wait) -> bool:
    """Tell whether every absent rank is needed: a member that only sends may leave without it."""
    if wait.channel is not None:
        return True
    call = snapshot.calls[wait.rows[0]]
    op, root = int(call["op"]), int(call["root"])
    return op in _SYNCHRONISING or root in (wait.waiters if op in _TO_ROOT else wait.absent)


def _is_seen_before(snapshot: Snapshot, wait: Wait, rank: int) -> bool:
    """Tell whether a rank's records show that it did not come: they reach back to that group.

    Without an earlier call there, the one in question may have been overwritten.
    """
    return snapshot.ranks[rank].dropped == 0 or bool(len(_earlier(snapshot, wait, rank)))


def _earlier(snapshot: Snapshot, wait: Wait, rank: int) -> Rows:
    """Return a rank's calls on record that come before its part in a wait."""
    calls = snapshot.calls
    mine = (calls["rank"] == rank) & (calls["group"] == wait.group)
    channel = wait.channel
    if channel is None:
        return np.flatnonzero(mine & (calls["kind"] == COLLECTIVE) & (calls["seq"] < wait.seq))
    op, peer = (SEND, channel.target) if rank == channel.source else (RECV, channel.source)
    mine &= (calls["kind"] == P2P) & (calls["op"] == op) & (calls["peer"] == peer)
    return np.flatnonzero(mine & (calls["tag"] == channel.tag) & (calls["seq"] < wait.seq))


def _rows_of(snapshot: Snapshot, wait: Wait, exclude: Collection[int]) -> list[int]:
    """Return the rows of the waiting calls of processes that live."""
    return [
        row
        for row in wait.rows.tolist()
        if int(snapshot.calls["rank"][row]) not in exclude
        and snapshot.ranks[int(snapshot.calls["rank"][row])].state == ALIVE
    ]


def _circles(snapshot: Snapshot, waits: Iterable[Wait]) -> Iterator[Proof]:
    """Yield circles of threads each of which waits where it cannot go on.

    A rank may have several threads in calls, so it is not ranks that wait for each other.
    """
    calls = snapshot.calls
    held: dict[tuple[int, int], int] = {}  # rank and thread -> a number
    waiting = []
    for wait in waits:
        rows = [row for row in wait.rows.tolist() if _holds_thread(snapshot, row)]
        if rows and _needs_all(snapshot, wait):
            threads = [(int(calls["rank"][row]), int(calls["thread"][row])) for row in rows]
            waiting.append((wait, [held.setdefault(thread, len(held)) for thread in threads]))
    certain = []
    for wait, waiters in waiting:
        needed = [(rank, _only_thread(snapshot, wait, rank)) for rank in wait.absent]
        absent = [held[thread] for thread in needed if thread in held]
        if absent:
            certain.append(replace(wait, waiters=waiters, absent=absent))
    threads = list(held)
    for cycle in cycles_in(certain, ()):
        inside = {threads[number] for number in cycle.ranks}
        rows = [
            row
            for wait in cycle.waits
            for row in wait.rows.tolist()
            if (int(calls["rank"][row]), int(calls["thread"][row])) in inside
        ]
        yield _proof(snapshot, CIRCLE, {rank for rank, _ in inside}, rows)


def _holds_thread(snapshot: Snapshot, row: int) -> bool:
    """Tell whether the thread that issued a call waits for its end, as the record says."""
    call = snapshot.calls[row]
    runs = snapshot.ranks[int(call["rank"])].state == ALIVE
    if not runs or call["thread"] == 0 or call["flags"] & FLAG_DEVICE:
        return False
    if call["kind"] == P2P:
        return snapshot.api(int(call["site"])) in BLOCKING
    return bool(call["flags"] & BLOCKS)


def _only_thread(snapshot: Snapshot, wait: Wait, rank: int) -> int:
    """Return the thread from which all earlier calls of a rank in a wait's group or channel came.

    Its part in the wait can only come from there. 0: there is no such thread, or it is not known.
    Without an earlier call, any thread may issue the first.
    """
    threads: Calls = np.unique(snapshot.calls["thread"][_earlier(snapshot, wait, rank)])
    return int(threads[0]) if len(threads) == 1 else 0
