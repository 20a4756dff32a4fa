"""The evidence that verdicts rest on.

For a hang it is the calls that are overdue, and the waits behind them (``HangEvidence``). It is
worked out once for a snapshot, and every kind of verdict that can be behind a hang reads it. For a
job that goes on it is the newest calls, lined up (``RecentCalls``): they show slow ranks and links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import (
    CollectiveTable,
    Columns,
    HostClock,
    Ints,
    MessageTable,
    RankCollectives,
    RankMessages,
    Session,
    align_hosts,
    collective_table,
    message_table,
)
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    P2P,
    Bools,
    Calls,
    Snapshot,
    failed_for_good,
    invalid_calls,
    median_step_s,
    unfinished,
)
from rankcall.analysis.verdicts.disagreements import Disagreement, disagreements_in, off_by_n
from rankcall.analysis.verdicts.wait_graph import (
    BEATS_S,
    BLOCKING,
    Case,
    CulpritKind,
    Cycle,
    Exits,
    Suspects,
    Wait,
    WaitGraph,
    culprit_cases,
    cycles_in,
    exits_of,
    waits_of,
)
from rankcall.record import OPS, SYNCHRONISING, bandwidth_sizes

HANG_AFTER_S = 60.0
FIRST_STEP = 5.0  # the first step may take so many times longer
LONG_STEPS = 10.0  # a later call may take so many times the median step
# A call in flight for this part of the threshold is followed to the ranks that it waits for. It
# began with the trouble, or somewhat later; a shorter call may be on its way.
_FOLLOWED = 0.1
# Beside a call that hangs, another one that the same hang does not hold up counts at this part of
# its patience: two troubles seldom begin at the same moment, and the first verdict is the one read.
_BESIDE = 0.5
_COMPARED = 64  # ranks whose calls are compared with those of the ranks that wait for them

Floats = npt.NDArray[np.float64]


@dataclass
class HangEvidence:
    """The waits of a job, and their likely causes. All lists are empty if nothing hangs."""

    snapshot: Snapshot
    hang_after: float
    in_flight: Bools  # by call
    graph: WaitGraph
    exits: Exits
    disagreements: list[Disagreement]
    cycles: list[Cycle]  # that no disagreement explains
    cases: list[Case]  # ranks that others wait for and that wait for no other rank

    @property
    def stuck(self) -> Wait | None:
        """The longest overdue wait that all members have arrived at."""
        stuck_waits = [
            wait for wait in self.graph.waits if wait.hung and not wait.absent and not wait.soft
        ]
        return max(stuck_waits, key=lambda wait: wait.age_s, default=None)


def hang_evidence(
    snapshot: Snapshot, hang_after: float, kinds: Sequence[CulpritKind]
) -> HangEvidence:
    """Follow the calls that are in flight for long to the ranks that they wait for.

    Args:
        snapshot: Where the ranks stand.
        hang_after: How long a call must be in flight before it counts as hung, in s. It is five
            times that in the first step, and at least ten times the median step later; half as
            long beside a call that hangs. If all processes are gone, all calls that never ended
            count, unless they had only just begun.
        kinds: The kinds that classify ranks, in order.
    """
    calls = snapshot.calls
    in_flight, invalid = unfinished(calls), invalid_calls(calls)
    failed = failed_for_good(calls) & ~invalid
    in_flight &= ~_left_behind(snapshot)
    allowed = np.full(len(calls), _just_begun_s(snapshot, hang_after))
    if snapshot.dumped:
        allowed[:] = 0.0  # calls that had only just begun are abandoned in dumps
    if snapshot.live:
        allowed = patience(snapshot, hang_after)
    lasted = held_for(snapshot)
    hung = in_flight & (lasted >= allowed)
    if hung.any():
        hung = in_flight & (lasted >= allowed * _BESIDE)
    hung |= failed
    followed = hung | (in_flight & (lasted >= allowed * (_FOLLOWED if snapshot.live else 0.0)))
    blind = {state.rank for state in snapshot.ranks if state.blind}
    graph = WaitGraph(waits_of(snapshot, followed, hung), blind)
    exits = exits_of(snapshot, {int(rank) for rank in calls["rank"][failed]})
    clashes = [
        clash
        for clash in disagreements_in(snapshot, in_flight | failed)
        if not _after_the_stop(snapshot, clash)
    ]
    clashing = {int(rank) for clash in clashes if clash.open for rank in calls["rank"][clash.rows]}
    explained = _Explained(snapshot, clashes)
    suspects = Suspects(snapshot, graph, exits, hang_after, clashing, explained)
    cycles = cycles_in(graph.waits, suspects.halted)
    cycles = [cycle for cycle in cycles if _is_cause(cycle, explained)]
    cases = culprit_cases(suspects, kinds)
    shifts = _shifts(snapshot, cases, cycles)
    if shifts:
        clashes += shifts
        suspects.explained = explained = _Explained(snapshot, clashes)
        cycles = [cycle for cycle in cycles if _is_cause(cycle, explained)]
        cases = culprit_cases(suspects, kinds)
    return HangEvidence(snapshot, hang_after, in_flight, graph, exits, clashes, cycles, cases)


def patience(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call may be in flight, in s.

    A rank is in its first step while it has finished no step and the call in flight is the first
    one from its line. A rank may take any time in a phase that it declared to take long.
    """
    calls = snapshot.calls
    later = max(float(hang_after), LONG_STEPS * median_step_s(snapshot))
    allowed = np.full(len(calls), later)
    stepless = np.array([state.steps == 0 for state in snapshot.ranks], bool)[calls["rank"]]
    done = calls["status"] == COMPLETED
    line = calls["rank"].astype(np.int64) * (len(snapshot.sites) + 1) + calls["site"]
    seen = np.isin(line, line[done]) & (calls["site"] > 0)
    allowed[stepless & ~seen] = FIRST_STEP * hang_after
    declared = np.array([state.may_be_silent(hang_after) for state in snapshot.ranks], bool)
    allowed[declared[calls["rank"]]] = np.inf
    return allowed


def followed_after(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call must be in flight before it is followed, in s."""
    return np.minimum(patience(snapshot, hang_after), hang_after) * _FOLLOWED


def held_for(snapshot: Snapshot) -> Floats:
    """Return how long each call has held its rank up, in s.

    A message that was issued to be waited for later does not hold a rank up while the rank goes on.
    """
    calls = snapshot.calls
    held = np.full(len(calls), np.inf)
    blocking = [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]
    loose = (calls["kind"] == P2P) & ~np.isin(calls["site"], blocking)
    if loose.any() and snapshot.live:
        quiet = np.full(len(snapshot.ranks), np.inf)
        recent = np.fmin(calls["age_s"], calls["ended_s"])
        np.minimum.at(quiet, calls["rank"], recent)
        held[loose] = quiet[calls["rank"][loose]]
    lasted: Floats = np.minimum(calls["age_s"], held)
    return lasted


def _left_behind(snapshot: Snapshot) -> Bools:
    """Return which calls are of ranks that ended well: no rank waits for their ends any more."""
    closed = np.array([state.closed or state.exit == 0 for state in snapshot.ranks], bool)
    left_behind: Bools = closed[snapshot.calls["rank"]]
    return left_behind


def _after_the_stop(snapshot: Snapshot, clash: Disagreement) -> bool:
    """Tell whether a member issued its call after its launcher had got a signal to stop.

    A program may issue calls of its own then, for example to save what it has.
    """
    calls = snapshot.calls[clash.rows]
    signal_ages = [snapshot.ranks[rank].told_s for rank in calls["rank"]]
    return any(
        since is not None and age <= since
        for since, age in zip(signal_ages, calls["age_s"].tolist(), strict=True)
    )


def _just_begun_s(snapshot: Snapshot, hang_after: float) -> float:
    """Return the age from which a call of a dead run counts, in s.

    A sound job that is killed leaves some ranks in a call that others had not arrived at yet. That
    takes no longer than a step, and the time of the end is known to three heartbeats.
    """
    return min(max(BEATS_S, median_step_s(snapshot)), hang_after)


def _shifts(
    snapshot: Snapshot, cases: Sequence[Case], cycles: Sequence[Cycle]
) -> list[Disagreement]:
    """Return the shifts behind ranks that did not arrive, one for each group."""
    pairs = [
        (case.longest, case.rank)
        for case in cases
        if case.longest is not None and case.kind.may_have_skipped
    ]
    pairs += [
        (wait, rank)
        for cycle in cycles
        for wait in cycle.waits
        for rank in wait.absent
        if rank in cycle.ranks
    ]
    shifts: dict[int, Disagreement] = {}
    for wait, rank in pairs[:_COMPARED]:
        shift = off_by_n(snapshot, wait, rank)
        if shift is not None:
            shifts.setdefault(shift.group, shift)
    return list(shifts.values())


class _Explained:
    """Tells which waits a disagreement explains: its group never gets in step again."""

    def __init__(self, snapshot: Snapshot, clashes: Sequence[Disagreement]) -> None:
        self._from: dict[int, int] = {}
        self._ends: set[tuple[int, int, int, int]] = set()
        for clash in clashes:
            if clash.message:
                calls = snapshot.calls[clash.rows]
                self._ends.update(
                    (clash.group, int(call["rank"]), int(call["tag"]), clash.seq) for call in calls
                )
            elif clash.open or clash.order_differs:
                self._from[clash.group] = clash.seq

    def __call__(self, wait: Wait) -> bool:
        if wait.channel is None:
            return wait.seq >= self._from.get(wait.group, wait.seq + 1)
        return (wait.group, wait.waiters[0], wait.channel.tag, wait.seq) in self._ends


def _is_cause(cycle: Cycle, explained: _Explained) -> bool:
    return any(wait.hung for wait in cycle.waits) and not any(map(explained, cycle.waits))


SYNC = np.array([name in SYNCHRONISING for name in OPS])
_RECENT = 384  # calls of a rank
_S = 1e9
_ONE_LIFE = Session(0, 0)


@dataclass
class RecentCalls:
    """Each rank's newest calls, as a snapshot and by group, on clocks that agree."""

    snapshot: Snapshot
    tables: list[CollectiveTable]
    messages: list[MessageTable]
    clocks: list[HostClock]
    step_begins: list[Ints]  # by rank, aligned ns
    span: tuple[int, int]  # the first arrival and the last end, aligned ns

    @property
    def seconds(self) -> float:
        """The time on record."""
        return (self.span[1] - self.span[0]) / _S


def recent_calls(snapshot: Snapshot) -> RecentCalls:
    """Line up each rank's newest calls. Older ones say nothing about what is slow now."""
    calls = snapshot.calls
    if len(calls):
        newest = np.zeros(int(calls["rank"].max()) + 1, np.int64)
        np.maximum.at(newest, calls["rank"], calls["index"])
        calls = calls[calls["index"] > newest[calls["rank"]] - _RECENT]
    return _line_up(replace(snapshot, calls=calls))


def _line_up(snapshot: Snapshot) -> RecentCalls:
    """Line up all calls by group, with clocks that make hosts' times comparable.

    Ages become ns since the oldest call of all, by each host's own moment. The offset between two
    hosts' moments follows from the ends of the collectives that they share.
    """
    calls = snapshot.calls
    host_of, clocks = _clocks(snapshot)
    if not len(calls):
        return RecentCalls(snapshot, [], [], clocks, [], (0, 0))
    oldest = float(calls["age_s"].max()) + 1.0
    parts: dict[int, list[RankCollectives]] = {}
    for piece in _by_group(calls[calls["kind"] == COLLECTIVE]):
        group = int(piece["group"][0])
        ranks = snapshot.groups[group].ranks
        parts.setdefault(group, []).append(_part(piece, ranks, host_of, oldest))
    tables = [
        collective_table(_ONE_LIFE, snapshot.groups[key], group_parts)
        for key, group_parts in parts.items()
    ]
    align_hosts(clocks, tables)
    message_parts: dict[int, list[RankMessages]] = {}
    for piece in _by_group(calls[calls["kind"] == P2P]):
        group = int(piece["group"][0])
        ranks = snapshot.groups[group].ranks
        message_parts.setdefault(group, []).append(_messages(piece, ranks, host_of, oldest))
    messages = [
        message_table(_ONE_LIFE, snapshot.groups[key], group_parts)
        for key, group_parts in message_parts.items()
    ]
    return RecentCalls(
        snapshot, tables, messages, clocks, *_times(snapshot, host_of, clocks, oldest)
    )


def _by_group(calls: Calls) -> list[Calls]:
    """Return calls by group and rank, each by ascending seq."""
    if not len(calls):
        return []
    calls = calls[np.lexsort((calls["seq"], calls["rank"], calls["group"]))]
    keys = np.stack([calls["group"], calls["rank"]])
    cuts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    return list(np.split(calls, cuts))


def _times(
    snapshot: Snapshot, host_of: list[int], clocks: list[HostClock], oldest: float
) -> tuple[list[Ints], tuple[int, int]]:
    """Return when each rank began its steps, and the first arrival and the last end of all."""
    begins, first, last = [], [], []
    calls = snapshot.calls[np.lexsort((snapshot.calls["index"], snapshot.calls["rank"]))]
    for rank in np.unique(calls["rank"]).tolist():
        mine = calls[calls["rank"] == rank]
        clock = clocks[host_of[rank]]
        came = clock.align(_ns(oldest - mine["age_s"]))
        new = np.concatenate([[True], mine["step"][1:] > mine["step"][:-1]])
        begins.append(came[new])
        ended = mine["ended_s"][~np.isnan(mine["ended_s"])]
        first.append(int(came.min()))
        last.append(int(clock.align(_ns(oldest - ended)).max()) if len(ended) else int(came.max()))
    return begins, (min(first), max(last))


def _ns(seconds: npt.NDArray[np.float64]) -> Ints:
    return np.rint(seconds * _S).astype(np.int64)


def _messages(
    calls: Calls, ranks: tuple[int, ...], host_of: list[int], oldest: float
) -> RankMessages:
    """Return one rank's messages in one group."""
    rank = int(calls["rank"][0])
    local = {member: number for number, member in enumerate(ranks)}
    came = _ns(oldest - calls["came_s"])
    columns: Columns = {name: calls[name] for name in ("seq", "tag", "op")}
    columns["peer"] = np.array([local.get(peer, -1) for peer in calls["peer"].tolist()], np.int32)
    columns["arrival"] = columns["started"] = came
    columns["completed"] = _ns(np.nan_to_num(oldest - calls["ended_s"]))
    columns["bytes"], columns["size"] = calls["message_bytes"], calls["message_bytes"] * 1.0
    columns["own"] = np.full(len(calls), local[rank], np.int32)
    return RankMessages(rank, host_of[rank], columns)


def _clocks(snapshot: Snapshot) -> tuple[list[int], list[HostClock]]:
    numbers: dict[str, int] = {}
    host_of = [numbers.setdefault(state.host, len(numbers)) for state in snapshot.ranks]
    return host_of, [HostClock(name, 0) for name in numbers]


def _part(
    calls: Calls, ranks: tuple[int, ...], host_of: list[int], oldest: float
) -> RankCollectives:
    """Return one rank's calls in one group. A seq that occurs twice is damage, and left out."""
    calls = calls[np.concatenate([[True], calls["seq"][1:] > calls["seq"][:-1]])]
    rank = int(calls["rank"][0])
    came = _ns(oldest - calls["came_s"])
    ended = _ns(np.nan_to_num(oldest - calls["ended_s"]))
    columns: Columns = {name: calls[name] for name in ("op", "in_bytes", "out_bytes")}
    columns["message_bytes"] = calls["message_bytes"]
    local = {member: number for number, member in enumerate(ranks)}
    roots = {root: local.get(root, -1) for root in np.unique(calls["root"]).tolist()}
    agreed = {
        "op": calls["op"],
        "root": np.array([roots[root] for root in calls["root"].tolist()], np.int32),
        "size": bandwidth_sizes(columns, len(ranks)),
        "bytes": calls["message_bytes"],
    }
    return RankCollectives(rank, host_of[rank], calls["seq"], came, came, ended, agreed)
